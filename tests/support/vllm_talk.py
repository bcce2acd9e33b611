"""What was once said between knowgate and a real vLLM 0.32, and how it is said again.

`python -m tests.support.vllm_talk URL` on a server of the embedded model (converted: `gguf:` leaves it in the cache)
called 'smollm' writes tests/fixtures/vllm/talk.json anew; with `#layers=15,23&storage=DIR` behind the URL, states.json.
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
from knowgate.models.openai.spec import HiddenStateConfig, parse_openai_spec
from knowgate.types import Completion, LabelPrompt, Prompt, SignalRequest, Vector

FOLDER = Path(__file__).parents[1] / "fixtures" / "vllm"
TURN = Prompt("Tell me in three sentences who wrote Faust.")
LABELS = ("zebra", "purple")  # what no sane answer begins with
LAYERS = (15, 23)
ASKED = (TURN, Prompt("How many legs does a spider have?"), Prompt("The capital of France is", raw=True))


class Talk:
    """Requests with their replies; whatever else is asked is an error."""

    def __init__(self, said: list[dict[str, Any]]):
        self.said = said
        self.asked: list[tuple[str, dict[str, Any]]] = []

    @classmethod
    def recorded(cls) -> Talk:
        return cls(json.loads((FOLDER / "talk.json").read_text()))

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path, body = request.url.path, json.loads(request.content) if request.content else {}
        self.asked.append((path, body))
        for one in self.said:
            if (one["path"], one["body"]) == (path, body):
                return httpx.Response(one["status"], json=one["reply"])
        raise AssertionError(f"nobody ever asked a real vLLM this: {path} {body}")


class Recording(httpx.BaseTransport):
    """The network, with a notebook."""

    def __init__(self) -> None:
        self.way = httpx.HTTPTransport()
        self.said: list[dict[str, Any]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = self.way.handle_request(request)
        reply = json.loads(response.read())
        body = json.loads(request.content) if request.content else {}
        one = {"path": request.url.path, "body": body, "status": response.status_code, "reply": shortened(reply)}
        self.said.append(one)
        response.close()
        return httpx.Response(response.status_code, json=reply)

    def close(self) -> None:
        self.way.close()


def shortened(reply: Any) -> Any:
    """Without what is empty, spelled in bytes, or of this machine."""
    if isinstance(reply, list):
        return [shortened(one) for one in reply]
    if not isinstance(reply, dict):
        return reply
    left_out = ("bytes", "permission", "root")
    return {key: shortened(value) for key, value in reply.items() if value is not None and key not in left_out}


def drafted_and_finished(model: OpenAIModel) -> tuple[Completion, Completion]:
    """A draft of eight tokens, and what it became."""
    reading = model.read([TURN], SignalRequest(draft_tokens=8))[0]
    assert reading.draft is not None
    return reading.draft, model.generate([TURN], max_tokens=24, resume=[reading.resume])[0][0]


def labelled(model: OpenAIModel) -> Vector:
    return model.label_logits([LabelPrompt((TURN.text,), raw=False)], LABELS)[0]


def recorded_states() -> dict[int, Vector]:
    """Of each layer the states of `ASKED`, as vLLM gave them."""
    found = json.loads((FOLDER / "states.json").read_text())
    return {
        int(layer): np.frombuffer(base64.b64decode(text), "<f2").reshape(len(ASKED), -1).astype(np.float32)
        for layer, text in found.items()
    }


def record(url: str) -> None:
    spec = parse_openai_spec(f"smollm@{url}")
    FOLDER.mkdir(parents=True, exist_ok=True)
    if spec.states is None:
        notebook = Recording()
        model = OpenAIModel("smollm", spec.url, transport=notebook)
        drafted_and_finished(model)
        model.generate([TURN], max_tokens=24)
        labelled(model)
        (FOLDER / "talk.json").write_text(json.dumps(notebook.said, indent=1) + "\n")
        return
    readings = OpenAIModel("smollm", spec.url, hidden_states=spec.hidden_states).read(
        ASKED, SignalRequest(layers=LAYERS)
    )
    states = {layer: np.stack([reading.hidden[layer] for reading in readings]) for layer in LAYERS}
    texts = {layer: base64.b64encode(block.astype("<f2").tobytes()).decode() for layer, block in states.items()}
    (FOLDER / "states.json").write_text(json.dumps(texts, indent=1) + "\n")


def with_states(folder: Path) -> HiddenStateConfig:
    return HiddenStateConfig(LAYERS, 31, folder)


if __name__ == "__main__":
    record(sys.argv[1])
