"""LiteLLM: a callback for its proxy that adds passages to chats that need them, and its LLMs as knowgate models
(extra `litellm`).

    litellm_settings:
      callbacks: knowgate.integrations.litellm.handler

`handler` is built from the settings file that KNOWGATE_CONFIG names, else from knowgate.toml; it must name documents.
If the callback fails, the request is forwarded unchanged and its metadata says why.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Generator
from typing import Any

from knowgate.core.frameworks import check_framework_version
from knowgate.errors import BadSetting, KnowgateError
from knowgate.integrations.chat_model import ChatModel, ChatRequest, make_completion, parse_logprobs
from knowgate.integrations.decider import Decider, as_decider, run_in_model_thread
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.settings import load_settings
from knowgate.server.chat.request_formats import UngatedRequest, extract_question, insert_passages
from knowgate.types import Completion, Token

check_framework_version("litellm", "litellm", majors=("1",))

import litellm  # noqa: E402
from litellm.integrations.custom_logger import CustomLogger  # noqa: E402

CHAT_CALL_TYPES = ("completion", "acompletion")
METADATA_KEY = "knowgate"  # the decision in the metadata of a request
CONFIG_VARIABLE = "KNOWGATE_CONFIG"
logger = logging.getLogger(__name__)


class KnowgateHook(CustomLogger):
    """Adds passages to the chats of a LiteLLM proxy if the gate decides to retrieve.

    Args:
        rag: A pipeline with a retriever.
        place: Where passages go: `user` (before the question) or `system`.
    """

    def __init__(self, rag: AdaptiveRAG | Decider, *, place: str = "user"):
        super().__init__()
        pipeline = as_decider(rag).rag
        if pipeline.retriever is None:
            raise BadSetting("a LiteLLM callback needs documents: set `docs` or `index` in knowgate.toml.")
        if place not in ("user", "system"):
            raise BadSetting(f"place={place!r} is not allowed: it must be 'user' or 'system'.")
        self.decider, self.place = Decider(pipeline, fall_open=True), place

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        """Return the request, with passages if needed; never raises an error of knowgate."""
        if call_type not in CHAT_CALL_TYPES or not _is_chat(data.get("messages")):
            return data
        try:
            return await asyncio.to_thread(self.augment, data)
        except KnowgateError as error:
            logger.warning("A chat was forwarded without passages: %s", error)
            return _add_metadata(data, {"failed": str(error)})

    async def async_post_call_response_headers_hook(
        self, data: dict[str, Any], user_api_key_dict: Any, response: Any, *args: Any, **options: Any
    ) -> dict[str, str] | None:
        """Return response headers with the decision."""
        record = (data.get("metadata") or {}).get(METADATA_KEY) or {}
        if "retrieve" not in record:
            return None
        return {"x-knowgate-decision": "retrieve" if record["retrieve"] else "skip", "x-knowgate-gate": record["gate"]}

    def augment(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a request with the decision in its metadata and, if retrieval is needed, passages."""
        rag = self.decider.rag
        question = run_in_model_thread(rag.model, lambda: extract_question(rag.model, data["messages"]))
        if isinstance(question, UngatedRequest):
            return _add_metadata(data, {"ungated": question.reason})
        decision = self.decider.decide(question)
        record = decision_record(decision)
        if not decision.retrieve:
            return _add_metadata(data, record)
        passages = run_in_model_thread(rag.model, lambda: rag.retrieve(question))
        if not passages:
            return _add_metadata(data, {**record, "notes": [*record["notes"], "nothing found"]})
        augmented = insert_passages(data, passages, self.place)  # type: ignore[arg-type]
        return _add_metadata(augmented, {**record, "passages": [passage.id for passage in passages]})


def _is_chat(messages: Any) -> bool:
    if not isinstance(messages, list) or not messages:
        return False
    return all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)


def _add_metadata(data: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    return {**data, "metadata": {**(data.get("metadata") or {}), METADATA_KEY: record}}


def __getattr__(name: str) -> Any:
    """Build `handler` when the proxy imports it."""
    if name != "handler":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    handler = KnowgateHook(build_pipeline(load_settings(os.environ.get(CONFIG_VARIABLE) or None)))
    globals()[name] = handler
    return handler


# --- models ---------------------------------------------------------------------------------------


def open_litellm(value: str) -> LiteLLMModel:
    """Open a model by its LiteLLM name, such as `anthropic/claude-...`."""
    return LiteLLMModel(value)


class LiteLLMModel(ChatModel):
    """An LLM that LiteLLM can reach; API keys come from the variables that LiteLLM reads.

    Args:
        model: Its LiteLLM name.
        logprobs: Whether to request log-probabilities. Default: if LiteLLM says that the provider returns them.
        options: Passed to every `litellm.completion`, such as api_base.
    """

    def __init__(self, model: str, *, logprobs: bool | None = None, **options: Any):
        super().__init__(f"litellm:{model}", logprobs=_offers_logprobs(model) if logprobs is None else logprobs)
        self._model, self._options = model, options

    def _complete(self, request: ChatRequest) -> Completion:
        response = litellm.completion(**self._make_arguments(request))
        choice = response.choices[0]
        tokens = parse_logprobs(getattr(choice, "logprobs", None))
        n_tokens = getattr(getattr(response, "usage", None), "completion_tokens", None)
        return make_completion(choice.message.content or "", tokens, n_tokens, choice.finish_reason != "length")

    def _stream(self, request: ChatRequest) -> Generator[str, None, Completion]:
        pieces: list[str] = []
        tokens: list[Token] = []
        finished = True
        for chunk in litellm.completion(**self._make_arguments(request), stream=True):
            choice = chunk.choices[0]
            finished = choice.finish_reason != "length" if choice.finish_reason else finished
            tokens += parse_logprobs(getattr(choice, "logprobs", None)) or ()
            if piece := choice.delta.content:
                pieces.append(piece)
                yield piece
        return make_completion("".join(pieces), tuple(tokens) or None, None, finished)

    def _make_arguments(self, request: ChatRequest) -> dict[str, Any]:
        messages = [{"role": "user", "content": request.text}]
        arguments = {"model": self._model, "messages": messages, "drop_params": True}
        return {**self._make_options(request), **arguments, **self._options}


def _offers_logprobs(model: str) -> bool:
    try:
        return "logprobs" in (litellm.get_supported_openai_params(model) or ())
    except Exception:  # noqa: BLE001 - LiteLLM raises errors of its own for unknown names
        return False
