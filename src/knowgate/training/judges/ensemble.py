"""What fitting IK, KBM and judges of answers share: base model, lessons within the limit, trainings, the judge as gates
will load it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.typing import NDArray

from knowgate.data.splits import Split, fingerprint_text, hash_to_unit
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.judges.causal_judge import ADAPTER_FOLDER, compute_adapter_digest, list_adapter_folders
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.fit_function import ignore_progress
from knowgate.training.judges.trainable_models import JudgeKind, JudgeType, TrainingExample, drop_long_examples
from knowgate.training.judges.trainer import JudgeProgressCallback, TrainedJudge, train_judge
from knowgate.training.judges.training_options import JudgeTrainingOptions

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens


SEEDS_HELP = "Judges to train and average."
FOLDS_HELP = "Or so many, each leaving a part out."
MAX_MEMBERS = 20


@dataclass(frozen=True)
class EnsembleMember:
    """One training: its settings, and the rows it learns from and stops by."""

    training: JudgeTrainingOptions
    train: tuple[int, ...]
    dev: tuple[int, ...]

    @property
    def learnt(self) -> frozenset[int]:
        return frozenset((*self.train, *self.dev))


def plan_ensemble(
    split: Split, training: JudgeTrainingOptions, seeds: int = 1, folds: int = 0, texts: Sequence[str] = ()
) -> list[EnsembleMember]:
    """So many seeds on the train split; or a judge for each fold of all rows, with no look at a dev split.

    texts: the questions, by which folds are made.
    """
    _check(seeds, folds)
    if not folds:
        rows = tuple(split.train.tolist()), tuple(split.dev.tolist())
        return [EnsembleMember(replace(training, seed=training.seed + number), *rows) for number in range(seeds)]
    part = assign_folds(texts, folds, training.seed)
    lasting = replace(training, checks=1, patience=0)
    return [
        EnsembleMember(replace(lasting, seed=training.seed + fold), tuple(np.flatnonzero(part != fold).tolist()), ())
        for fold in range(folds)
    ]


def assign_folds(texts: Sequence[str], folds: int, seed: int = 0) -> NDArray[np.int64]:
    """The fold of each question, by its hash: equal questions go together."""
    return np.array(
        [int(folds * hash_to_unit("fold", str(seed), fingerprint_text(text))) for text in texts], dtype=np.int64
    )


def average_unseen_votes(
    votes: Sequence[FloatArray], members: Sequence[EnsembleMember], places: Sequence[int]
) -> FloatArray:
    """For each row the mean vote of those who did not learn from it; of all where everybody did."""
    strange: BoolArray = np.array([[place not in member.learnt for place in places] for member in members], dtype=bool)
    strange |= ~strange.any(axis=0)
    mean: FloatArray = np.average(np.array(votes), axis=0, weights=strange)
    return mean


def _check(seeds: int, folds: int) -> None:
    if not 1 <= seeds <= MAX_MEMBERS:
        raise BadSetting(f"training: seeds is {seeds}; it must be 1 to {MAX_MEMBERS}.")
    if folds and not 2 <= folds <= MAX_MEMBERS:
        raise BadSetting(f"training: folds is {folds}; it must be 2 to {MAX_MEMBERS}, or 0 for none.")
    if folds and seeds > 1:
        raise BadSetting("training: give seeds or folds, not both: with folds every judge has its own seed already.")


ExampleFactory = Callable[[JudgeType, Sequence[int]], list[TrainingExample]]


@dataclass(frozen=True)
class FittedJudge(Generic[JudgeType]):
    """A judge opened from its saved files, so that it scores as the gate will; and what the manifest says of it."""

    judge: JudgeType
    members: Sequence[EnsembleMember]
    options: dict[str, Any]
    notes: list[str]
    files: dict[str, bytes] = field(repr=False)

    @property
    def learnt(self) -> frozenset[int]:
        """Rows that taught some judge."""
        return frozenset().union(*(member.learnt for member in self.members))

    def known(self, cuts: Sequence[LabelPromptTokens], places: Sequence[int]) -> FloatArray:
        """P(known) of rows, by those who did not learn from them."""
        return average_unseen_votes(self.judge.predict_members(cuts), self.members, places)


def fit_judge(
    members: Sequence[EnsembleMember],
    labels: tuple[str, str],
    prompts: str,
    lessons: ExampleFactory[JudgeType],
    *,
    school: JudgeKind[JudgeType],
    base: str,
    work: Path,
    watch: JudgeProgressCallback | None,
) -> FittedJudge[JudgeType]:
    """Train every member on its rows, keeping what is best on its dev rows."""
    training = members[0].training
    taught = [
        train_member(school, base, member, labels, lessons, _room(work, number, len(members)), watch or ignore_progress)
        for number, member in enumerate(members)
    ]
    folders = list_adapter_folders(work / ADAPTER_FOLDER, len(taught))
    for folder, one in zip(folders, taught, strict=True):
        _put(one.trained, folder)
    digests = [compute_adapter_digest(folder) for folder in folders]
    options = {
        "base": base,
        "base_fingerprint": taught[0].base_fingerprint,
        "wording": load_packaged_templates(prompts).fingerprint,
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
    return FittedJudge(judge, members, options, _notes(taught), files)


@dataclass(frozen=True)
class TrainedMember:
    trained: TrainedJudge
    base_fingerprint: str
    dropped: int
    notes: tuple[str, ...] = ()


def train_member(
    school: JudgeKind[JudgeType],
    base: str,
    member: EnsembleMember,
    labels: tuple[str, str],
    lessons: ExampleFactory[JudgeType],
    work: Path,
    watch: JudgeProgressCallback,
) -> TrainedMember:
    """One training. The model is let go of at the end: the judge is opened from the files."""
    begun, limit = school.begin(base, labels, member.training.seed), member.training.max_tokens
    train = drop_long_examples(lessons(begun.judge, member.train), limit)
    dev = drop_long_examples(lessons(begun.judge, member.dev), limit)
    _check_room(train.kept, train.dropped, limit)
    trained = train_judge(begun.pupil, train.kept, dev.kept, member.training, work, watch)
    return TrainedMember(trained, begun.pupil.fingerprint, train.dropped + dev.dropped, begun.notes)


def _check_room(kept: Sequence[TrainingExample], dropped: int, limit: int) -> None:
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


def _notes(taught: Sequence[TrainedMember]) -> list[str]:
    lines = list(taught[0].notes)
    for number, one in enumerate(taught):
        head = [f"judge {number + 1} of {len(taught)}, {one.trained.examples} examples:"] if len(taught) > 1 else []
        lines += [*head, *one.trained.notes()]
    dropped = sum(one.dropped for one in taught)
    limit = taught[0].trained.training.max_tokens
    return [*lines, *([f"{dropped} examples longer than {limit} tokens were left out of training"] if dropped else [])]
