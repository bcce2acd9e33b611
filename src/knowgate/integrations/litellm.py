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
import logging
import os
from typing import Any

from knowgate.errors import BadSetting, KnowgateError
from knowgate.integrations.decider import Decider, as_decider, in_turn
from knowgate.integrations.guests import check_framework
from knowgate.pipeline import AdaptiveRAG, build_pipeline, decision_record, load_settings
from knowgate.server import Ungated, question_of, with_passages

check_framework("litellm", "litellm", majors=("1",))

from litellm.integrations.custom_logger import CustomLogger  # noqa: E402

CHATS = ("completion", "acompletion")
KEY = "knowgate"  # of the request's metadata
CONFIG = "KNOWGATE_CONFIG"
log = logging.getLogger(__name__)


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
        if call_type not in CHATS or not _is_chat(data.get("messages")):
            return data
        try:
            return await asyncio.to_thread(self.augment, data)
        except KnowgateError as error:
            log.warning("A chat went on without passages: %s", error)
            return _noted(data, {"failed": str(error)})

    async def async_post_call_response_headers_hook(
        self, data: dict[str, Any], user_api_key_dict: Any, response: Any, *rest: Any, **more: Any
    ) -> dict[str, str] | None:
        """Clients see what was decided, too."""
        record = (data.get("metadata") or {}).get(KEY) or {}
        if "retrieve" not in record:
            return None
        return {"x-knowgate-decision": "retrieve" if record["retrieve"] else "skip", "x-knowgate-gate": record["gate"]}

    def augment(self, data: dict[str, Any]) -> dict[str, Any]:
        """The request with a decision in its metadata and, where that says so, passages; the given one stays."""
        rag = self.decider.rag
        question = in_turn(rag.model, lambda: question_of(rag.model, data["messages"]))
        if isinstance(question, Ungated):
            return _noted(data, {"ungated": question.why})
        decision = self.decider.decide(question)
        record = decision_record(decision)
        if not decision.retrieve:
            return _noted(data, record)
        passages = in_turn(rag.model, lambda: rag.find(question))
        if not passages:
            return _noted(data, {**record, "notes": [*record["notes"], "nothing found"]})
        found = {**record, "passages": [one.id for one in passages]}
        return _noted(with_passages(data, passages, self.place), found)  # type: ignore[arg-type]


def _is_chat(messages: Any) -> bool:
    listed = messages if isinstance(messages, list) else []
    return bool(listed) and all(isinstance(one, dict) and isinstance(one.get("role"), str) for one in listed)


def _noted(data: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    return {**data, "metadata": {**(data.get("metadata") or {}), KEY: about}}


def __getattr__(name: str) -> Any:
    """`handler`, made when the proxy asks for it."""
    if name != "handler":
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    made = KnowgateHook(build_pipeline(load_settings(os.environ.get(CONFIG) or None)))
    globals()[name] = made
    return made
