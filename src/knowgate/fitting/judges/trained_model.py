"""What a judge's training does to its model: LoRA layers or all weights, the loss on label tokens, the learning rate.

Knows token ids and marked places; not the order of examples, nor where anything is kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knowgate.errors import BadSetting, MissingExtra
from knowgate.gates import ADAPTER_SUFFIXES

if TYPE_CHECKING:
    from knowgate.models import HFModel, MarkedTokens

WARM_UP = 0.02  # KBM A.1, as are epochs, batch, tokens and the rate of a full fine-tune
RATES = {"full": 1e-5, "lora": 1e-4}
DROPOUT = 0.05
# what the options of a judge's fit say
BASE = "Model to fine-tune. Default: the LLM that was labelled."
EPOCHS = "Walks over the examples."
LEARNING_RATE = "Default: 1e-4, and 1e-5 with full."
FULL = "Fine-tune all weights instead of LoRA."
ACCUMULATE = "Portions a batch of 4 is run in, to save memory."


@dataclass(frozen=True)
class JudgeTraining:
    """How a judge is trained. batch: examples per update, run in `accumulate` portions. rate: None is the usual one."""

    epochs: int = 3
    batch: int = 4
    accumulate: int = 1
    rate: float | None = None
    max_tokens: int = 1580
    full: bool = False
    rank: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate", "max_tokens", "rank"):
            if getattr(self, name) < 1:
                raise BadSetting(f"training: {name} is {getattr(self, name)}; it must be at least 1.")
        if self.accumulate > self.batch:
            raise BadSetting(f"training: {self.accumulate} portions cannot be made of a batch of {self.batch}.")
        if self.rate is not None and not self.rate > 0:
            raise BadSetting(f"training: rate is {self.rate}; it must be above 0.")

    @property
    def peak(self) -> float:
        return self.rate or RATES["full" if self.full else "lora"]


@dataclass(frozen=True)
class Lesson:
    """A tokenised prompt and the token that should come after each marked place."""

    cut: MarkedTokens
    targets: tuple[int, ...]


def trainable(base: HFModel, training: JudgeTraining) -> Any:
    """The model ready to learn: with LoRA layers in it, or with all its weights in full precision."""
    if training.full:
        return base.loaded.model.float().requires_grad_(True)
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise MissingExtra("LoRA", "train") from None
    config = LoraConfig(
        r=training.rank,
        lora_alpha=2 * training.rank,
        lora_dropout=DROPOUT,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base.loaded.model, config)


def save_trained(trained: Any, base: HFModel, folder: Path) -> None:
    """The adapter, or the whole model in the number format it is used in, with its tokenizer."""
    if hasattr(trained, "peft_config"):
        trained.save_pretrained(str(folder), save_embedding_layers=False)
    else:
        half = base.loaded.device.type == "cuda"
        state = {key: value.bfloat16() if half else value for key, value in trained.state_dict().items()}
        trained.save_pretrained(str(folder), state_dict=state)
        base.loaded.tokenizer.save_pretrained(str(folder))
    for path in folder.iterdir():
        if path.suffix not in ADAPTER_SUFFIXES:
            path.unlink()  # peft's own model card


def mean_loss(base: HFModel, lessons: Sequence[Lesson]) -> Any:
    """Mean cross-entropy of the label tokens; the head is applied at the marked places alone."""
    import torch

    from knowgate.models import head_logits

    device, model = base.loaded.device, base.loaded.model
    width = max(len(lesson.cut.ids) for lesson in lessons)
    ids = torch.tensor([lesson.cut.ids + [base.pad] * (width - len(lesson.cut.ids)) for lesson in lessons])
    mask = torch.tensor([[1] * len(lesson.cut.ids) + [0] * (width - len(lesson.cut.ids)) for lesson in lessons])
    rows = [row for row, lesson in enumerate(lessons) for _ in lesson.cut.marks]
    marks = [mark for lesson in lessons for mark in lesson.cut.marks]
    targets = torch.tensor([target for lesson in lessons for target in lesson.targets], device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        output = model.base_model(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
        logits = head_logits(model, output.last_hidden_state[rows, marks])
    return torch.nn.functional.cross_entropy(logits.float(), targets)


def learning_rate(update: int, updates: int) -> float:
    """Share of the peak: up over the first 2 % of the updates, then down along a cosine."""
    warm = max(1, round(WARM_UP * updates))
    if update < warm:
        return (update + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (update - warm) / max(1, updates - warm)))
