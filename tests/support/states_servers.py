"""Simulated servers with hidden states: in files, like vLLM, and in responses, like SGLang."""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save

from knowgate.types import Vector
from tests.support.chat_server import ChatServer

WIDTH = 8
SERVED_LAYERS = (4, 2)  # as the server was started: not in their order
DRAFT_IDS = [70, 71]
END = 2


def state_of(ids: list[int], layer: int) -> Vector:
    """Return a hidden state that differs for every list of tokens and every layer."""
    return np.random.default_rng([layer, *ids]).normal(size=WIDTH).astype(np.float32)


def text_ids(text: str) -> list[int]:
    return [*text.encode()]


class StatesServer(ChatServer):
    """Base of both servers: tokens are bytes, and the token ids of chat answers are `DRAFT_IDS`."""

    maker = ""

    def __init__(self) -> None:
        super().__init__()
        self.cards = [{"id": "m", "owned_by": self.maker, "root": "/w"}]
        self.ids: list[list[int]] = []  # of which states were asked
        self.state: Callable[[list[int], int], Vector] = state_of

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        body = json.loads(request.content) if request.content else {}
        if path.endswith("/tokenize"):
            text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
            return httpx.Response(200, json={"tokens": text_ids(text)})
        if path == "/generate" or (path == "/v1/completions" and isinstance(body.get("prompt"), list)):
            ids = body.get("input_ids", body.get("prompt"))
            self.ids.append(ids)
            return self.states_reply(ids, body)
        return self.answered(super().__call__(request), body)

    def states_reply(self, ids: list[int], body: dict[str, Any]) -> httpx.Response:
        raise NotImplementedError

    def answered(self, response: httpx.Response, body: dict[str, Any]) -> httpx.Response:
        return response


class VllmStates(StatesServer):
    """Writes a file for every request shortly after its response; the lock exists before."""

    maker = "vllm"

    def __init__(self, folder: Path, *, late: float = 0.05, layers: tuple[int, ...] = SERVED_LAYERS):
        super().__init__()
        self.folder, self.late, self.layers = folder, late, layers
        self.number = 0
        self.writers: list[threading.Thread] = []
        self.bf16 = False

    def states_reply(self, ids: list[int], body: dict[str, Any]) -> httpx.Response:
        name = self.write("cmpl", ids)
        reply = {"id": name.rpartition("-")[0], "choices": [{"text": "x", "finish_reason": "length"}]}
        return httpx.Response(200, json=reply | self.told(name))

    def answered(self, response: httpx.Response, body: dict[str, Any]) -> httpx.Response:
        if "messages" not in body or response.status_code != 200:
            return response
        name = self.write("chatcmpl", [0])
        if self.stream is not None and body.get("stream"):
            start = b'data: {"id": "%s", ' % name.rpartition("-")[0].encode()
            self.stream.pieces = [piece.replace(b"data: {", start) for piece in self.stream.pieces]
            return response
        reply = response.json() | {"id": name.rpartition("-")[0]} | self.told(name)
        if body.get("return_token_ids"):
            ended = reply["choices"][0]["finish_reason"] == "stop"
            reply["choices"][0]["token_ids"] = [*DRAFT_IDS, *([END] if ended else [])]
        return httpx.Response(200, json=reply)

    def told(self, name: str) -> dict[str, Any]:
        return {"kv_transfer_params": {"hidden_states_path": f"/elsewhere/states/{name}.safetensors"}}

    def write(self, kind: str, ids: list[int]) -> str:
        with self._lock:
            self.number += 1
            name = f"{kind}-{self.number:016x}-abcd1234"
        lock = (self.folder / f"{name}.safetensors.lock").open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer = threading.Thread(target=self._write, args=(name, ids, lock))
        self.writers.append(writer)
        writer.start()
        return name

    def _write(self, name: str, ids: list[int], lock: Any) -> None:
        time.sleep(self.late)
        last = np.stack([self.state(ids, layer) for layer in self.layers])
        rows = np.stack([*(np.zeros_like(last) for _ in ids[1:]), last])
        data = save({"hidden_states": rows, "token_ids": np.array(ids, np.int64)})
        (self.folder / f"{name}.safetensors").write_bytes(as_bf16(rows, ids) if self.bf16 else data)
        lock.close()

    def wait(self) -> None:
        for writer in self.writers:
            writer.join()


class SglangStates(StatesServer):
    """Returns the states of all layers in one list."""

    maker = "sglang"

    def states_reply(self, ids: list[int], body: dict[str, Any]) -> httpx.Response:
        assert (body["return_hidden_states"], body["sampling_params"]["max_new_tokens"]) == ("last", 1)
        row = np.concatenate([self.state(ids, layer) for layer in SERVED_LAYERS]).tolist()
        return httpx.Response(200, json={"text": "x", "meta_info": {"hidden_states": [row]}})

    def answered(self, response: httpx.Response, body: dict[str, Any]) -> httpx.Response:
        if not body.get("return_token_ids"):
            return response
        reply = response.json()
        choice = reply["choices"][0]
        ended = choice["finish_reason"] == "stop"
        choice |= {
            "response_token_ids": [*DRAFT_IDS, *([END] if ended else [])],
            "matched_stop": END if ended else None,
        }
        return httpx.Response(200, json=reply)


def as_bf16(rows: Vector, ids: list[int]) -> bytes:
    """Return a states file in bfloat16, which numpy does not support."""
    bits = (rows.view(np.uint32) >> 16).astype("<u2").tobytes()
    tokens = np.array(ids, np.int64).tobytes()
    header = json.dumps(
        {
            "hidden_states": {"dtype": "BF16", "shape": list(rows.shape), "data_offsets": [0, len(bits)]},
            "token_ids": {"dtype": "I64", "shape": [len(ids)], "data_offsets": [len(bits), len(bits) + len(tokens)]},
        }
    ).encode()
    return len(header).to_bytes(8, "little") + header + bits + tokens
