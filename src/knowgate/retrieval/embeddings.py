"""Embedding models, which turn texts into unit vectors: sentence-transformers (extra `local`) or an HTTP server.

You can name a packaged model of knowgate (`minilm`, `mpnet`, or `m3e` for Chinese), a model on the Hugging Face hub, a
folder, or `openai:MODEL@URL` for any OpenAI-compatible `/embeddings` endpoint.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from knowgate.core import split_batches
from knowgate.core.files import sha256_file, sha256_text
from knowgate.core.registry import parse_server_spec
from knowgate.core.text import replace_surrogates
from knowgate.errors import MissingExtra, ModelError, RejectionError, WeightsError, get_cause
from knowgate.models import embedded_weights as weights
from knowgate.types import Embedder, Vector

if TYPE_CHECKING:
    import httpx

DEFAULT_EMBEDDER = "minilm"
PACKAGED_EMBEDDERS = (DEFAULT_EMBEDDER, "mpnet", "m3e")
OPENAI_PREFIX = "openai:"
EMBEDDING_KEY_VARIABLES = ("KNOWGATE_EMBED_KEY", "OPENAI_API_KEY")
BATCH_SIZE = 64  # texts per forward pass, or per request
MAX_WIDTH = 16_384  # numbers of a vector from a server; histories and indexes keep all vectors
_FINGERPRINTED_FILES = ("*.json", "*.safetensors", "*.bin", "*.txt", "*.model")


def load_embedder(spec: str = DEFAULT_EMBEDDER) -> Embedder:
    """Create an embedding model from its spec. Local weights are loaded on first use.

    Args:
        spec: `minilm`, `mpnet` or `m3e`; a hub name or a folder of sentence-transformers; or `openai:MODEL@URL` for a
            server.
    """
    return RemoteEmbedder(spec) if spec.startswith(OPENAI_PREFIX) else SentenceEmbedder(spec)


class SentenceEmbedder:
    """An embedding model that sentence-transformers runs on this machine. It is loaded on first use.

    Args:
        spec: A packaged model (`minilm`, `mpnet`, `m3e`), a hub name or a folder.
        device: The device to run on, such as `cpu` or `cuda`. Default: the GPU if there is one.
    """

    def __init__(self, spec: str = DEFAULT_EMBEDDER, *, device: str | None = None):
        self.spec = str(Path(spec).resolve()) if Path(spec).is_dir() else spec
        self._device = device
        self._lock = threading.Lock()

    @cached_property
    def fingerprint(self) -> str:
        """A hash that identifies the weights.

        It covers the files of a folder, or the name and commit on the hub.
        """
        if self._folder is None:
            config = getattr(self._model[0].auto_model, "config", None)
            return sha256_text("hub", self.spec, str(getattr(config, "_commit_hash", None)))
        files = {path for pattern in _FINGERPRINTED_FILES for path in self._folder.rglob(pattern)}
        paths = sorted(files, key=lambda path: path.parts)  # comparing Path objects ignores case on Windows
        names = [path.relative_to(self._folder).as_posix() for path in paths]
        hashes = [sha256_file(path) for path in paths]
        return sha256_text(*names, *hashes)

    def embed(self, texts: Sequence[str]) -> Vector:
        """Return one unit vector per text, in order."""
        with self._lock:  # Two threads cannot use a tokenizer at the same time.
            vectors = self._model.encode(
                list(texts), batch_size=BATCH_SIZE, normalize_embeddings=True, show_progress_bar=False
            )
        return np.asarray(vectors, dtype=np.float32)

    @cached_property
    def _folder(self) -> Path | None:
        """The folder of the weights, or None for a hub name.

        Packaged weights are downloaded if needed.
        """
        _check_extra()  # Checked first, so that nothing is downloaded in vain.
        if self.spec in PACKAGED_EMBEDDERS:
            return weights.fetch_weights(self.spec)
        return Path(self.spec) if Path(self.spec).is_dir() else None

    @cached_property
    def _model(self) -> Any:
        """The loaded `SentenceTransformer`; raises WeightsError if it cannot be loaded."""
        _check_extra()
        from sentence_transformers import SentenceTransformer
        from transformers.utils import logging

        logging.disable_progress_bar()
        try:
            is_local = self._folder is not None or not weights.is_hub_reachable()
            return SentenceTransformer(str(self._folder or self.spec), device=self._device, local_files_only=is_local)
        except (OSError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, SafetensorError) as error:
            cause = get_cause(error)
            raise WeightsError(
                f"the embedding model '{self.spec}' cannot be loaded: {cause}. Use {', '.join(PACKAGED_EMBEDDERS)}, a "
                "sentence-transformers folder, or a name on the Hugging Face hub."
            ) from error


def _check_extra() -> None:
    """Raise MissingExtra unless the packages of the extra `local` are installed."""
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "sentence_transformers")):
        raise MissingExtra("embedding texts", "local")


class RemoteEmbedder:
    """An embedding model behind an OpenAI-compatible `/embeddings` endpoint.

    The API key is read from KNOWGATE_EMBED_KEY or OPENAI_API_KEY. The fingerprint covers only the model name and the
    address.

    Args:
        spec: `openai:MODEL@URL`. The URL usually ends in `/v1`.
        transport: An httpx transport that replaces the network in tests.

    Raises:
        BadSetting: The spec has another form, or its URL contains a login.
    """

    def __init__(self, spec: str, *, transport: httpx.BaseTransport | None = None):
        self.spec = spec
        self._model, url = parse_server_spec(
            spec.removeprefix(OPENAI_PREFIX), "openai:MODEL@URL", EMBEDDING_KEY_VARIABLES[0]
        )
        from knowgate.core.http_client import JsonClient, read_key_header  # takes a quarter of a second

        headers = read_key_header(*EMBEDDING_KEY_VARIABLES)
        self._server = JsonClient(url, f"the embedding server of '{self._model}'", headers=headers, transport=transport)

    @property
    def fingerprint(self) -> str:
        return sha256_text("embeddings", self._model, self._server.url)

    def embed(self, texts: Sequence[str]) -> Vector:
        """Return one unit vector per text, in order."""
        if not texts:
            return np.zeros((0, 0), dtype=np.float32)
        batches = list(split_batches(texts, BATCH_SIZE))
        vectors = np.concatenate(self._server.map(self._embed_batch, batches))
        with np.errstate(over="ignore"):  # the length of a vector with huge values is infinite
            norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not np.isfinite(norms).all() or (norms == 0).any():
            raise RejectionError(
                f"{self._server.name} returned an unusable vector: all values are zero, or one is NaN, infinite or huge. "
                "Check the model on the server."
            )
        return np.asarray(vectors / norms, dtype=np.float32)

    def _embed_batch(self, texts: Sequence[str]) -> NDArray[np.float64]:
        inputs = [replace_surrogates(text) or " " for text in texts]  # Servers reject empty texts, but not a space.
        body = {"model": self._model, "input": inputs, "encoding_format": "float"}
        return self._parse_vectors(self._server.request_json("POST", "/embeddings", body=body), len(texts))

    def _parse_vectors(self, response: Any, n: int) -> NDArray[np.float64]:
        """Return the n vectors of a response in the order of the texts."""
        try:
            rows = sorted(response["data"], key=lambda row: int(row["index"]))
            vectors = np.array([row["embedding"] for row in rows], dtype=np.float64)
        except (KeyError, TypeError, ValueError, OverflowError):
            vectors = np.empty(0)
        if vectors.ndim != 2 or len(vectors) != n or not 0 < vectors.shape[1] <= MAX_WIDTH:
            raise RejectionError(
                f"{self._server.name} returned no list of {n} vectors of equal length under 'data', with at most {MAX_WIDTH:,} "
                "numbers each. Check the model and the URL. Most URLs end in /v1."
            )
        return vectors


def check_vectors(vectors: Vector, n: int) -> Vector:
    """Check the output of an embedding model and return it unchanged.

    Args:
        vectors: What the model returned.
        n: The number of texts that were embedded.

    Raises:
        ModelError: There is not exactly one vector per text, or a value is NaN or infinite.
    """
    if vectors.ndim != 2 or len(vectors) != n:
        raise ModelError(
            f"the embedding model returned an array of shape {vectors.shape} for {n} texts, not {n} vectors. Use "
            "another embedding model."
        )
    if not np.isfinite(vectors).all():
        raise ModelError(
            "the embedding model returned values that are not numbers (NaN or infinite). Use another embedding model."
        )
    return vectors
