"""Whatever LiteLLM reaches as an LLM of knowgate's: `litellm:MODEL` (extra `litellm`). Keys come from the variables
that LiteLLM reads; log-probabilities are asked for where it says that the provider gives them."""

from __future__ import annotations

import functools
from collections.abc import Generator
from typing import Any

from knowgate.integrations.chat_model import Asked, ChatModel, read_logprobs
from knowgate.integrations.guests import check_framework
from knowgate.types import Completion, Token


def open_litellm(value: str) -> LiteLLMModel:
    """`litellm:anthropic/claude-...`, as LiteLLM names them."""
    return LiteLLMModel(value)


class LiteLLMModel(ChatModel):
    """options: handed to every `litellm.completion`, such as api_base."""

    def __init__(self, model: str, *, logprobs: bool | None = None, **options: Any):
        check_framework("litellm", "litellm", majors=("1",))
        given = _gives_logprobs(model) if logprobs is None else logprobs
        super().__init__(f"litellm:{model}", logprobs=given)
        self._model, self._options = model, options

    def _ask(self, asked: Asked) -> Completion:
        reply = self._completion(**self._request(asked))
        choice = reply.choices[0]
        text = choice.message.content or ""
        tokens = read_logprobs(getattr(choice, "logprobs", None))
        usage = getattr(getattr(reply, "usage", None), "completion_tokens", None)
        n_tokens = usage or (len(tokens) if tokens else len(text.split()))
        return Completion(text, tokens, finished=choice.finish_reason != "length", n_tokens=n_tokens)

    def _ask_in_parts(self, asked: Asked) -> Generator[str, None, Completion]:
        pieces: list[str] = []
        tokens: list[Token] = []
        finished = True
        for part in self._completion(**self._request(asked), stream=True):
            choice = part.choices[0]
            finished = choice.finish_reason != "length" if choice.finish_reason else finished
            tokens += read_logprobs(getattr(choice, "logprobs", None)) or ()
            if piece := choice.delta.content:
                pieces.append(piece)
                yield piece
        text = "".join(pieces)
        return Completion(text, tuple(tokens) or None, finished=finished, n_tokens=len(tokens) or len(text.split()))

    def _request(self, asked: Asked) -> dict[str, Any]:
        request = {
            "model": self._model,
            "messages": [{"role": "user", "content": asked.text}],
            "max_tokens": asked.max_tokens,
            "temperature": asked.temperature,
            "drop_params": True,
            **self._options,
        }
        request |= {"top_p": asked.top_p} if asked.temperature and asked.top_p < 1 else {}
        request |= {"seed": asked.seed} if asked.seed is not None else {}
        return request | ({"logprobs": True, "top_logprobs": 2} if self._logprobs else {})

    @functools.cached_property
    def _completion(self) -> Any:
        import litellm

        return litellm.completion


def _gives_logprobs(model: str) -> bool:
    import litellm

    try:
        return "logprobs" in (litellm.get_supported_openai_params(model) or ())
    except Exception:  # noqa: BLE001 - it raises a kind of its own for names it does not know
        return False
