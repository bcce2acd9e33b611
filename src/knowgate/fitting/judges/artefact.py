"""What fitting IK and KBM share: base model, examples within the limit, training, the judge as gates will load it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from knowgate.fitting.examples import Examples
from knowgate.fitting.judges.trained_model import JudgeTraining, Lesson
from knowgate.fitting.judges.training import TrainedJudge, Watch, train_judge
from knowgate.fitting.steps import unwatched
from knowgate.gates import ADAPTER_FOLDER, Judge, adapter_digest, open_base, open_judge
from knowgate.prompts import packaged

if TYPE_CHECKING:
    from knowgate.models import HFModel

Lessons = Callable[[Judge, Sequence[int]], list[Lesson]]


@dataclass(frozen=True)
class JudgeFit:
    """A judge opened from its saved files, so that it scores as the gate will; and what the manifest says of it."""

    judge: Judge
    options: dict[str, Any]
    notes: list[str]
    files: dict[str, bytes] = field(repr=False)


def fit_judge(
    examples: Examples,
    labels: tuple[str, str],
    prompts: str,
    lessons: Lessons,
    *,
    base: str | None,
    training: JudgeTraining | None,
    work: Path,
    watch: Watch | None,
) -> JudgeFit:
    """Train on the train split, keep the best epoch of the dev split."""
    spec, chosen = base or str(examples.settings["model"]), training or JudgeTraining()
    taught = _teach(open_base(spec), examples, labels, lessons, chosen, work, watch or unwatched)
    options = {
        "base": spec,
        "base_fingerprint": taught.base_fingerprint,
        "wording": packaged(prompts).fingerprint,
        "labels": list(labels),
        "full": chosen.full,
        "max_tokens": chosen.max_tokens,
        "adapter_sha256": adapter_digest(taught.trained.folder),
    }
    notes = [*taught.trained.notes(), *_dropped(taught.dropped, chosen)]
    files = {f"{ADAPTER_FOLDER}/{name}": data for name, data in taught.trained.files.items()}
    return JudgeFit(open_judge(taught.trained.folder, options, prompts), options, notes, files)


class TeachingResult(NamedTuple):
    trained: TrainedJudge
    base_fingerprint: str
    dropped: int


def _teach(
    model: HFModel,
    examples: Examples,
    labels: tuple[str, str],
    lessons: Lessons,
    training: JudgeTraining,
    work: Path,
    watch: Watch,
) -> TeachingResult:
    """Apart from its caller, so that the trained model is let go of before the judge is opened from the files."""
    pupil, split = Judge(model, labels), examples.split
    train = within(lessons(pupil, split.train.tolist()), training.max_tokens)
    dev = within(lessons(pupil, split.dev.tolist()), training.max_tokens)
    trained = train_judge(model, train.kept, dev.kept, training, work, watch)
    return TeachingResult(trained, model.fingerprint, train.dropped + dev.dropped)


@dataclass(frozen=True)
class KeptLessons:
    kept: list[Lesson]
    dropped: int


def within(lessons: Sequence[Lesson], limit: int) -> KeptLessons:
    """Examples of at most so many tokens: longer ones would decide how much memory training takes."""
    kept = [lesson for lesson in lessons if len(lesson.cut.ids) <= limit]
    return KeptLessons(kept, len(lessons) - len(kept))


def _dropped(count: int, training: JudgeTraining) -> list[str]:
    return [f"{count} examples longer than {training.max_tokens} tokens were left out of training"] if count else []
