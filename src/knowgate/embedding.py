"""Texts to unit vectors with sentence-transformers (extra `local`).

The model is the embedded MiniLM, another set of weights from a package (`mpnet`; `m3e` for Chinese), a hub name or a
folder. Knows nothing of passages or search.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from knowgate import weights
from knowgate.embedding_api import PREFIX, RemoteEmbedder
from knowgate.errors import MissingExtra, ModelError, WeightsError
from knowgate.files import sha256_file, sha256_text
from knowgate.types import Embedder, Vector

DEFAULT = "minilm"
PACKAGED = (DEFAULT, "mpnet", "m3e")
_NAMING_FILES = ("*.json", "*.safetensors", "*.bin", "*.txt", "*.model")


def open_embedder(spec: str = DEFAULT) -> Embedder:
    """A packaged model, a hub name or folder of sentence-transformers, or `openai:MODEL@URL`."""
    return RemoteEmbedder(spec) if spec.startswith(PREFIX) else SentenceEmbedder(spec)


class SentenceEmbedder:
    """Loaded on first use, on the GPU where there is one."""

    def __init__(self, spec: str = DEFAULT, *, device: str | None = None, batch_size: int = 64):
        self.spec = str(Path(spec).resolve()) if Path(spec).is_dir() else spec
        self._device = device
        self._batch_size = batch_size
        self._one_at_a_time = threading.Lock()

    @cached_property
    def fingerprint(self) -> str:
        """Of a folder the hash of its files, wherever it lies; of a hub name its commit."""
        if self._folder is None:
            config = getattr(self._model[0].auto_model, "config", None)
            return sha256_text("hub", self.spec, str(getattr(config, "_commit_hash", None)))
        found = {path.relative_to(self._folder) for pattern in _NAMING_FILES for path in self._folder.rglob(pattern)}
        names = sorted(found, key=lambda name: name.parts)  # Windows would not tell A from a
        hashes = (sha256_file(self._folder / name) for name in names)
        return sha256_text(*(name.as_posix() for name in names), *hashes)

    def embed(self, texts: Sequence[str]) -> Vector:
        """One unit vector per text, in order."""
        with self._one_at_a_time:  # tokenizers cannot be used by two threads at once
            vectors = self._model.encode(
                list(texts),
                batch_size=self._batch_size,
                normalize_embeddings=True,
                convert_to_numpy=True,
                show_progress_bar=False,
            )
        return np.asarray(vectors, dtype=np.float32)

    @cached_property
    def _folder(self) -> Path | None:
        _check_extra()  # before anything is fetched
        if self.spec in PACKAGED:
            return weights.fetch(self.spec)
        return Path(self.spec) if Path(self.spec).is_dir() else None

    @cached_property
    def _model(self) -> Any:
        _check_extra()
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            local = self._folder is not None or not weights.hub_answers()
            return SentenceTransformer(str(self._folder or self.spec), device=self._device, local_files_only=local)
        except (OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, SafetensorError) as error:
            raise WeightsError(
                f"the embedding model '{self.spec}' cannot be loaded: {_first_line(error)}. "
                f"Give {', '.join(PACKAGED)}, a folder of sentence-transformers, or a hub name."
            ) from error


def _check_extra() -> None:
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "sentence_transformers")):
        raise MissingExtra("embedding texts", "local")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def check_vectors(vectors: Vector, n: int) -> Vector:
    """The vectors, if there are n of them and all are numbers; a search over NaN would answer nonsense."""
    if vectors.ndim != 2 or len(vectors) != n:
        raise ModelError(f"the embedding model gave an array of shape {vectors.shape} for {n} texts.")
    if not np.isfinite(vectors).all():
        raise ModelError("the embedding model gave values that are not numbers (NaN or infinite).")
    return vectors
