"""Hidden states from a server that was started to give them: those at the last token of what it is shown.

vLLM writes them into a folder that both machines see (`states_file`), for every request; what nobody reads is deleted.
SGLang 0.5.23 (managers/scheduler_components/batch_result_processor.py, layers/logits_processor.py) gives them in the
reply of POST /generate: with `return_hidden_states` "last", meta_info.hidden_states is one list of numbers, the layers
of --return-aux-hidden-state-layer-ids side by side, or the last layer where none are named. Its layer i is
transformers' i + 1.

Prompts go out as token ids, as the server's own tokeniser gave them, so that a state is that of the very tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from knowgate.errors import BadSetting, ModelError, NotOffered
from knowgate.models.openai.labels import NEUTRAL
from knowgate.models.openai.server import Server
from knowgate.models.openai.spec import StateLayers
from knowgate.models.openai.states_file import drop_states, take_states
from knowgate.models.openai.tokens import own_endpoint, tokenise_turn
from knowgate.types import Prompt, Vector, Want

States = Mapping[int, Vector]
HOW = "docs/runtimes.md says how to start the server for it"


@dataclass(frozen=True)
class Around:
    """The states at the last token of a prompt, and at that of its draft."""

    before: States
    after: States


class ServedStates:
    """The states that one server gives, by the numbers of their layers."""

    def __init__(self, server: Server, given: StateLayers):
        self._server = server
        self._given = given

    @property
    def depth(self) -> int:
        return self._given.depth

    def check(self, layers: Sequence[int]) -> None:
        """Refuse layers that the server was not started for, and servers that give none."""
        lacking = [layer for layer in layers if layer % self.depth not in self._given.layers]
        if lacking:
            there = ", ".join(map(str, self._given.layers))
            raise NotOffered(
                f"layer {lacking[0]} is asked for, and the server gives {there}. Start it with that layer, and name "
                "all of them behind its URL: #layers=..."
            )
        if self._server.maker not in ("vllm", "sglang"):
            raise NotOffered(
                f"the server of openai:{self._server.model} calls itself '{self._server.maker}': hidden states come "
                "from servers of vLLM and SGLang, and from models in this process."
            )
        if self._server.maker == "vllm" and self._given.storage is None:
            raise BadSetting(
                "vLLM writes hidden states into a folder: name its shared_storage_path, as it is called on this "
                "machine, behind the server's URL: #layers=...&storage=DIR"
            )

    def around(self, prompt: Prompt, draft: Sequence[int], want: Want) -> Around:
        """draft: the token ids of the draft, without the token that ended it."""
        ids = [*tokenise_turn(self._server, prompt)]
        before = self._named(self._at_end(ids), want.layers)
        if not want.after_draft:
            return Around(before, {})
        return Around(before, self._named(self._at_end([*ids, *draft]), want.layers) if draft else before)

    def forget(self, reply: str) -> None:
        """Delete what vLLM wrote for a request whose states nobody asked for, by the id of its reply."""
        if self._given.storage is not None:
            drop_states(self._given.storage, reply)

    def _named(self, states: Vector, wanted: Sequence[int]) -> States:
        places = {layer: place for place, layer in enumerate(self._given.layers)}
        return {layer: states[places[layer % self.depth]] for layer in wanted}

    def _at_end(self, ids: list[int]) -> Vector:
        states = self._from_sglang(ids) if self._server.maker == "sglang" else self._from_vllm(ids)
        if len(states) != len(self._given.layers):
            raise BadSetting(
                f"the server gives hidden states of {len(states)} layers, and {len(self._given.layers)} are named "
                f"behind its URL ({', '.join(map(str, self._given.layers))}). Name those it was started with, in their "
                "order."
            )
        return states

    def _from_vllm(self, ids: list[int]) -> Vector:
        reply = self._server.complete(ids, {**NEUTRAL, "max_tokens": 1}, keep=True)
        told = _told(reply)
        if told is None or self._given.storage is None:
            raise NotOffered(f"openai:{self._server.model} gave no hidden states; {HOW}.")
        found = take_states(self._given.storage, told)
        if found.token_ids != ids:
            raise ModelError("the server's hidden states are those of other tokens than were sent.")
        return found.states

    def _from_sglang(self, ids: list[int]) -> Vector:
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {**NEUTRAL, "max_new_tokens": 1},
            "return_hidden_states": "last",
        }
        adapter = {"lora_path": self._server.adapter} if self._server.adapter else {}
        reply = own_endpoint(self._server.wire.post_beside, "/generate", {**body, **adapter})
        try:
            given = reply["meta_info"].get("hidden_states")
            if given is None:
                raise NotOffered(f"openai:{self._server.model} gave no hidden states; {HOW}.")
            row = np.array(given[-1], dtype=np.float32)
            if row.ndim != 1 or not row.size or row.size % len(self._given.layers):
                raise BadSetting(
                    f"the server gives {row.size} numbers a token, which are not those of {len(self._given.layers)} "
                    "layers. Name the layers it was started with, in their order."
                )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            raise ModelError("the server's reply has hidden states of an unknown form.") from None
        if not np.isfinite(row).all():
            raise ModelError("the server gave NaN or infinite hidden states: its weights or number format are bad.")
        return row.reshape(len(self._given.layers), -1)


def _told(reply: Any) -> str | None:
    """The file a reply tells of."""
    given = reply.get("kv_transfer_params") if isinstance(reply, dict) else None
    told = given.get("hidden_states_path") if isinstance(given, dict) else None
    return told if isinstance(told, str) else None
