"""Texts to unit vectors with sentence-transformers (extra `local`).

The model is the embedded MiniLM, another set of weights from a package (`mpnet`; `m3e` for Chinese), a hub name or a
folder. Knows nothing of passages or search.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors import SafetensorError

from knowgate.core.files import sha256_file, sha256_text
from knowgate.core.http_client import JsonClient, replace_surrogates
from knowgate.core.redaction import redact_message
from knowgate.errors import BadSetting, MissingExtra, ModelError, ServerError, WeightsError
from knowgate.models import embedded_weights as weights
from knowgate.types import Embedder, Vector

OPENAI_PREFIX = "openai:"
EMBEDDING_KEY_VARIABLES = ("KNOWGATE_EMBED_KEY", "OPENAI_API_KEY")
REQUEST_BATCH_SIZE = 64  # texts of one request


class RemoteEmbedder:
    """`spec` is `openai:MODEL@URL`, the URL up to /v1."""

    def __init__(self, spec: str, *, transport: httpx.BaseTransport | None = None):
        match = re.fullmatch(r"(?P<model>\S+?)@(?P<url>https?://\S+)", spec.removeprefix(OPENAI_PREFIX))
        if match is None or httpx.URL(match["url"]).userinfo:
            raise BadSetting(
                f"'{redact_message(redact_secrets(spec))}' names no embedding server: write openai:MODEL@URL, the URL "
                f"up to /v1, and put the key into {EMBEDDING_KEY_VARIABLES[0]}."
            )
        self.spec, self._model = spec, match["model"]
        self._server = JsonClient(
            match["url"], f"the embedding server of '{self._model}'", headers=_key(), transport=transport
        )

    @property
    def fingerprint(self) -> str:
        return sha256_text("embeddings", self._model, self._server.url)

    def embed(self, texts: Sequence[str]) -> Vector:
        """One unit vector per text, in order."""
        if not texts:
            return np.zeros((0, 0), dtype=np.float32)
        parts = [texts[place : place + REQUEST_BATCH_SIZE] for place in range(0, len(texts), REQUEST_BATCH_SIZE)]
        vectors = np.concatenate(self._server.map(self._embed, parts))
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not np.isfinite(vectors).all() or (lengths == 0).any():
            raise ServerError(f"{self._server.name} gave a vector of zeros, or of what is no number.")
        return np.asarray(vectors / lengths, dtype=np.float32)

    def _embed(self, texts: Sequence[str]) -> Vector:
        body = {
            "model": self._model,
            "input": [replace_surrogates(text) or " " for text in texts],
            "encoding_format": "float",
        }
        reply = self._server.request_json("POST", "/embeddings", body=body)
        return self._read(reply, len(texts))

    def _read(self, reply: Any, n: int) -> Vector:
        rows = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(rows, list) or len(rows) != n:
            raise ServerError(
                f"{self._server.name} gave no list of {n} vectors under 'data'. Check the URL; most end in /v1."
            )
        try:
            ordered = sorted(rows, key=lambda row: int(row["index"]))
            vectors = np.array([row["embedding"] for row in ordered], dtype=np.float64)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ServerError(f"{self._server.name} gave vectors that cannot be used: 'index' and 'embedding' are missing, or are no numbers.") from None  # fmt: skip  # noqa: E501
        if vectors.ndim != 2 or not vectors.shape[1]:
            raise ServerError(f"{self._server.name} gave vectors of different lengths.")
        return vectors.astype(np.float32)


def _key() -> dict[str, str]:
    key = next((os.environ[name].strip() for name in EMBEDDING_KEY_VARIABLES if os.environ.get(name, "").strip()), "")
    return {"Authorization": f"Bearer {key}"} if key else {}


DEFAULT_EMBEDDER = "minilm"
PACKAGED_EMBEDDERS = (DEFAULT_EMBEDDER, "mpnet", "m3e")
_NAMING_FILES = ("*.json", "*.safetensors", "*.bin", "*.txt", "*.model")


def load_embedder(spec: str = DEFAULT_EMBEDDER) -> Embedder:
    """A packaged model, a hub name or folder of sentence-transformers, or `openai:MODEL@URL`."""
    return RemoteEmbedder(spec) if spec.startswith(OPENAI_PREFIX) else SentenceEmbedder(spec)


class SentenceEmbedder:
    """Loaded on first use, on the GPU where there is one."""

    def __init__(self, spec: str = DEFAULT_EMBEDDER, *, device: str | None = None, batch_size: int = 64):
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
        if self.spec in PACKAGED_EMBEDDERS:
            return weights.fetch_weights(self.spec)
        return Path(self.spec) if Path(self.spec).is_dir() else None

    @cached_property
    def _model(self) -> Any:
        _check_extra()
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            local = self._folder is not None or not weights.is_hub_reachable()
            return SentenceTransformer(str(self._folder or self.spec), device=self._device, local_files_only=local)
        except (OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, SafetensorError) as error:
            raise WeightsError(
                f"the embedding model '{self.spec}' cannot be loaded: {_first_line(error)}. "
                f"Give {', '.join(PACKAGED_EMBEDDERS)}, a folder of sentence-transformers, or a hub name."
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
