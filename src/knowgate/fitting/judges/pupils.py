"""Models that learn to judge: a causal one that says one of two words, with LoRA layers or all its weights.

Knows token ids, marked places and losses; not the order of examples, nor where anything is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from knowgate.errors import MissingExtra
from knowgate.fitting.judges.lessons import Lesson
from knowgate.fitting.judges.settings import JudgeTraining
from knowgate.gates import ADAPTER_SUFFIXES, padded

if TYPE_CHECKING:
    from knowgate.models import HFModel

DROPOUT = 0.05


class Pupil(Protocol):
    """A model that can be taught. `begin` comes first; `margins` are logits of the first label against the second."""

    @property
    def fingerprint(self) -> str: ...

    def begin(self, training: JudgeTraining) -> list[Any]:
        """Ready to learn; gives the parameters that will change."""
        ...

    def set_training(self, on: bool) -> None: ...

    def loss(self, lessons: Sequence[Lesson]) -> Any: ...

    def margins(self, lessons: Sequence[Lesson]) -> list[float]: ...

    def save(self, folder: Path) -> None: ...


@dataclass
class CausalPupil:
    """A causal model; `columns` are the tokens its two labels begin with."""

    base: HFModel
    columns: Sequence[int]
    trained: Any = field(default=None, repr=False)
    whole_vocabulary: bool = False

    @property
    def fingerprint(self) -> str:
        return self.base.fingerprint

    def begin(self, training: JudgeTraining) -> list[Any]:
        self.whole_vocabulary = training.whole_vocabulary
        self.trained = trainable(self.base, training)
        return [value for value in self.trained.parameters() if value.requires_grad]

    def set_training(self, on: bool) -> None:
        self.base.loaded.model.train(on)

    def loss(self, lessons: Sequence[Lesson]) -> Any:
        """Mean over the marked places of the cross-entropy of the labels."""
        import torch

        shares = torch.tensor([share for lesson in lessons for share in lesson.shares], device=self.base.loaded.device)
        if not self.whole_vocabulary:
            return pair_loss(self._logits(lessons, self.columns), shares)
        words = torch.tensor([self.columns[0] if share >= 0.5 else self.columns[1] for share in shares.tolist()])
        return torch.nn.functional.cross_entropy(self._logits(lessons, None), words.to(shares.device))

    def margins(self, lessons: Sequence[Lesson]) -> list[float]:
        """At the last mark of each lesson."""
        logits = self._logits(lessons, self.columns)
        ends = [sum(len(lesson.shares) for lesson in lessons[: place + 1]) - 1 for place in range(len(lessons))]
        return [float(margin) for margin in (logits[ends, 0] - logits[ends, 1]).tolist()]

    def _logits(self, lessons: Sequence[Lesson], columns: Sequence[int] | None) -> Any:
        """The head is applied at the marked places alone, and to the labels alone where the others do not count."""
        import torch

        from knowgate.models import head_logits

        device, model = self.base.loaded.device, self.base.loaded.model
        ids, mask = padded([lesson.cut.ids for lesson in lessons], self.base.pad, device)
        rows = [row for row, lesson in enumerate(lessons) for _ in lesson.cut.marks]
        marks = [mark for lesson in lessons for mark in lesson.cut.marks]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            output = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
            logits = head_logits(model, output.last_hidden_state[rows, marks], columns)
        return logits.float()

    def save(self, folder: Path) -> None:
        """The adapter, or the whole model in the number format it is used in, with its tokenizer."""
        if hasattr(self.trained, "peft_config"):
            self.trained.save_pretrained(str(folder), save_embedding_layers=False)
        else:
            half = self.base.loaded.device.type == "cuda"
            state = {key: value.bfloat16() if half else value for key, value in self.trained.state_dict().items()}
            self.trained.save_pretrained(str(folder), state_dict=state)
            self.base.loaded.tokenizer.save_pretrained(str(folder))
        for path in folder.iterdir():
            if path.suffix not in ADAPTER_SUFFIXES:
                path.unlink()  # peft's own model card


def trainable(base: HFModel, training: JudgeTraining) -> Any:
    """The model ready to learn: with LoRA layers in it (of fp32, whatever the base is), or all weights in fp32."""
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


def pair_loss(logits: Any, shares: Any) -> Any:
    """Mean binary cross-entropy of first label against second."""
    import torch

    return torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0] - logits[:, 1], shares)
