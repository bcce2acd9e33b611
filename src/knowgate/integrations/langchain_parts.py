"""LangChain's chat models and retrievers as knowgate's: `langchain:PROVIDER:MODEL`, or the object itself (extra
`langchain`)."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from knowgate.errors import BadSetting
from knowgate.files import sha256_text
from knowgate.integrations.chat_model import Asked, ChatModel, read_logprobs
from knowgate.integrations.guests import blamed, check_framework, checked_list, run_coroutine
from knowgate.types import Completion, Passage

STOPPED = ("length", "max_tokens", "MAX_TOKENS")  # reasons of an answer that was cut


def open_langchain(value: str) -> LangChainModel:
    """`langchain:openai:gpt-4o-mini`, what `init_chat_model` takes; `...?logprobs=true` where it gives them."""
    check_framework("langchain", "langchain", majors=("1",))
    from langchain.chat_models import init_chat_model

    name, _, options = value.partition("?")
    if options not in ("", "logprobs=true"):
        raise BadSetting(f"'langchain:{value}' has the option '{options}'; allowed: logprobs=true.")
    with blamed(f"LangChain's model '{name}'"):
        chat = init_chat_model(name)
    return LangChainModel(chat, name=f"langchain:{name}", logprobs=bool(options))


class LangChainModel(ChatModel):
    """Any chat model of LangChain's. logprobs: it gives token log-probabilities when they are asked for."""

    def __init__(self, chat: Any, *, name: str = "", logprobs: bool = False):
        check_framework("langchain-core", "langchain", majors=("1",))
        own = getattr(chat, "model_name", None) or getattr(chat, "model", None) or type(chat).__name__
        super().__init__(name or f"langchain:{own}", logprobs=logprobs)
        self._chat = chat

    def _ask(self, asked: Asked) -> Completion:
        try:
            return _completion(self._chat.invoke(asked.text, **self._options(asked)), asked)
        except NotImplementedError:  # async only
            return _completion(run_coroutine(self._chat.ainvoke(asked.text, **self._options(asked))), asked)

    def _ask_in_parts(self, asked: Asked) -> Generator[str, None, Completion]:
        whole = None
        for chunk in self._chat.stream(asked.text, **self._options(asked)):
            whole = chunk if whole is None else whole + chunk
            if chunk.text:
                yield str(chunk.text)
        return Completion("") if whole is None else _completion(whole, asked)

    def _options(self, asked: Asked) -> dict[str, Any]:
        options: dict[str, Any] = {"max_tokens": asked.max_tokens, "temperature": asked.temperature}
        options |= {"top_p": asked.top_p} if asked.temperature else {}
        options |= {"seed": asked.seed} if asked.seed is not None else {}
        return options | ({"logprobs": True, "top_logprobs": 2} if self._logprobs else {})


def _completion(message: Any, asked: Asked) -> Completion:
    about: Mapping[str, Any] = getattr(message, "response_metadata", None) or {}
    usage: Mapping[str, Any] = getattr(message, "usage_metadata", None) or {}
    text = str(message.text)
    tokens = read_logprobs(about.get("logprobs"))
    n_tokens = int(usage.get("output_tokens") or (len(tokens) if tokens else len(text.split())))
    reason = about.get("finish_reason") or about.get("stop_reason") or about.get("done_reason")
    return Completion(text, tokens, finished=reason not in STOPPED, n_tokens=n_tokens)


class LangChainRetriever:
    """Any retriever of LangChain's as knowgate's. version: of its documents, where you know one: a guarantee on a
    threshold holds for one version only."""

    name = "langchain"

    def __init__(self, retriever: Any, *, version: str = ""):
        check_framework("langchain-core", "langchain", majors=("1",))
        self._retriever = retriever
        self.fingerprint = sha256_text("langchain", type(retriever).__qualname__, version)

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        what = f"LangChain's retriever {type(self._retriever).__name__}"
        with blamed(what):
            try:
                found = self._retriever.batch(list(queries))
            except NotImplementedError:  # async only
                found = run_coroutine(self._retriever.abatch(list(queries)))
        return [[_passage(one) for one in checked_list(row, what, k)] for row in found]


def _passage(document: Any) -> Passage:
    about = document.metadata or {}
    title = about.get("title") or about.get("source") or ""
    score = about.get("score", about.get("relevance_score"))
    name = document.id or about.get("id") or sha256_text(document.page_content)[:16]
    return Passage(
        str(name), document.page_content, str(title), float(score) if isinstance(score, int | float) else None
    )
