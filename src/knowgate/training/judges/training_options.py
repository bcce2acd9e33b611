"""How a judge is trained: epochs, batches, rates, when to look at the dev split. Knows no model and no example."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from knowgate.errors import BadSetting

WARM_UP_SHARE = 0.02  # KBM A.1, as are epochs, batch, tokens and the rate of a full fine-tune
RISE_SHARE, START_SHARE, END_SHARE = 0.3, 1 / 25, 1 / 250_000  # of a one-cycle rate, as torch has them
DEFAULT_LEARNING_RATES = {"full": 1e-5, "lora": 1e-4}
Schedule = Literal["cosine", "one-cycle"]
# what the options of a judge's fit say
BASE_HELP = "Model to fine-tune. Default: the LLM that was labelled."
EPOCHS_HELP = "Walks over the examples."
LEARNING_RATE_HELP = "Default: 1e-4, and 1e-5 with full."
FULL_HELP = "Fine-tune all weights instead of LoRA."
ACCUMULATE_HELP = "Portions a batch of 4 is run in, to save memory."


@dataclass(frozen=True)
class JudgeTrainingOptions:
    """How a judge is trained. batch: examples per update, run in `accumulate` portions. rate: None is the usual one.

    whole_vocabulary: the label competes with every token, as in language modelling; else with the other label alone.
    checks: looks at the dev split per epoch; the weights of the best are kept. patience: looks without a better dev
    loss after which training ends; 0 for never. window: batches whose examples are put together by length, so that few
    places are padding. saves: what it takes to go on is written after every leg.
    """

    epochs: int = 3
    batch: int = 4
    accumulate: int = 1
    rate: float | None = None
    max_tokens: int = 1580
    full: bool = False
    rank: int = 16
    seed: int = 0
    whole_vocabulary: bool = True
    schedule: Schedule = "cosine"
    weight_decay: float = 0.0
    checks: int = 1
    patience: int = 0
    window: int = 1
    saves: bool = True

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate", "max_tokens", "rank", "checks", "window"):
            if getattr(self, name) < 1:
                raise BadSetting(f"training: {name} is {getattr(self, name)}; it must be at least 1.")
        if self.accumulate > self.batch:
            raise BadSetting(f"training: {self.accumulate} portions cannot be made of a batch of {self.batch}.")
        if self.rate is not None and not self.rate > 0:
            raise BadSetting(f"training: rate is {self.rate}; it must be above 0.")
        if self.patience < 0:
            raise BadSetting(f"training: patience is {self.patience}; it must be 0 (never stop early) or more.")

    @property
    def peak(self) -> float:
        return self.rate or DEFAULT_LEARNING_RATES["full" if self.full else "lora"]

    @property
    def legs(self) -> int:
        """Parts of the training, each with a look at the dev split behind it."""
        return self.epochs * self.checks

    def share(self, update: int, updates: int) -> float:
        """Share of the peak rate at one of so many updates."""
        return one_cycle(update, updates) if self.schedule == "one-cycle" else warm_cosine(update, updates)


def warm_cosine(update: int, updates: int) -> float:
    """Up over the first 2 % of the updates, then down along a cosine."""
    warm = max(1, round(WARM_UP_SHARE * updates))
    if update < warm:
        return (update + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (update - warm) / max(1, updates - warm)))


def one_cycle(update: int, updates: int) -> float:
    """From 1/25 up along a cosine over 30 % of the updates, then down to nearly nothing (Smith and Topin 2017)."""
    top = max(1.0, RISE_SHARE * updates - 1)
    if update <= top:
        return _between(START_SHARE, 1.0, update / top)
    return _between(1.0, END_SHARE, (update - top) / max(1.0, updates - 1 - top))


def _between(start: float, end: float, way: float) -> float:
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * way))
