"""Text to token ids by the server's own tokeniser: vLLM, SGLang and llama.cpp. Knows nothing of what they are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from knowgate.errors import ModelError, NotOffered
from knowgate.models.openai.server import Server
from knowgate.models.openai.wire import StatusError
from knowgate.types import Prompt


def tokenise(server: Server, text: str, special: bool) -> tuple[int, ...]:
    """`special`: with what the model wants at the beginning of a text."""
    body: dict[str, Any] = {"model": server.model, "prompt": text, "add_special_tokens": special}
    if server.maker == "llamacpp":
        body = {"content": text, "add_special": special}
    return _asked(server, body)


def tokenise_turn(server: Server, turn: Prompt) -> tuple[int, ...]:
    """What the LLM is shown of a prompt, up to where its answer begins: on vLLM and SGLang."""
    if turn.raw:
        return tokenise(server, turn.text, True)
    messages = [{"role": "user", "content": turn.text}]
    return _asked(server, {"model": server.model, "messages": messages, "add_generation_prompt": True})


def _asked(server: Server, body: dict[str, Any]) -> tuple[int, ...]:
    reply = own_endpoint(server.wire.post if server.maker == "sglang" else server.wire.post_beside, "/tokenize", body)
    tokens = reply.get("tokens") if isinstance(reply, dict) else None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ModelError(f"{server.wire.url}: the server's tokeniser did not give a list of token ids.")
    return tuple(tokens)


def own_endpoint(post: Callable[[str, dict[str, Any]], Any], path: str, body: dict[str, Any]) -> Any:
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
