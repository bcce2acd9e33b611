"""LiteLLM (extra `litellm`): a callback for its proxy, and its LLMs as knowgate models.

The callback adds passages to the chats that need them. To use it, add this to the settings of the proxy:

    litellm_settings:
      callbacks: knowgate.integrations.litellm.handler

`handler` is built from the settings file that the environment variable KNOWGATE_CONFIG names, or from knowgate.toml. The
settings must name documents. If the callback fails, the request is forwarded unchanged and its metadata says why.
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
from knowgate.integrations.decider import METADATA_KEY, Decider, as_decider, run_in_model_thread
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.settings import load_settings
from knowgate.server.chat.request_formats import UngatedRequest, extract_question, insert_passages
from knowgate.types import Completion, Token

check_framework_version("litellm", "litellm", majors=("1",))

import litellm  # noqa: E402
from litellm.integrations.custom_logger import CustomLogger  # noqa: E402

CHAT_CALL_TYPES = ("completion", "acompletion")  # LiteLLM's names for chat requests
CONFIG_VARIABLE = "KNOWGATE_CONFIG"  # environment variable with the path of the settings file
logger = logging.getLogger(__name__)


class KnowgateHook(CustomLogger):
    """Callback of the LiteLLM proxy. It adds passages to a chat if the gate decides to retrieve.

    Args:
        rag: A pipeline with a retriever.
        place: Where to insert the passages: in the `user` message, before the question, or in the `system` message.

    Raises:
        BadSetting: The pipeline has no retriever, or `place` has another value.
    """

    def __init__(self, rag: AdaptiveRAG | Decider, *, place: str = "user"):
        super().__init__()
        pipeline = as_decider(rag).rag
        if pipeline.retriever is None:
            raise BadSetting("the LiteLLM callback needs documents to search. Set `docs` or `index` in knowgate.toml.")
        if place not in ("user", "system"):
            raise BadSetting(f"place={place!r} is not allowed: it must be 'user' or 'system'.")
        self.decider = Decider(pipeline, fall_open=True)
        self.place = place

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        """Return the request to forward, with passages if needed. After a failure, its metadata has the error."""
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
        """Return HTTP headers with the decision for the client, or None without a decision."""
        record = (data.get("metadata") or {}).get(METADATA_KEY) or {}
        if "retrieve" not in record:
            return None
        return {"x-knowgate-decision": "retrieve" if record["retrieve"] else "skip", "x-knowgate-gate": record["gate"]}

    def augment(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a chat request, with passages if needed. Its metadata has the decision."""
        rag = self.decider.rag
        question = run_in_model_thread(rag.model, lambda: extract_question(rag.model, data["messages"]))
        if isinstance(question, UngatedRequest):
            return _add_metadata(data, {"ungated": question.reason})
        decision = self.decider.decide(question)
        record = decision_record(decision)
        passages = run_in_model_thread(rag.model, lambda: rag.retrieve(question)) if decision.retrieve else []
        if passages:
            record["passages"] = [passage.id for passage in passages]
            data = insert_passages(data, passages, self.place)  # type: ignore[arg-type]
        elif decision.retrieve:
            record["notes"] = [*record["notes"], "nothing found"]
        return _add_metadata(data, record)


def _is_chat(messages: Any) -> bool:
    """Return whether a value is a non-empty list of chat messages with roles."""
    if not isinstance(messages, list) or not messages:
        return False
    return all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages)


def _add_metadata(data: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a request with `record` under the key `knowgate` of its metadata."""
    return {**data, "metadata": {**(data.get("metadata") or {}), METADATA_KEY: record}}


def __getattr__(name: str) -> Any:
    """Build the module attribute `handler` on first access. Other users of the module load no model."""
    if name != "handler":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    handler = KnowgateHook(build_pipeline(load_settings(os.environ.get(CONFIG_VARIABLE) or None)))
    globals()[name] = handler
    return handler


# --- models ---------------------------------------------------------------------------------------


class LiteLLMModel(ChatModel):
    """An LLM of any provider that LiteLLM supports. API keys are read from LiteLLM's environment variables.

    Args:
        model: The LiteLLM name of the model.
        logprobs: Whether to request log-probabilities. Default: True if LiteLLM says that the provider returns them.
        options: Further keyword arguments for every call of `litellm.completion`, such as `api_base`.
    """

    def __init__(self, model: str, *, logprobs: bool | None = None, **options: Any):
        super().__init__(f"litellm:{model}", logprobs=_offers_logprobs(model) if logprobs is None else logprobs)
        self._model = model
        self._options = options

    def _complete(self, request: ChatRequest) -> Completion:
        """Send one request and return the answer."""
        response = litellm.completion(**self._make_arguments(request))
        choice = response.choices[0]
        tokens = parse_logprobs(getattr(choice, "logprobs", None))
        n_tokens = getattr(getattr(response, "usage", None), "completion_tokens", None)
        return make_completion(choice.message.content or "", tokens, n_tokens, choice.finish_reason != "length")

    def _stream(self, request: ChatRequest) -> Generator[str, None, Completion]:
        """Yield the answer to one request piece by piece, and return it whole."""
        pieces: list[str] = []
        tokens: list[Token] = []
        finished = True
        for chunk in litellm.completion(**self._make_arguments(request), stream=True):
            choice = chunk.choices[0]
            if choice.finish_reason:  # only the last chunk has one
                finished = choice.finish_reason != "length"
            tokens += parse_logprobs(getattr(choice, "logprobs", None)) or ()
            if piece := choice.delta.content:
                pieces.append(piece)
                yield piece
        return make_completion("".join(pieces), tuple(tokens) or None, None, finished)

    def _make_arguments(self, request: ChatRequest) -> dict[str, Any]:
        """Return the arguments of `litellm.completion`. LiteLLM drops arguments unknown to the provider."""
        messages = [{"role": "user", "content": request.text}]
        arguments = {"model": self._model, "messages": messages, "drop_params": True}
        return {**self._make_options(request), **arguments, **self._options}


def _offers_logprobs(model: str) -> bool:
    """Return whether LiteLLM knows that the provider of a model returns log-probabilities."""
    try:
        return "logprobs" in (litellm.get_supported_openai_params(model) or ())
    except Exception:  # noqa: BLE001 - LiteLLM raises errors of its own for unknown names
        return False
