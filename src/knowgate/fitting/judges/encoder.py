"""An encoder that learns to judge: question and answer as a pair, one number out. Far smaller than a causal model.

Knows how one is opened, fed and saved; not what is asked. Lessons are those of the other judges.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from knowgate import weights
from knowgate.errors import BadSetting, MissingExtra, WeightsError
from knowgate.fitting.judges.lessons import Lesson
from knowgate.fitting.judges.pupils import padded
from knowgate.fitting.judges.settings import JudgeTraining
from knowgate.statistics import Floats, sigmoid

PACKAGED = ("minilm", "mpnet")  # sentence embedders from packages; as judges they get a new head
KEPT = ("*.json", "*.txt", "*.safetensors")
LEFT_OUT = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
BATCH = 64


@dataclass
class EncoderPupil:
    """An encoder with one output, trained in full."""

    source: Path
    seed: int = 0
    model: Any = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        from knowgate.models import HFModel

        return HFModel(str(self.source)).fingerprint  # of the files; nothing is loaded

    def open(self) -> None:
        """Read weights and tokenizer; a head that is not there yet is drawn by the seed."""
        try:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ModuleNotFoundError:
            raise MissingExtra("an encoder", "train") from None
        from knowgate.models import explained, quiet

        torch.manual_seed(self.seed)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with quiet(), explained(str(self.source)), tempfile.TemporaryDirectory() as scratch:
            folder = _plain(self.source, Path(scratch))
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.model = AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, local_files_only=True, dtype=torch.float32
            ).to(device)

    def encode(self, question: str, answer: str) -> list[int]:
        """A pair as tokens, cut to what the encoder can see."""
        longest = min(int(self.model.config.max_position_embeddings) - 2, 512)
        ids: list[int] = self.tokenizer(question, answer, truncation=True, max_length=longest)["input_ids"]
        return ids

    def begin(self, training: JudgeTraining) -> list[Any]:
        if not training.full:
            raise BadSetting("an encoder is trained in full: it is small.")
        return list(self.model.parameters())

    def set_training(self, on: bool) -> None:
        self.model.train(on)

    def loss(self, lessons: Sequence[Lesson]) -> Any:
        import torch

        outputs = self._outputs([lesson.cut.ids for lesson in lessons])
        shares = torch.tensor([lesson.shares[0] for lesson in lessons], device=outputs.device)
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs, shares)

    def margins(self, lessons: Sequence[Lesson]) -> list[float]:
        return [float(one) for one in self._outputs([lesson.cut.ids for lesson in lessons]).tolist()]

    def known(self, rows: Sequence[Sequence[int]]) -> Floats:
        """P(known) of each pair."""
        import numpy as np
        import torch

        self.set_training(False)
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        found = np.zeros(len(rows))
        with torch.inference_mode():
            for start in range(0, len(order), BATCH):
                places = order[start : start + BATCH]
                found[places] = self._outputs([rows[place] for place in places]).cpu().numpy()
        probability: Floats = sigmoid(found)
        return probability

    def _outputs(self, rows: Sequence[Sequence[int]]) -> Any:
        import torch

        device = self.model.device
        ids, mask = padded(rows, int(self.tokenizer.pad_token_id or 0), device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        return logits[:, 0].float()

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(str(folder))
        self.tokenizer.save_pretrained(str(folder))


def encoder_source(spec: str) -> Path:
    """The folder of an encoder: one of the packages', or the user's own."""
    if spec in PACKAGED:
        return weights.fetch(spec)
    if not Path(spec).is_dir():
        raise WeightsError(f"the encoder '{spec}' is neither {' nor '.join(PACKAGED)} nor a folder.")
    return Path(spec)


def _plain(source: Path, scratch: Path) -> str:
    """A folder of sentence-transformers without what makes it one: transformers reads the rest as an encoder."""
    if not (source / "modules.json").is_file():
        return str(source)
    for pattern in KEPT:
        for path in source.glob(pattern):
            if path.name not in LEFT_OUT:
                _link(path, scratch / path.name)
    return str(scratch)


def _link(source: Path, target: Path) -> None:
    try:
        target.symlink_to(source)
    except OSError:  # Windows asks for a privilege
        shutil.copyfile(source, target)
