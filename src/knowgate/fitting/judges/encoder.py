"""An encoder that learns to judge: question and answer as a pair, one number out. Far smaller than a causal model.

Knows how one is taught and saved; how it is opened and fed stands in `gates`. Lessons are those of the other judges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from knowgate.errors import BadSetting
from knowgate.fitting.judges.lessons import Lesson
from knowgate.fitting.judges.settings import JudgeTraining
from knowgate.gates import PairEncoder


@dataclass(frozen=True)
class EncoderPupil:
    """An encoder with one output, trained in full."""

    encoder: PairEncoder

    @property
    def fingerprint(self) -> str:
        return self.encoder.fingerprint

    def begin(self, training: JudgeTraining) -> list[Any]:
        if not training.full:
            raise BadSetting("an encoder is small and trained in full: add --full.")
        return list(self.encoder.model.parameters())

    def set_training(self, on: bool) -> None:
        self.encoder.model.train(on)

    def loss(self, lessons: Sequence[Lesson]) -> Any:
        import torch

        outputs = self.encoder.outputs([lesson.cut.ids for lesson in lessons])
        shares = torch.tensor([lesson.shares[0] for lesson in lessons], device=outputs.device)
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs, shares)

    def margins(self, lessons: Sequence[Lesson]) -> list[float]:
        return [float(one) for one in self.encoder.outputs([lesson.cut.ids for lesson in lessons]).tolist()]

    def save(self, folder: Path) -> None:
        from knowgate.models import quiet

        with quiet():
            self.encoder.model.save_pretrained(str(folder))
            self.encoder.tokenizer.save_pretrained(str(folder))
