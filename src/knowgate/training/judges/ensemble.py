"""Train one judge or an ensemble of them, and load the result as gates do.

Members differ in their seeds, or in the fold of the rows that they leave out. With folds, every row trains all members but
one, and this one scores the row.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from knowgate.data.splits import Split, fingerprint_text, hash_to_unit
from knowgate.errors import BadSetting
from knowgate.gates.judges.causal_judge import ADAPTER_FOLDER, compute_adapter_digest, list_adapter_folders
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.fit_function import FitProgressCallback, ignore_progress
from knowgate.training.judges.trainable_models import JudgeSpec, TrainingExample
from knowgate.training.judges.trainer import TrainedJudge, train_judge
from knowgate.training.judges.training_options import MAX_MEMBERS, JudgeTrainingOptions

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens

# Makes the training examples of the rows with the given indices; the judge tokenizes their prompts.
ExampleFactory = Callable[[Any, Sequence[int]], list[TrainingExample]]


@dataclass(frozen=True)
class EnsembleMember:
    """One model of an ensemble.

    Attributes:
        training: Hyperparameters, with the member's own seed.
        train: Indices of the rows that it is trained on.
        dev: Indices of the rows on which its best weights are chosen. Empty if the ensemble is trained in folds: then the
            last weights are kept.
    """

    training: JudgeTrainingOptions
    train: tuple[int, ...]
    dev: tuple[int, ...]

    @property
    def seen(self) -> frozenset[int]:
        """Indices of all rows that this model was trained or tuned on."""
        return frozenset((*self.train, *self.dev))


def plan_ensemble(
    split: Split,
    training: JudgeTrainingOptions,
    seeds: int = 1,
    folds: int = 0,
    texts: Sequence[str] = (),
    rows: NDArray[np.int64] | None = None,
) -> list[EnsembleMember]:
    """Plan the trainings of an ensemble of judges.

    Members differ in their seed or, with folds, also in the fold that they leave out.

    Args:
        split: The train and dev rows of every member; ignored if there are folds.
        training: Hyperparameters; each member gets its own seed.
        seeds: Number of members, if there are no folds.
        folds: Number of folds, which is the number of members; 0 for no folds.
        texts: All questions; equal questions share a fold.
        rows: Indices of the rows to divide into folds. All other rows are not used for training. Default: all rows.

    Raises:
        BadSetting: There are too many folds, or both `seeds` and `folds` are given.
    """
    if folds and not 2 <= folds <= MAX_MEMBERS:
        raise BadSetting(f"folds={folds} is not allowed. Use 2 to {MAX_MEMBERS}, or 0 to train without folds.")
    if folds and seeds > 1:
        raise BadSetting(
            "`seeds` and `folds` are mutually exclusive. Use one of them: each fold already has its own seed."
        )
    if folds:
        rows = np.arange(len(texts)) if rows is None else rows
        return _plan_folds(training, folds, texts, rows)
    train, dev = tuple(split.train.tolist()), tuple(split.dev.tolist())
    trainings = [replace(training, seed=training.seed + number) for number in range(seeds)]
    return [EnsembleMember(each, train, dev) for each in trainings]


def _plan_folds(
    training: JudgeTrainingOptions, folds: int, texts: Sequence[str], rows: NDArray[np.int64]
) -> list[EnsembleMember]:
    """Plan one training per fold, on the rows outside the fold."""
    fold_of_row = assign_folds([texts[row] for row in rows.tolist()], folds, training.seed)
    members = []
    for fold in range(folds):
        # There are no dev rows: the training is not evaluated (one check per epoch) and never stops early (patience 0).
        fold_training = replace(training, seed=training.seed + fold, checks=1, patience=0)
        train = tuple(rows[fold_of_row != fold].tolist())
        members.append(EnsembleMember(fold_training, train, dev=()))
    return members


def assign_folds(texts: Sequence[str], folds: int, seed: int = 0) -> NDArray[np.int64]:
    """Assign each question to a fold by its hash. Equal questions share a fold."""
    positions = [hash_to_unit("fold", str(seed), fingerprint_text(text)) for text in texts]  # from 0 to 1
    return np.array([int(folds * position) for position in positions], np.int64)


def find_unseen(members: Sequence[EnsembleMember], indices: Sequence[int]) -> BoolArray:
    """Mark the members of an ensemble that may score each label row: the members that were not trained on the row.

    A row that all members were trained on may be scored by all members.

    Returns:
        A matrix of booleans with one row per member and one column per label row.
    """
    unseen = np.array([~np.isin(indices, list(member.seen)) for member in members])
    seen_by_all = ~unseen.any(axis=0)
    return np.asarray(unseen | seen_by_all)


@dataclass(frozen=True)
class FittedJudge:
    """A trained judge, loaded from its files.

    Attributes:
        judge: The judge, which averages the predictions of its members.
        members: The models of the ensemble, with the rows that each was trained on.
        options: Options to store in the gate's manifest.
        notes: Lines for the model card.
        files: The judge's files by path.
        predictions: Cache of predictions. A key is the index of a row, followed by the token ids of its prompt.
    """

    judge: Any
    members: Sequence[EnsembleMember]
    options: dict[str, Any]
    notes: list[str]
    files: dict[str, bytes] = field(repr=False)
    predictions: dict[tuple[int, ...], float] = field(default_factory=dict, repr=False)

    @property
    def seen(self) -> frozenset[int]:
        """Indices of the rows that at least one member was trained or tuned on."""
        return frozenset().union(*(member.seen for member in self.members))

    def predict_known(self, prompts: Sequence[LabelPromptTokens], indices: Sequence[int]) -> FloatArray:
        """Predict for each row the probability that the LLM knows the answer.

        Each row is predicted by the members that were not trained on it.

        Args:
            prompts: The prompt about each row.
            indices: Indices of the rows.
        """
        keys = [(index, *prompt.ids) for prompt, index in zip(prompts, indices, strict=True)]
        new = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self.predictions}
        if new:
            new_indices = [index for index, *_ in new]
            means = self._predict_unseen(list(new.values()), new_indices)
            self.predictions.update(zip(new, means, strict=True))
        return np.array([self.predictions[key] for key in keys])

    def _predict_unseen(self, prompts: Sequence[LabelPromptTokens], indices: Sequence[int]) -> FloatArray:
        """Return the mean prediction for each row, from members not trained on the row."""
        may_score = find_unseen(self.members, indices)  # one row per member, one column per prompt
        sums = np.zeros(len(prompts))
        for member, mask in enumerate(may_score):
            if mask.any():
                member_prompts = [prompts[position] for position in np.flatnonzero(mask).tolist()]
                sums[mask] += self.judge.predict_member(member, member_prompts)
        return np.asarray(sums / may_score.sum(axis=0))


def fit_judge(
    spec: JudgeSpec,
    members: Sequence[EnsembleMember],
    make_examples: ExampleFactory,
    *,
    work: Path,
    watch: FitProgressCallback = ignore_progress,
) -> FittedJudge:
    """Train every member of an ensemble of judges, and load the result.

    Args:
        spec: The model to fine-tune, its labels and its prompts.
        members: The members, with the rows that each is trained on.
        make_examples: Makes the training examples of the rows with the given indices.
        work: Folder for checkpoints.
        watch: Called with the progress.
    """
    trained = []
    for number, member in enumerate(members):
        member_work = work if len(members) == 1 else work / f"member-{number}"
        trained.append(_train_member(spec, member, make_examples, member_work, watch))
    folders = list_adapter_folders(work / ADAPTER_FOLDER, len(trained))
    files: dict[str, bytes] = {}
    for folder, judge in zip(folders, trained, strict=True):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(judge.folder, folder)
        files |= {f"{folder.name}/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}
    digests = [compute_adapter_digest(folder) for folder in folders]
    options = _make_judge_options(spec, trained[0], digests)
    judge_of_all = spec.load_trained(folders[0], options)
    return FittedJudge(judge_of_all, members, options, _describe_trainings(trained), files)


def _make_judge_options(spec: JudgeSpec, trained: TrainedJudge, digests: Sequence[str]) -> dict[str, Any]:
    """Make the options that the gate's manifest stores about its judge.

    Args:
        spec: The model that was fine-tuned.
        trained: One of the members; all members have the same base and hyperparameters.
        digests: Digest of the files of each member.
    """
    options = {
        "base": spec.base,
        "base_fingerprint": trained.base_fingerprint,
        "wording": load_packaged_templates(spec.prompts).fingerprint,
        "labels": list(spec.labels),
        "full": trained.training.full,
        "max_tokens": trained.training.max_tokens,
        "adapter_sha256": digests[0],
        **spec.options,
    }
    if len(digests) > 1:
        options["more_sha256"] = list(digests[1:])
    return options


def _train_member(
    spec: JudgeSpec, member: EnsembleMember, make_examples: ExampleFactory, work: Path, watch: FitProgressCallback
) -> TrainedJudge:
    """Train one member of an ensemble. Only its files are returned, so that the model's memory is free afterwards."""
    model = spec.open_base(member.training.seed)
    train = make_examples(model.judge, member.train)
    dev = make_examples(model.judge, member.dev)
    return train_judge(model, train, dev, member.training, work, watch)


def _describe_trainings(trained: Sequence[TrainedJudge]) -> list[str]:
    """Describe for the model card how each member was trained."""
    lines = list(trained[0].notes)
    for number, judge in enumerate(trained, start=1):
        if len(trained) > 1:
            lines.append(f"judge {number} of {len(trained)}, {judge.n_examples} examples:")
        lines += judge.describe()
    if n_dropped := sum(judge.n_dropped for judge in trained):
        max_tokens = trained[0].training.max_tokens
        lines.append(f"{n_dropped} examples longer than {max_tokens} tokens were left out of training")
    return lines
