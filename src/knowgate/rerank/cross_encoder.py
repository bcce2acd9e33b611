"""A cross-encoder reads question and passage together and gives one score.

Runs on sentence-transformers (extra `local`).
Reference: Nogueira and Cho 2019, Passage re-ranking with BERT. Training one is not done here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.errors import BadInput, BadSetting, MissingExtra, ModelError, WeightsError
from knowgate.files import sha256_text
from knowgate.rerank.manifest import check_files, is_aligned, read_manifest, weights_fingerprint
from knowgate.types import Passage

UNREAD = ""  # stands where a question would: see `reads_question`


class CrossEncoderReranker:
    """Scores are logits: any finite number, higher is better. Loaded on first use, on the GPU if there is one."""

    def __init__(self, spec: str, *, device: str | None = None, batch_size: int | None = None):
        if not spec:
            raise BadSetting("a cross-encoder needs a model: cross-encoder:NAME_OR_DIR.")
        self.spec = spec
        self._device = device
        self._batch_size = batch_size

    @classmethod
    def around(cls, model: Any, spec: str, *, reads_question: bool = True) -> CrossEncoderReranker:
        """A reranker of a cross-encoder that is already loaded."""
        reranker = cls(spec)
        reranker.__dict__ |= {"_model": model, "reads_question": reads_question}
        return reranker

    @cached_property
    def reads_question(self) -> bool:
        """False of a control that was taught, and is asked, without the question: it ranks passages as such."""
        if not is_aligned(self.spec):
            return True
        check_files(self.spec)
        return bool(read_manifest(self.spec).get("reads_question", True))

    @property
    def name(self) -> str:
        return f"cross-encoder:{self.spec}"

    @cached_property
    def fingerprint(self) -> str:
        """Of a folder the hash of its weights, wherever it lies; of a hub name its commit."""
        if Path(self.spec).is_dir():
            return weights_fingerprint(self.spec)
        return sha256_text("hub", self.spec, str(getattr(self._model.config, "_commit_hash", None)))[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """One score per passage of each question; pairs of all questions share batches.

        A pair that comes twice is scored once: in another batch its score could differ in the last bits.
        """
        if len(questions) != len(passages):
            raise BadInput(f"{len(questions)} questions came with {len(passages)} lists of passages.")
        pairs = [
            [(question if self.reads_question else UNREAD, shown(passage)) for passage in found]
            for question, found in zip(questions, passages, strict=True)
        ]
        distinct = list(dict.fromkeys(pair for some in pairs for pair in some))
        scores = dict(zip(distinct, self._scores(distinct), strict=True))
        return [[scores[pair] for pair in some] for some in pairs]

    def _scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        if not pairs:
            return []
        import torch

        size = self._batch_size or (128 if torch.cuda.is_available() else 32)
        # predict sorts by length itself, so that short pairs are not padded to long ones
        scores = self._model.predict(pairs, batch_size=size, activation_fn=torch.nn.Identity(), show_progress_bar=False)
        if not np.isfinite(scores).all():
            raise ModelError(f"the reranker '{self.spec}' gave a score that is not a number (NaN or infinite).")
        return [float(score) for score in scores]

    @cached_property
    def _model(self) -> Any:
        try:
            from sentence_transformers import CrossEncoder
        except ModuleNotFoundError as error:
            raise MissingExtra("the cross-encoder", "local") from error
        local = Path(self.spec).is_dir()
        if local:
            check_files(self.spec)
        if is_aligned(self.spec):
            read_manifest(self.spec)  # refuses weights that were changed
        try:
            safe = {"use_safetensors": True}
            model = CrossEncoder(self.spec, device=self._device, local_files_only=local, model_kwargs=safe)
        except Exception as error:
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:300]
            raise WeightsError(
                f"the reranker '{self.spec}' cannot be loaded: {cause}. Give a folder or a hub name of a cross-encoder."
            ) from error
        if model.num_labels != 1:
            raise ModelError(f"the reranker '{self.spec}' gives {model.num_labels} scores a pair; one is needed.")
        return model


def shown(passage: Passage) -> str:
    """A passage as a cross-encoder reads it."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text
