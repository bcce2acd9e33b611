"""LiteLLM's proxy: a callback that decides on each chat, and puts passages before the question where it must be looked
up (extra `litellm`).

    litellm_settings:
      callbacks: knowgate.integrations.litellm.handler

`handler` is made from the config file that KNOWGATE_CONFIG names, else from knowgate.toml; it must name documents. What
fails falls open: the request goes on as it is, and its metadata says why. LiteLLM's models as knowgate's are in
`litellm_parts.py`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Generator
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from knowgate.core.frameworks import check_framework_version
from knowgate.errors import BadSetting, KnowgateError
from knowgate.integrations.chat_model import ChatModel, ChatRequest, parse_logprobs
from knowgate.integrations.decider import Decider, as_decider, run_in_model_thread
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.settings import load_settings
from knowgate.server.chat.request_formats import UngatedRequest, extract_question, insert_passages
from knowgate.types import Completion, Token

check_framework_version("litellm", "litellm", majors=("1",))


CHAT_CALL_TYPES = ("completion", "acompletion")
METADATA_KEY = "knowgate"  # of the request's metadata
CONFIG_VARIABLE = "KNOWGATE_CONFIG"
logger = logging.getLogger(__name__)


class KnowgateHook(CustomLogger):
    """Gates and augments the chats of a LiteLLM proxy. place: user or system, where passages go."""

    def __init__(self, rag: AdaptiveRAG | Decider, *, place: str = "user"):
        super().__init__()
        given = as_decider(rag)
        if given.rag.retriever is None:
            raise BadSetting("the pipeline of a LiteLLM callback needs documents: set docs or index in knowgate.toml.")
        if place not in ("user", "system"):
            raise BadSetting(f"place is '{place}'; allowed: user, system.")
        self.decider, self.place = Decider(given.rag, fall_open=True), place

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        """The request, with passages where it must be looked up. Never stands in its way."""
        if call_type not in CHAT_CALL_TYPES or not _is_chat(data.get("messages")):
            return data
        try:
            return await asyncio.to_thread(self.augment, data)
        except KnowgateError as error:
            logger.warning("A chat went on without passages: %s", error)
            return _noted(data, {"failed": str(error)})

    async def async_post_call_response_headers_hook(
        self, data: dict[str, Any], user_api_key_dict: Any, response: Any, *rest: Any, **more: Any
    ) -> dict[str, str] | None:
        """Clients see what was decided, too."""
        record = (data.get("metadata") or {}).get(METADATA_KEY) or {}
        if "retrieve" not in record:
            return None
        return {"x-knowgate-decision": "retrieve" if record["retrieve"] else "skip", "x-knowgate-gate": record["gate"]}

    def augment(self, data: dict[str, Any]) -> dict[str, Any]:
        """The request with a decision in its metadata and, where that says so, passages; the given one stays."""
        rag = self.decider.rag
        question = run_in_model_thread(rag.model, lambda: extract_question(rag.model, data["messages"]))
        if isinstance(question, UngatedRequest):
            return _noted(data, {"ungated": question.reason})
        decision = self.decider.decide(question)
        record = decision_record(decision)
        if not decision.retrieve:
            return _noted(data, record)
        passages = run_in_model_thread(rag.model, lambda: rag.retrieve(question))
        if not passages:
            return _noted(data, {**record, "notes": [*record["notes"], "nothing found"]})
        found = {**record, "passages": [one.id for one in passages]}
        return _noted(insert_passages(data, passages, self.place), found)  # type: ignore[arg-type]


def _is_chat(messages: Any) -> bool:
    listed = messages if isinstance(messages, list) else []
    return bool(listed) and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in listed)


def _noted(data: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    return {**data, "metadata": {**(data.get("metadata") or {}), METADATA_KEY: about}}


def __getattr__(name: str) -> Any:
    """`handler`, made when the proxy asks for it."""
    if name != "handler":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    made = KnowgateHook(build_pipeline(load_settings(os.environ.get(CONFIG_VARIABLE) or None)))
    globals()[name] = made
    return made


def open_litellm(value: str) -> LiteLLMModel:
    """`litellm:anthropic/claude-...`, as LiteLLM names them."""
    return LiteLLMModel(value)


class LiteLLMModel(ChatModel):
    """options: handed to every `litellm.completion`, such as api_base."""

    def __init__(self, model: str, *, logprobs: bool | None = None, **options: Any):
        check_framework_version("litellm", "litellm", majors=("1",))
        given = _gives_logprobs(model) if logprobs is None else logprobs
        super().__init__(f"litellm:{model}", logprobs=given)
        self._model, self._options = model, options

    def _ask(self, asked: ChatRequest) -> Completion:
        reply = self._completion(**self._request(asked))
        choice = reply.choices[0]
        text = choice.message.content or ""
        tokens = parse_logprobs(getattr(choice, "logprobs", None))
        usage = getattr(getattr(reply, "usage", None), "completion_tokens", None)
        n_tokens = usage or (len(tokens) if tokens else len(text.split()))
        return Completion(text, tokens, finished=choice.finish_reason != "length", n_tokens=n_tokens)

    def _ask_in_parts(self, asked: ChatRequest) -> Generator[str, None, Completion]:
        pieces: list[str] = []
        tokens: list[Token] = []
        finished = True
        for part in self._completion(**self._request(asked), stream=True):
            choice = part.choices[0]
            finished = choice.finish_reason != "length" if choice.finish_reason else finished
            tokens += parse_logprobs(getattr(choice, "logprobs", None)) or ()
            if piece := choice.delta.content:
                pieces.append(piece)
                yield piece
        text = "".join(pieces)
        return Completion(text, tuple(tokens) or None, finished=finished, n_tokens=len(tokens) or len(text.split()))

    def _request(self, asked: ChatRequest) -> dict[str, Any]:
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
