"""One model on one server: prompts become requests, a 404 becomes a list of the models there are."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from knowgate.errors import KnowgateError, ServerError
from knowgate.models.openai.probe import Abilities, probe, probe_wide
from knowgate.models.openai.wire import StatusError, Wire
from knowgate.servers import one_line
from knowgate.types import Prompt

Result = TypeVar("Result")
SHOWN_MODELS = 20  # names listed in an error
# What makes a server read the last message as the beginning of its answer, by what the server calls itself.
GOES_ON: Mapping[str, Mapping[str, bool]] = {
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "sglang": {"continue_final_message": True},
    "llamacpp": {},
}


@dataclass(frozen=True)
class Request:
    """Where to ask and what."""

    path: str
    body: dict[str, Any]


class Server:
    """`model` behind `wire`."""

    def __init__(self, model: str, wire: Wire):
        self.model = model
        self.wire = wire
        self._probing = threading.Lock()
        self._probed: Abilities | None = None
        self.refuses_drafts = False  # found out when it is first asked to go on from one
        self.forget: Callable[[str], None] | None = None  # told the id of each reply that is done with
        self.extracts = False  # it was started to give hidden states

    @property
    def abilities(self) -> Abilities:
        """Probed once, also when several threads ask first."""
        with self._probing:
            if self._probed is None:
                self._probed = self._explained(lambda: probe(self._post, self.model))
            return self._probed

    @functools.cached_property
    def is_wide(self) -> bool:
        """Whether it lists thousands of tokens at each place; asked once, by whoever needs them."""
        return self.abilities.top > 1 and self._explained(lambda: probe_wide(self._post, self.model))

    @property
    def names_tokens(self) -> bool:
        """Whether it lists the tokens it is asked for. vLLM 0.32 dies of such a request while it extracts states."""
        return self.maker == "sglang" or (self.maker == "vllm" and not self.extracts)

    def ask(self, prompt: Prompt, fields: dict[str, Any], draft: str = "") -> Any:
        """The reply to a user turn, or to text that is continued as it stands; after `draft`, what follows it."""
        request = self._request(prompt, fields, draft)
        return self._explained(lambda: self._post(request.path, request.body))

    def ask_in_parts(self, prompt: Prompt, fields: dict[str, Any], draft: str = "") -> Generator[Any, None, None]:
        """The same as a stream: see `Wire.stream`."""
        request = self._request(prompt, {**fields, "stream": True}, draft)
        parts = self._explained(lambda: self.wire.stream(request.path, request.body))
        return parts if self.forget is None else self._done_at_the_end(parts)

    def _request(self, prompt: Prompt, fields: dict[str, Any], draft: str) -> Request:
        body = {"model": self.model, **fields}
        if prompt.raw:
            return Request("/completions", {**body, "prompt": prompt.text + draft})
        turns = [{"role": "user", "content": prompt.text}]
        if draft:
            turns.append({"role": "assistant", "content": draft})
            body |= GOES_ON[self.maker]
        return Request("/chat/completions", {**body, "messages": turns})

    def complete(self, ids: Sequence[int], fields: dict[str, Any], *, keep: bool = False) -> Any:
        """The reply to text given as token ids, which is continued as it stands. keep: what it left is still wanted."""
        body = {"model": self.model, **fields, "prompt": list(ids)}
        return self._explained(lambda: (self.wire.post if keep else self._post)("/completions", body))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._done(self.wire.post(path, body))

    def _done(self, reply: Any) -> Any:
        if self.forget is not None and isinstance(reply, dict) and isinstance(reply.get("id"), str):
            self.forget(reply["id"])
        return reply

    def _done_at_the_end(self, parts: Generator[Any, None, None]) -> Generator[Any, None, None]:
        last: Any = None
        with contextlib.closing(parts):
            for part in parts:
                last = part if isinstance(part, dict) else last
                yield part
        self._done(last)

    @functools.cached_property
    def card(self) -> dict[str, Any]:
        """What the server says of the model; of another, if it answers to names it does not list."""
        cards = self.cards()
        return next((card for card in cards if card.get("id") == self.model), cards[0] if cards else {})

    @property
    def maker(self) -> str:
        """What the server calls itself: 'vllm', 'sglang', 'llamacpp', ...; asked once."""
        return str(self.card.get("owned_by") or "nothing")

    @property
    def adapter(self) -> str:
        """Name of the LoRA adapter if the model is one, on SGLang: listed with a parent, or as BASE:ADAPTER."""
        return self.model if self.card.get("parent") else self.model.partition(":")[2]

    def cards(self) -> list[dict[str, Any]]:
        """What GET /models lists; nothing where the server has no such page."""
        try:
            reply = self.wire.get("/models")
        except StatusError as error:
            if error.status in (404, 405, 501):
                return []
            raise
        cards = reply.get("data") if isinstance(reply, dict) else None
        return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []

    def _explained(self, ask: Callable[[], Result]) -> Result:
        try:
            return ask()
        except StatusError as error:
            if error.status != 404:
                raise
            raise self._not_found(error) from None

    def _not_found(self, error: StatusError) -> ServerError:
        try:
            names = [one_line(str(card.get("id"))) for card in self.cards()[: SHOWN_MODELS + 1]]
        except KnowgateError:
            names = []
        if not names:
            words = str(error).rstrip(".")
            return ServerError(f"{words}. Check the URL (most end in /v1) and the model's name '{self.model}'.")
        if self.model in names:
            return error
        more = ", ..." if len(names) > SHOWN_MODELS else ""
        return ServerError(
            f"{self.wire.url} has no model '{self.model}'. It has: {', '.join(names[:SHOWN_MODELS])}{more}."
        )
