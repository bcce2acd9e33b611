"""Decides for a framework: rules first, then the gate. Takes turns with whoever else uses the LLM.

Where the user chose to fall open, a gate that fails is a retrieval that says so; otherwise its error goes out. Knows
no framework.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from knowgate.errors import BadSetting, KnowgateError
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.conversation import question_from_messages
from knowgate.pipeline.settings import load_settings
from knowgate.types import Decision, Model, Question

ResultT = TypeVar("ResultT")
logger = logging.getLogger(__name__)
GATE_FAILED = "gate failed"  # a note of decisions that nobody made
MODEL_THREAD_PREFIX = "knowgate-model"  # how the threads of a model are named


@dataclass(frozen=True)
class Decider:
    """Decides by `rag`, whose gate and rules count; its retriever, if any, is not asked.

    fall_open: retrieve where the gate fails, and say so, instead of raising.

    Example:
        >>> decider = open_decider(model="fake", gate="never")
        >>> decider.decide("Who wrote Emma?").retrieve
        False
    """

    rag: AdaptiveRAG
    fall_open: bool = False

    def decide(self, question: str | Question) -> Decision:
        return self._kept(lambda: self._decide(question))

    async def adecide(self, question: str | Question) -> Decision:
        return await asyncio.to_thread(self.decide, question)

    def decide_messages(self, messages: Sequence[Mapping[str, Any]]) -> Decision:
        """On the last question of a conversation of `{"role": ..., "content": ...}`, made to stand alone."""
        return self._kept(
            lambda: self._decide(
                run_in_model_thread(self.rag.model, lambda: question_from_messages(self.rag.model, messages))
            )
        )

    def __deepcopy__(self, memo: object) -> Decider:
        """Frameworks copy the programs they optimise; a model and its threads are shared, not copied."""
        return self

    def answer_from_memory(self, question: str) -> str:
        """What the LLM says without looking anything up."""
        rag, asked = self.rag, Question(question)
        work = lambda: rag.model.generate([rag.prompts.closed(asked)], max_tokens=rag.max_tokens)  # noqa: E731
        return run_in_model_thread(rag.model, work)[0][0].text

    def record(self, question: str | Question) -> dict[str, Any]:
        """The decision as JSON."""
        return decision_record(self.decide(question))

    def _decide(self, question: str | Question) -> Decision:
        return self._foreseen(question) or run_in_model_thread(self.rag.model, lambda: self.rag.decide(question))

    def _foreseen(self, question: str | Question) -> Decision | None:
        """The decision of a rule, so that nothing need be read of the LLM."""
        rag, text = self.rag, question if isinstance(question, str) else question.text
        if rag.rules is None or rag.shadow or not rag.gate.obeys_rules or not isinstance(text, str):
            return None
        ruling = rag.rules.decide(text)
        if ruling is None:
            return None
        threshold = rag.gate.threshold if rag.threshold is None else rag.threshold
        reason = f"{ruling.reason} (rule '{ruling.rule}')"
        return Decision(ruling.retrieve, float(ruling.retrieve), threshold, rag.gate.name, reason, rule=ruling.rule)

    def _kept(self, decide: Callable[[], Decision]) -> Decision:
        try:
            return decide()
        except KnowgateError as error:
            if not self.fall_open:
                raise
            logger.warning("The gate failed, so it is retrieved: %s", error)
            threshold = self.rag.gate.threshold if self.rag.threshold is None else self.rag.threshold
            why = f"the gate failed, so it is retrieved: {error.brief}"
            return Decision(True, 1.0, threshold, self.rag.gate.name, why, notes=(GATE_FAILED,))


def open_decider(config: str | Path | None = None, *, fall_open: bool = False, **settings: Any) -> Decider:
    """From `knowgate.toml`, or the settings of `knowgate decide` given here: model, gate, threshold, rules, ..."""
    return Decider(build_pipeline(load_settings(config, **settings), retrieves=False), fall_open)


def as_decider(given: AdaptiveRAG | Decider) -> Decider:
    """The decider itself, or one around a pipeline."""
    if isinstance(given, Decider):
        return given
    if isinstance(given, AdaptiveRAG):
        return Decider(given)
    raise BadSetting(f"{given!r} cannot decide: give an AdaptiveRAG, or open_decider(model=..., gate=...).")


def run_in_model_thread(model: Model, work: Callable[[], ResultT]) -> ResultT:
    """In the model's own threads, of which there are as many as may use it at once. Work that is there already, that
    of a retriever inside a pipeline say, goes on where it is: waiting for itself would never end."""
    if threading.current_thread().name.startswith(MODEL_THREAD_PREFIX):
        return work()
    return model.workers.submit(work).result()
