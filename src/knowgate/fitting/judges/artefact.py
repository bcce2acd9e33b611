"""What fitting IK, KBM and judges of answers share: base model, lessons within the limit, trainings, the judge as gates
will load it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

from knowgate.errors import BadInput
from knowgate.fitting.judges.crew import Member, unseen_mean
from knowgate.fitting.judges.lessons import Lesson, within
from knowgate.fitting.judges.schools import J, School
from knowgate.fitting.judges.training import TrainedJudge, Watch, train_judge
from knowgate.fitting.steps import unwatched
from knowgate.gates import ADAPTER_FOLDER, adapter_digest, adapter_folders
from knowgate.prompts import packaged
from knowgate.statistics import Floats

if TYPE_CHECKING:
    from knowgate.models import MarkedTokens

Lessons = Callable[[J, Sequence[int]], list[Lesson]]


@dataclass(frozen=True)
class JudgeFit(Generic[J]):
    """A judge opened from its saved files, so that it scores as the gate will; and what the manifest says of it."""

    judge: J
    members: Sequence[Member]
    options: dict[str, Any]
    notes: list[str]
    files: dict[str, bytes] = field(repr=False)

    @property
    def learnt(self) -> frozenset[int]:
        """Rows that taught some judge."""
        return frozenset().union(*(member.learnt for member in self.members))

    def known(self, cuts: Sequence[MarkedTokens], places: Sequence[int]) -> Floats:
        """P(known) of rows, by those who did not learn from them."""
        return unseen_mean(self.judge.votes(cuts), self.members, places)


def fit_judge(
    members: Sequence[Member],
    labels: tuple[str, str],
    prompts: str,
    lessons: Lessons[J],
    *,
    school: School[J],
    base: str,
    work: Path,
    watch: Watch | None,
) -> JudgeFit[J]:
    """Train every member on its rows, keeping what is best on its dev rows."""
    training = members[0].training
    taught = [
        teach(school, base, member, labels, lessons, _room(work, number, len(members)), watch or unwatched)
        for number, member in enumerate(members)
    ]
    folders = adapter_folders(work / ADAPTER_FOLDER, len(taught))
    for folder, one in zip(folders, taught, strict=True):
        _put(one.trained, folder)
    digests = [adapter_digest(folder) for folder in folders]
    options = {
        "base": base,
        "base_fingerprint": taught[0].base_fingerprint,
        "wording": packaged(prompts).fingerprint,
        "labels": list(labels),
        "full": training.full,
        "max_tokens": training.max_tokens,
        "adapter_sha256": digests[0],
        **school.options,
        **({"more_sha256": digests[1:]} if len(digests) > 1 else {}),
    }
    files = {
        f"{folder.name}/{name}": data
        for folder, one in zip(folders, taught, strict=True)
        for name, data in one.trained.files.items()
    }
    judge = school.open(folders[0], options, prompts)
    return JudgeFit(judge, members, options, _notes(taught), files)


@dataclass(frozen=True)
class TeachingResult:
    trained: TrainedJudge
    base_fingerprint: str
    dropped: int
    notes: tuple[str, ...] = ()


def teach(
    school: School[J],
    base: str,
    member: Member,
    labels: tuple[str, str],
    lessons: Lessons[J],
    work: Path,
    watch: Watch,
) -> TeachingResult:
    """One training. The model is let go of at the end: the judge is opened from the files."""
    begun, limit = school.begin(base, labels, member.training.seed), member.training.max_tokens
    train = within(lessons(begun.judge, member.train), limit)
    dev = within(lessons(begun.judge, member.dev), limit)
    _check_room(train.kept, train.dropped, limit)
    trained = train_judge(begun.pupil, train.kept, dev.kept, member.training, work, watch)
    return TeachingResult(trained, begun.pupil.fingerprint, train.dropped + dev.dropped, begun.notes)


def _check_room(kept: Sequence[Lesson], dropped: int, limit: int) -> None:
    if dropped and not kept:
        raise BadInput(
            f"there is no example to train on: all {dropped} are longer than {limit} tokens, the most that are trained "
            "with. Shorten what the judge reads."
        )


def _room(work: Path, number: int, count: int) -> Path:
    """One training is kept in the folder itself, as it always was; several in one each."""
    return work if count == 1 else work / f"member-{number}"


def _put(trained: TrainedJudge, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trained.folder, folder)


def _notes(taught: Sequence[TeachingResult]) -> list[str]:
    lines = list(taught[0].notes)
    for number, one in enumerate(taught):
        head = [f"judge {number + 1} of {len(taught)}, {one.trained.examples} examples:"] if len(taught) > 1 else []
        lines += [*head, *one.trained.notes()]
    dropped = sum(one.dropped for one in taught)
    limit = taught[0].trained.training.max_tokens
    return [*lines, *([f"{dropped} examples longer than {limit} tokens were left out of training"] if dropped else [])]
