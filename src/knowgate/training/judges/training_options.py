"""How a judge is trained: options of the fit functions, and hyperparameters with their learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from knowgate.core.options import Count, Options, WholeNumber, option
from knowgate.models.embedded_weights import get_weights

WARM_UP_SHARE = 0.02  # KBM A.1, as are epochs, batch, tokens and the rate of a full fine-tune
RISE_SHARE, START_SHARE, END_SHARE = 0.3, 1 / 25, 1 / 250_000  # of the one-cycle schedule, as in torch
DEFAULT_LEARNING_RATES = {"full": 1e-5, "lora": 1e-4}
MAX_MEMBERS = 20
Schedule = Literal["cosine", "one-cycle"]

_MPNET = f"mpnet ({get_weights('mpnet').megabytes} MB to fetch)"
ANY_BASE_HELP = (
    f"Model to fine-tune: small or {_MPNET}, which need no GPU, smollm, hf:NAME, gguf:FILE or encoder:DIR. Default: "
    "the LLM whose answers were labeled."
)


class JudgeFitOptions(Options):
    """Options of every fine-tuned judge (it predicts whether answers are right)."""

    base: str | None = option(None, "Model to fine-tune. Default: the LLM whose answers were labeled.")
    epochs: Count = option(2, "Passes over the examples.")
    learning_rate: float | None = option(None, "Highest learning rate. Default: 1e-4, or 1e-5 with `full`.", gt=0)
    full: bool = option(False, "Fine-tune all weights instead of adding LoRA layers.")


class EnsembleFitOptions(JudgeFitOptions):
    """Options of judges that may be an ensemble of several models."""

    seeds: int = option(1, "Number of judges to train with different seeds and average.", ge=1, le=MAX_MEMBERS)
    folds: WholeNumber = option(
        0, "Number of judges to train, each without one fold of the questions. Not with `seeds`."
    )


class AnswerJudgeFitOptions(EnsembleFitOptions):
    """Options of judges that read question and answer."""

    base: str | None = option(None, ANY_BASE_HELP)
    tokens: WholeNumber = option(64, "Maximum answer tokens that the judge reads; 0 for the question alone.")
    epochs: Count | None = option(  # type: ignore[assignment]
        None, "Number of passes over the training examples. Default: 2, or 4 for encoders."
    )
    learning_rate: float | None = option(
        None, "Highest learning rate. Default: 1e-4, or 1e-5 with `full`, or 3e-5 for mpnet.", gt=0
    )
    batch: Count = option(32, "Examples per training step.")
    bits: Literal[0, 4, 8] = option(
        0, "Bits per weight of the base model: 4 or 8 save memory (CUDA and LoRA only); 0 for full precision."
    )
    frozen_layers: WholeNumber = option(0, "Number of lower layers of an encoder to freeze, which saves time.")


@dataclass(frozen=True)
class JudgeTrainingOptions:
    """Hyperparameters for training a judge (it predicts whether answers are right).

    Attributes:
        epochs: Passes over the examples.
        batch: Examples per update.
        rate: Peak learning rate; None for the default.
        max_tokens: Longer examples are left out.
        full: Train all weights instead of LoRA layers.
        rank: Rank of the LoRA layers.
        seed: Seed of order, dropout and initialization.
        whole_vocabulary: Whether the label competes with every token in the loss, as in language modeling. If not, only
            with the other label.
        frozen_layers: Number of lower layers of an encoder that are not trained, nor are its embeddings; 0 to train all
            weights.
        schedule: Learning-rate schedule.
        weight_decay: AdamW's weight decay.
        checks: Number of evaluations on the dev split per epoch; the weights with the lowest dev loss are kept.
        patience: Number of evaluations without a better dev loss after which training stops; 0 for never.
        window: Number of batches whose examples are sorted by length before they are divided into batches, to save
            padding.
    """

    epochs: int = 3
    batch: int = 4
    rate: float | None = None
    max_tokens: int = 1580
    full: bool = False
    rank: int = 16
    seed: int = 0
    whole_vocabulary: bool = True
    frozen_layers: int = 0
    schedule: Schedule = "cosine"
    weight_decay: float = 0.0
    checks: int = 1
    patience: int = 0
    window: int = 1

    @property
    def peak_rate(self) -> float:
        """The highest learning rate of the schedule."""
        return self.rate or DEFAULT_LEARNING_RATES["full" if self.full else "lora"]

    @property
    def n_segments(self) -> int:
        """Number of segments of the training. Each segment ends with an evaluation on the dev split."""
        return self.epochs * self.checks

    def compute_rate(self, update: int, updates: int) -> float:
        """Return the learning rate of an update. `updates` is the total number of updates."""
        schedule = one_cycle if self.schedule == "one-cycle" else warm_cosine
        return self.peak_rate * schedule(update, updates)


def warm_cosine(update: int, updates: int) -> float:
    """Return the learning rate of an update, as a share of the highest rate.

    The rate rises during the first 2 % of the updates and then falls along a cosine.
    """
    warm = max(1, round(WARM_UP_SHARE * updates))
    if update < warm:
        return (update + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (update - warm) / max(1, updates - warm)))


def one_cycle(update: int, updates: int) -> float:
    """Return the learning rate of an update, as a share of the highest rate.

    The rate rises during the first 30 % of the updates and then falls to nearly zero.
    """
    peak = max(1.0, RISE_SHARE * updates - 1)  # the update with the highest rate
    if update <= peak:
        return _interpolate(START_SHARE, 1.0, update / peak)
    return _interpolate(1.0, END_SHARE, (update - peak) / max(1.0, updates - 1 - peak))


def _interpolate(start: float, end: float, progress: float) -> float:
    """Interpolate from start to end along half a cosine; progress runs from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * progress))
