"""Train a reranker: InfoNCE over one question's own passages, as in CBDR, and the training loop.

The multiple-negatives loss of sentence-transformers adds passages of other questions as negatives. The paper's loss uses
only passages of the same question.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from knowgate.core import split_batches
from knowgate.errors import BadInput, ModelError, require_extra
from knowgate.training.fit_function import FitProgress, FitProgressCallback

if TYPE_CHECKING:
    import torch


def infonce(scores: torch.Tensor, positive: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return the InfoNCE loss of each positive passage (CBDR, equations 4 and 5).

    The loss compares a positive passage with all negative passages, and not with other positive passages.

    Args:
        scores: Score of each passage of the question.
        positive: Whether each passage is positive.
        temperature: Temperature of the loss.
    """
    import torch

    logits = scores / temperature
    negatives = torch.logsumexp(logits[~positive], dim=-1)
    return torch.logaddexp(logits[positive], negatives) - logits[positive]


def compute_batch_loss(model: Any, batch: Sequence[RankingGroup], temperature: float) -> torch.Tensor:
    """Return the mean InfoNCE loss of all positive passages in a batch."""
    import torch

    pairs = [(group.question, passage) for group in batch for passage in group.passages]
    scores = _score_pairs(model, pairs)
    scores_by_group = scores.split([len(group.passages) for group in batch])
    losses = []
    for group, group_scores in zip(batch, scores_by_group, strict=True):
        is_positive = torch.tensor(group.labels, device=scores.device) > 0
        losses.append(infonce(group_scores, is_positive, temperature))
    return torch.cat(losses).mean()


def _score_pairs(model: Any, pairs: list[tuple[str, str]]) -> torch.Tensor:
    """Return the cross-encoder's score of each pair of question and passage.

    Raises:
        ModelError: A score is NaN or infinite.
    """
    inputs = {}
    for name, value in model.preprocess(pairs).items():
        inputs[name] = value.to(model.device) if hasattr(value, "to") else value  # tensors are moved to the device
    scores: torch.Tensor = model(inputs)["scores"].reshape(-1).float()
    if not bool(scores.isfinite().all()):
        raise ModelError("the reranker's training produced NaN. Use a lower `learning_rate` or a higher `temperature`.")
    return scores


QUERY_TOKENS, PASSAGE_TOKENS = 128, 512  # CBDR 4.1.5, as are the rate, the weight decay and the single epoch
MAX_GRADIENT_NORM = 1.0
TOKENIZER_BATCH = 1_000  # texts tokenized at once


@dataclass(frozen=True)
class RankingGroup:
    """A question with passages, and a label for each passage (1 for positive, 0 for negative)."""

    question: str
    passages: tuple[str, ...]
    labels: tuple[float, ...]


@dataclass(frozen=True)
class RerankerTrainingOptions:
    """Hyperparameters for training a reranker.

    Attributes:
        temperature: Temperature of the loss.
        epochs: Passes over the groups.
        batch: Groups per update.
        rate: Peak learning rate.
        weight_decay: AdamW's weight decay.
        warm_up: Share of the updates over which the rate rises.
        seed: Seed of order and initialization.
        relevance_mix: Relevance examples per preference example in the alignment. They keep the reranker from forgetting
            which passages contain an answer.
        checks: How often the dev questions are ranked during the alignment, to keep the best weights; 0 keeps the last
            weights, as in the paper.
    """

    temperature: float = 1.0
    epochs: int = 1
    batch: int = 8
    rate: float = 6e-5
    weight_decay: float = 0.01
    warm_up: float = 0.1
    seed: int = 0
    relevance_mix: float = 0.0
    checks: int = 6

    def count_updates(self, n_groups: int) -> int:
        """Return the number of updates of a training on this many groups."""
        return self.epochs * math.ceil(n_groups / self.batch)

    def is_check_due(self, update: int, n_groups: int) -> bool:
        """Return whether to rank the dev questions after this update."""
        updates = self.count_updates(n_groups)
        interval = math.ceil(updates / max(1, self.checks))
        return update % interval == 0 or update == updates


@dataclass(frozen=True)
class WeightSelection:
    """The weights of a reranker with the best P@1 on the dev questions.

    P@1 is the share of questions with a positive passage on top. The chosen weights are an average of the base (the weights
    before the training) and trained weights.

    Attributes:
        questions: Number of dev questions.
        base: P@1 of the base.
        chosen: P@1 of the chosen weights; never lower than that of the base.
        share: Share of the trained weights: the chosen weights are share * trained + (1 - share) * base.
        update: Update after which the trained weights were taken.
        history: Update and P@1 of each measurement, beginning with the base.
    """

    questions: int
    base: float
    chosen: float
    share: float
    update: int
    history: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TrainingLog:
    """Record of a finished training.

    Attributes:
        losses: Loss of each update.
        groups: Number of training examples; each is a question with its passages.
        seconds: Training time.
        cut: Number of distinct questions and passages that were cut to the paper's token limits.
        selection: How the weights were chosen on dev questions; None if the last weights were kept.
    """

    losses: tuple[float, ...]
    groups: int
    seconds: float
    cut: dict[str, int]
    selection: WeightSelection | None


BLENDS = (0.25, 0.5, 0.75)  # shares of the trained weights in averages with the base


@dataclass
class WeightSelector:
    """Finds the weights of a reranker that rank the dev questions best.

    Averages of the weights before and after the training are tried, too (WiSE-FT).

    Attributes:
        model: The cross-encoder, before its training.
        measure: Returns the P@1 of the model on the dev questions.
        n_questions: Number of dev questions.
    """

    model: Any
    measure: Callable[[], float]
    n_questions: int

    def __post_init__(self) -> None:
        """Store the weights from before the training, and measure them."""
        self._base = self._trained = self._copy_weights()
        self._history = [(0, self.measure())]
        self._best_trained = -1.0
        self._best_update = 0

    def check(self, update: int) -> None:
        """Measure the current weights, and copy them if they are the best so far."""
        self.model.eval()
        value = self.measure()
        self.model.train()
        self._history.append((update, value))
        if value > self._best_trained:
            self._best_trained = value
            self._best_update = update
            self._trained = self._copy_weights()

    def finish(self) -> WeightSelection:
        """Load the best weights into the model, and describe the selection.

        Averages of old and trained weights are tried, too. The P@1 of the trained weights is already known.
        """
        _, base = self._history[0]  # P@1 before the training
        best = base
        best_share = 0.0  # share of the trained weights in the average
        for share in (1.0, *BLENDS):
            self._load(share)
            value = self._best_trained if share == 1.0 else self.measure()
            if value > best:
                best = value
                best_share = share
        self._load(best_share)
        history = tuple((update, round(value, 4)) for update, value in self._history)
        return WeightSelection(self.n_questions, round(base, 4), round(best, 4), best_share, self._best_update, history)

    def _copy_weights(self) -> dict[str, Any]:
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def _load(self, share: float) -> None:
        """Load an average of old and trained weights. `share` is the share of the trained weights."""
        weights = dict(self._base)
        for name, base in self._base.items():
            if base.is_floating_point():
                weights[name] = base.lerp(self._trained[name], share)
        self.model.load_state_dict(weights)


def train_groups(
    model: Any,
    groups: Sequence[RankingGroup],
    training: RerankerTrainingOptions,
    stage: str,
    watch: FitProgressCallback,
    selector: WeightSelector | None = None,
) -> TrainingLog:
    """Train a `CrossEncoder` of sentence-transformers in place.

    Args:
        model: The cross-encoder.
        groups: Questions with their passages, each of which is labeled as positive or negative.
        training: Hyperparameters.
        stage: What is learned, for the progress: 'relevance' or 'alignment'.
        watch: Called with the progress after each update.
        selector: Chooses the weights that the model ends with. Default: the weights of the last update.

    Raises:
        BadInput: There are no groups.
        MissingExtra: torch is not installed.
    """
    if not groups:
        raise BadInput("no question has both helpful and harmful passages. Run `knowgate prefer` on more questions.")
    with require_extra("training a reranker", "train"):
        import torch
    short_groups, cut = truncate_groups(model, groups)
    losses: list[float] = []
    n_done = 0
    start = time.perf_counter()
    torch.manual_seed(training.seed)
    model.train()
    try:
        for batch_size, loss in _train_batches(model, short_groups, training):
            losses.append(loss)
            n_done += batch_size
            words = f"{n_done / (time.perf_counter() - start):.1f} questions/s, loss {loss:.3f}"
            watch(FitProgress(n_done, len(groups) * training.epochs, "questions", stage, words))
            if selector is not None and training.is_check_due(len(losses), len(groups)):
                selector.check(len(losses))
    finally:
        model.eval()
    selection = selector.finish() if selector else None
    return TrainingLog(tuple(losses), len(groups), time.perf_counter() - start, cut, selection)


def _train_batches(
    model: Any, groups: Sequence[RankingGroup], training: RerankerTrainingOptions
) -> Iterator[tuple[int, float]]:
    """Update the model once per batch, and yield the size and the loss of the batch."""
    import torch

    optimizer, schedule = _create_optimizer(model, training, training.count_updates(len(groups)))
    for batch in shuffle_batches(groups, training):
        with torch.autocast("cuda", torch.bfloat16, enabled=model.device.type == "cuda"):
            loss = compute_batch_loss(model, batch, training.temperature)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield len(batch), float(loss.detach())


def truncate_groups(model: Any, groups: Sequence[RankingGroup]) -> tuple[list[RankingGroup], dict[str, int]]:
    """Truncate questions and passages to the paper's token limits, and count the cut texts."""
    questions = _truncate_texts(model, {group.question for group in groups}, QUERY_TOKENS)
    passages = _truncate_texts(model, {text for group in groups for text in group.passages}, PASSAGE_TOKENS)
    truncated = []
    for group in groups:
        group_passages = tuple(passages[text] for text in group.passages)
        truncated.append(RankingGroup(questions[group.question], group_passages, group.labels))
    n_questions = sum(short != text for text, short in questions.items())
    n_passages = sum(short != text for text, short in passages.items())
    return truncated, {"questions": n_questions, "passages": n_passages}


def _truncate_texts(model: Any, distinct: Collection[str], limit: int) -> dict[str, str]:
    """Map each text to its first `limit` tokens of the model's tokenizer."""
    texts = list(distinct)
    truncated: dict[str, str] = {}
    for batch in split_batches(texts, TOKENIZER_BATCH):
        encoded = model.tokenizer(batch, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        for text, offsets in zip(batch, encoded["offset_mapping"], strict=True):  # start and end of each token
            ends = [end for _, end in offsets[:limit]]
            truncated[text] = text[: ends[-1]] if len(offsets) > limit else text
    return truncated


def shuffle_batches(groups: Sequence[RankingGroup], training: RerankerTrainingOptions) -> Iterator[list[RankingGroup]]:
    """Yield batches of all groups, shuffled anew in each epoch."""
    rng = np.random.default_rng(training.seed)
    for _ in range(training.epochs):
        order = rng.permutation(len(groups)).tolist()
        for batch in split_batches(order, training.batch):
            yield [groups[index] for index in batch]


def _create_optimizer(model: Any, training: RerankerTrainingOptions, updates: int) -> tuple[Any, Any]:
    """Create AdamW and its learning-rate schedule.

    The rate rises linearly at first, then falls to 0. `updates` is the number of updates of the whole training.
    """
    import torch
    from transformers import get_linear_schedule_with_warmup

    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in parameters if parameter.ndim >= 2]
    exempt = [parameter for parameter in parameters if parameter.ndim < 2]  # biases and norms are vectors
    groups = [{"params": decayed, "weight_decay": training.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=training.rate)
    return optimizer, get_linear_schedule_with_warmup(optimizer, round(training.warm_up * updates), updates)
