"""Requests and responses recorded from a real vLLM 0.32 server, and how to record them again.

Start a server of the embedded model (converted: `gguf:` leaves it in the cache) under the name 'smollm'. Then `python
-m tests.support.vllm_recording URL` writes tests/fixtures/vllm/talk.json; with `#layers=15,23&storage=DIR` after the
URL, it writes states.json.
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from knowgate.models.openai.model import OpenAIModel
from knowgate.models.openai.spec import parse_openai_spec
from knowgate.types import Completion, LabelPrompt, Prompt, SignalRequest, Vector

FOLDER = Path(__file__).parents[1] / "fixtures" / "vllm"
PROMPT = Prompt("Tell me in three sentences who wrote Faust.")
LABELS = ("zebra", "purple")  # very improbable beginnings of an answer
LAYERS = (15, 23)
STATE_PROMPTS = (PROMPT, Prompt("How many legs does a spider have?"), Prompt("The capital of France is", raw=True))
OMITTED_KEYS = ("bytes", "permission", "root")


class RecordedServer:
    """Returns recorded responses; any other request is an error."""

    def __init__(self) -> None:
        self.exchanges: list[dict[str, Any]] = json.loads((FOLDER / "talk.json").read_text())
        self.requests: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content) if request.content else {}
        self.requests.append((path, body))
        for exchange in self.exchanges:
            if (exchange["path"], exchange["body"]) == (path, body):
                return httpx.Response(exchange["status"], json=exchange["reply"])
        raise AssertionError(f"this request was not recorded: {path} {body}")


class RecordingTransport(httpx.BaseTransport):
    """The network; records all requests and responses."""

    def __init__(self) -> None:
        self.network = httpx.HTTPTransport()
        self.exchanges: list[dict[str, Any]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self.network.handle_request(request)
        reply = json.loads(response.read())
        body = json.loads(request.content) if request.content else {}
        self.exchanges.append(
            {"path": request.url.path, "body": body, "status": response.status_code, "reply": omit_keys(reply)}
        )
        response.close()
        return httpx.Response(response.status_code, json=reply)

    def close(self) -> None:
        self.network.close()


def omit_keys(value: Any) -> Any:
    """Remove null values and keys that tests do not need or that depend on the machine."""
    if isinstance(value, list):
        return [omit_keys(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: omit_keys(item) for key, item in value.items() if item is not None and key not in OMITTED_KEYS}


def draft_and_continue(model: OpenAIModel) -> tuple[Completion, Completion]:
    """Return a draft of eight tokens and its continuation to 24."""
    reading = model.read([PROMPT], SignalRequest(draft_tokens=8))[0]
    assert reading.draft is not None
    return reading.draft, model.generate([PROMPT], max_tokens=24, resume=[reading.resume])[0][0]


def read_labels(model: OpenAIModel) -> Vector:
    return model.label_logits([LabelPrompt((PROMPT.text,), raw=False)], LABELS)[0]


def load_recorded_states() -> dict[int, Vector]:
    """Return vLLM's hidden states of `STATE_PROMPTS`, by layer."""
    recorded = json.loads((FOLDER / "states.json").read_text())
    return {
        int(layer): np.frombuffer(base64.b64decode(text), "<f2").reshape(len(STATE_PROMPTS), -1).astype(np.float32)
        for layer, text in recorded.items()
    }


def record(url: str) -> None:
    """Record a server: its hidden states if the URL lists layers, otherwise its responses."""
    spec = parse_openai_spec(f"smollm@{url}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if spec.hidden_states is None:
        transport = RecordingTransport()
        model = OpenAIModel("smollm", spec.url, transport=transport)
        draft_and_continue(model)
        model.generate([PROMPT], max_tokens=24)
        read_labels(model)
        (FOLDER / "talk.json").write_text(json.dumps(transport.exchanges, indent=1) + "\n")
        return
    model = OpenAIModel("smollm", spec.url, hidden_states=spec.hidden_states)
    readings = model.read(STATE_PROMPTS, SignalRequest(layers=LAYERS))
    states = {layer: np.stack([reading.hidden[layer] for reading in readings]) for layer in LAYERS}
    texts = {layer: base64.b64encode(block.astype("<f2").tobytes()).decode() for layer, block in states.items()}
    (FOLDER / "states.json").write_text(json.dumps(texts, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.argv[1])
