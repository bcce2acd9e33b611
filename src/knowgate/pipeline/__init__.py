"""The way of a question, and how settings become one: `AdaptiveRAG`, settings, presets, assembly, answers as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.pipeline.adaptive_rag import AdaptiveRAG
    from knowgate.pipeline.answer_json import answer_record, decision_record
    from knowgate.pipeline.assemble import build_pipeline, build_prompts, cached_index
    from knowgate.pipeline.case import is_whole
    from knowgate.pipeline.conversation import Conversation, from_messages
    from knowgate.pipeline.settings import Settings, load_settings
    from knowgate.pipeline.traffic import TrafficLog
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "AdaptiveRAG",
    "Conversation",
    "Settings",
    "TrafficLog",
    "answer_record",
    "build_pipeline",
    "build_prompts",
    "cached_index",
    "decision_record",
    "from_messages",
    "is_whole",
    "load_settings",
]
