"""Texts to unit vectors by a server: `openai:MODEL@URL`, any OpenAI-compatible `/embeddings`.

The key comes from KNOWGATE_EMBED_KEY, else OPENAI_API_KEY. Which weights a server holds cannot be seen from here: the
fingerprint is that of model and address.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from knowgate.endpoint import Endpoint, sendable
from knowgate.errors import BadSetting, ServerError
from knowgate.files import sha256_text
from knowgate.servers import one_line, without_login
from knowgate.types import Vector

PREFIX = "openai:"
KEYS = ("KNOWGATE_EMBED_KEY", "OPENAI_API_KEY")
BATCH = 64  # texts of one request


class RemoteEmbedder:
    """`spec` is `openai:MODEL@URL`, the URL up to /v1."""

    def __init__(self, spec: str, *, transport: httpx.BaseTransport | None = None):
        match = re.fullmatch(r"(?P<model>\S+?)@(?P<url>https?://\S+)", spec.removeprefix(PREFIX))
        if match is None or httpx.URL(match["url"]).userinfo:
            raise BadSetting(
                f"'{one_line(without_login(spec))}' names no embedding server: write openai:MODEL@URL, the URL "
                f"up to /v1, and put the key into {KEYS[0]}."
            )
        self.spec, self._model = spec, match["model"]
        self._server = Endpoint(
            match["url"], f"the embedding server of '{self._model}'", headers=_key(), transport=transport
        )

    @property
    def fingerprint(self) -> str:
        return sha256_text("embeddings", self._model, self._server.url)

    def embed(self, texts: Sequence[str]) -> Vector:
        """One unit vector per text, in order."""
        if not texts:
            return np.zeros((0, 0), dtype=np.float32)
        parts = [texts[place : place + BATCH] for place in range(0, len(texts), BATCH)]
        vectors = np.concatenate(self._server.each(self._embed, parts))
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        if not np.isfinite(vectors).all() or (lengths == 0).any():
            raise ServerError(f"{self._server.what} gave a vector of zeros, or of what is no number.")
        return np.asarray(vectors / lengths, dtype=np.float32)

    def _embed(self, texts: Sequence[str]) -> Vector:
        body = {"model": self._model, "input": [sendable(text) or " " for text in texts], "encoding_format": "float"}
        reply = self._server.ask("POST", "/embeddings", body=body)
        return self._read(reply, len(texts))

    def _read(self, reply: Any, n: int) -> Vector:
        rows = reply.get("data") if isinstance(reply, dict) else None
        if not isinstance(rows, list) or len(rows) != n:
            raise ServerError(
                f"{self._server.what} gave no list of {n} vectors under 'data'. Check the URL; most end in /v1."
            )
        try:
            ordered = sorted(rows, key=lambda row: int(row["index"]))
            vectors = np.array([row["embedding"] for row in ordered], dtype=np.float64)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise ServerError(f"{self._server.what} gave vectors that cannot be used: 'index' and 'embedding' are missing, or are no numbers.") from None  # fmt: skip  # noqa: E501
        if vectors.ndim != 2 or not vectors.shape[1]:
            raise ServerError(f"{self._server.what} gave vectors of different lengths.")
        return vectors.astype(np.float32)


def _key() -> dict[str, str]:
    key = next((os.environ[name].strip() for name in KEYS if os.environ.get(name, "").strip()), "")
    return {"Authorization": f"Bearer {key}"} if key else {}
