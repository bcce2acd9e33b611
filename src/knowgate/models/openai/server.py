"""One model on one server: prompts become requests, a 404 becomes a list of the models there are."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from knowgate.core.redaction import redact_message
from knowgate.errors import KnowgateError, ModelError, NotOffered, ServerError
from knowgate.models.openai.client import ApiClient, StatusError
from knowgate.models.openai.responses import parse_completions, parse_token_logprobs
from knowgate.types import Prompt

# Best first. Sampling: -1 switches top_k off in vLLM, SGLang and llama.cpp; some gateways want 0.
PROBED_PARAMETERS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "logprobs": (
        {"logprobs": True, "top_logprobs": 20},
        {"logprobs": True, "top_logprobs": 5},
        {"logprobs": True},
    ),
    "n": ({"n": 2},),
    "seed": ({"seed": 0},),
    "sampling": ({"top_k": -1, "min_p": 0.0}, {"top_k": 0, "min_p": 0.0}),
}
PostFunction = Callable[[str, dict[str, Any]], Any]  # path and body to reply
PROBE_TOKENS = 4
WIDE_TOP_TOKENS = 2_000  # tokens listed where a server has no cap: enough for entropies, 100 kB a place
REFUSAL_STATUSES = (400, 422, 500, 501)  # some servers crash on what they do not know


@dataclass(frozen=True)
class ServerCapabilities:
    """`top` is how many tokens are listed at each place; `sampling` switches off the server's own cuts."""

    logprobs: bool
    top: int
    n: bool
    seed: bool
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class _Trial:
    """A body the server took and its reply."""

    body: Mapping[str, Any]
    reply: Any


def probe_server(post: PostFunction, model: str) -> ServerCapabilities:
    """Ask once; raises what the plainest request raises."""
    plain: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": PROBE_TOKENS,
        "temperature": 1.0,
        "top_p": 1.0,
    }
    everything = {key: value for options in PROBED_PARAMETERS.values() for key, value in options[0].items()}
    trial = _try(post, {**plain, **everything}) or _one_by_one(post, plain)
    return _abilities(trial)


def probe_wide_logprobs(post: PostFunction, model: str) -> bool:
    """Whether the server lists as many tokens as it is asked for: llama.cpp does, most have a cap of 20 or so."""
    turn = [{"role": "user", "content": "Hi"}]
    asked = {"model": model, "messages": turn, "max_tokens": 1, "temperature": 0.0}
    trial = _try(post, {**asked, "logprobs": True, "top_logprobs": WIDE_TOP_TOKENS})
    listed = parse_token_logprobs(trial.reply) if trial else None
    return bool(listed) and len(listed[0].top) == WIDE_TOP_TOKENS  # type: ignore[index]


def _one_by_one(post: PostFunction, plain: Mapping[str, Any]) -> _Trial:
    best = _Trial(plain, post("/chat/completions", dict(plain)))
    for options in PROBED_PARAMETERS.values():
        trials = (_try(post, {**best.body, **option}) for option in options)
        best = next((trial for trial in trials if trial), best)
    return best


def _try(post: PostFunction, body: Mapping[str, Any]) -> _Trial | None:
    try:
        return _Trial(body, post("/chat/completions", dict(body)))
    except StatusError as error:
        if error.status in REFUSAL_STATUSES:
            return None
        raise


def _abilities(trial: _Trial) -> ServerCapabilities:
    listed = parse_token_logprobs(trial.reply) or []
    return ServerCapabilities(
        logprobs=bool(listed),
        top=min((len(token.top) for token in listed), default=0),
        n="n" in trial.body and len(parse_completions(trial.reply)) == trial.body["n"],
        seed="seed" in trial.body,
        sampling={key: trial.body[key] for key in ("top_k", "min_p") if key in trial.body},
    )


Result = TypeVar("Result")
MAX_SHOWN_MODELS = 20  # names listed in an error
# What makes a server read the last message as the beginning of its answer, by what the server calls itself.
CONTINUATION_FIELDS: Mapping[str, Mapping[str, bool]] = {
    "vllm": {"continue_final_message": True, "add_generation_prompt": False},
    "sglang": {"continue_final_message": True},
    "llamacpp": {},
}


@dataclass(frozen=True)
class CompletionRequest:
    """Where to ask and what."""

    path: str
    body: dict[str, Any]


class ServedModel:
    """`model` behind `wire`."""

    def __init__(self, model: str, wire: ApiClient):
        self.model = model
        self.wire = wire
        self._probing = threading.Lock()
        self._probed: ServerCapabilities | None = None
        self.refuses_drafts = False  # found out when it is first asked to go on from one
        self.forget: Callable[[str], None] | None = None  # told the id of each reply that is done with
        self.extracts = False  # it was started to give hidden states

    @property
    def abilities(self) -> ServerCapabilities:
        """Probed once, also when several threads ask first."""
        with self._probing:
            if self._probed is None:
                self._probed = self._explained(lambda: probe_server(self._post, self.model))
            return self._probed

    @functools.cached_property
    def is_wide(self) -> bool:
        """Whether it lists thousands of tokens at each place; asked once, by whoever needs them."""
        return self.abilities.top > 1 and self._explained(lambda: probe_wide_logprobs(self._post, self.model))

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

    def _request(self, prompt: Prompt, fields: dict[str, Any], draft: str) -> CompletionRequest:
        body = {"model": self.model, **fields}
        if prompt.raw:
            return CompletionRequest("/completions", {**body, "prompt": prompt.text + draft})
        turns = [{"role": "user", "content": prompt.text}]
        if draft:
            turns.append({"role": "assistant", "content": draft})
            body |= CONTINUATION_FIELDS[self.maker]
        return CompletionRequest("/chat/completions", {**body, "messages": turns})

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
            names = [redact_message(str(card.get("id"))) for card in self.cards()[: MAX_SHOWN_MODELS + 1]]
        except KnowgateError:
            names = []
        if not names:
            words = str(error).rstrip(".")
            return ServerError(f"{words}. Check the URL (most end in /v1) and the model's name '{self.model}'.")
        if self.model in names:
            return error
        more = ", ..." if len(names) > MAX_SHOWN_MODELS else ""
        return ServerError(
            f"{self.wire.url} has no model '{self.model}'. It has: {', '.join(names[:MAX_SHOWN_MODELS])}{more}."
        )


def tokenize_text(server: ServedModel, text: str, special: bool) -> tuple[int, ...]:
    """`special`: with what the model wants at the beginning of a text."""
    body: dict[str, Any] = {"model": server.model, "prompt": text, "add_special_tokens": special}
    if server.maker == "llamacpp":
        body = {"content": text, "add_special": special}
    return _asked(server, body)


def tokenize_prompt(server: ServedModel, turn: Prompt) -> tuple[int, ...]:
    """What the LLM is shown of a prompt, up to where its answer begins: on vLLM and SGLang."""
    if turn.raw:
        return tokenize_text(server, turn.text, True)
    messages = [{"role": "user", "content": turn.text}]
    return _asked(server, {"model": server.model, "messages": messages, "add_generation_prompt": True})


def _asked(server: ServedModel, body: dict[str, Any]) -> tuple[int, ...]:
    reply = call_native_endpoint(
        server.wire.post if server.maker == "sglang" else server.wire.post_beside, "/tokenize", body
    )
    tokens = reply.get("tokens") if isinstance(reply, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ModelError(f"{server.wire.url}: the server's tokeniser did not give a list of token ids.")
    return tuple(tokens)


def call_native_endpoint(post: Callable[[str, dict[str, Any]], Any], path: str, body: dict[str, Any]) -> Any:
    """An endpoint that OpenAI does not have: a gateway may hide it."""
    try:
        return post(path, body)
    except StatusError as error:
        if error.status not in (404, 405, 501):
            raise
        raise NotOffered(
            f"{str(error).rstrip('.')}. Labels and states by token ids need {path} of the server itself: give its own "
            "URL, ending in /v1, or a newer server."
        ) from None
