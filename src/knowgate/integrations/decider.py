"""Decisions for other frameworks: rules first, then the gate, in the threads of the model."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from knowgate.errors import BadSetting, KnowgateError
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.builder import build_pipeline
from knowgate.pipeline.conversation import question_from_messages
from knowgate.pipeline.settings import load_settings
from knowgate.types import Decision, Model, Question

ResultT = TypeVar("ResultT")
DecisionCallback = Callable[[str, Decision], None]  # receives a question and its decision
GATE_FAILED = "gate failed"  # note of a decision to retrieve because the gate failed
MODEL_THREAD_PREFIX = "knowgate-model"  # the names of a model's threads start with this
MAX_CACHED_DECISIONS = 256
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decider:
    """Decides with the rules and the gate of a pipeline; its retriever is not used.

    Args:
        rag: The pipeline.
        fall_open: If the gate fails, decide to retrieve, with a note, instead of raising an error.

    Example:
        >>> decider = open_decider(model="fake", gate="never")
        >>> decider.decide("Who wrote Emma?").retrieve
        False
    """

    rag: AdaptiveRAG
    fall_open: bool = False

    def decide(self, question: str | Question) -> Decision:
        """Decide whether a question needs retrieval."""
        return self._handle_failure(lambda: self._decide(question))

    async def adecide(self, question: str | Question) -> Decision:
        """Decide whether a question needs retrieval, without blocking the event loop."""
        return await asyncio.to_thread(self.decide, question)

    def decide_messages(self, messages: Sequence[Mapping[str, Any]]) -> Decision:
        """Decide on the last question of a conversation, rewritten so that it can be understood alone.

        Args:
            messages: Mappings of the form `{"role": ..., "content": ...}`.
        """
        model = self.rag.model
        return self._handle_failure(
            lambda: self._decide(run_in_model_thread(model, lambda: question_from_messages(model, messages)))
        )

    def __deepcopy__(self, memo: object) -> Decider:
        """Return the decider itself: frameworks copy programs to optimize them, but a model must be shared."""
        return self

    def answer_from_memory(self, question: str) -> str:
        """Answer a question without retrieval."""
        rag, prompt = self.rag, self.rag.prompts.closed(Question(question))
        completions = run_in_model_thread(rag.model, lambda: rag.model.generate([prompt], max_tokens=rag.max_tokens))
        return completions[0][0].text

    def _decide(self, question: str | Question) -> Decision:
        return self._apply_rules(question) or run_in_model_thread(self.rag.model, lambda: self.rag.decide(question))

    def _apply_rules(self, question: str | Question) -> Decision | None:
        """Return the decision of a rule, which needs no call to the LLM; None if no rule matches."""
        rag, text = self.rag, question if isinstance(question, str) else question.text
        if rag.rules is None or rag.shadow or not rag.gate.obeys_rules or not isinstance(text, str):
            return None
        ruling = rag.rules.decide(text)
        if ruling is None:
            return None
        reason = f"{ruling.reason} (rule '{ruling.rule}')"
        need = float(ruling.retrieve)
        return Decision(ruling.retrieve, need, self._threshold, rag.gate.name, reason, rule=ruling.rule)

    def _handle_failure(self, decide: Callable[[], Decision]) -> Decision:
        try:
            return decide()
        except KnowgateError as error:
            if not self.fall_open:
                raise
            logger.warning("The gate failed, retrieving: %s", error)
            reason = f"the gate failed, retrieving: {error.brief}"
            return Decision(True, 1.0, self._threshold, self.rag.gate.name, reason, notes=(GATE_FAILED,))

    @property
    def _threshold(self) -> float:
        return self.rag.gate.threshold if self.rag.threshold is None else self.rag.threshold


def open_decider(config: str | Path | None = None, *, fall_open: bool = False, **settings: Any) -> Decider:
    """Load a model and a gate to decide with.

    Args:
        config: A settings file. Default: `knowgate.toml` in the current folder, if it exists.
        fall_open: If the gate fails, decide to retrieve instead of raising an error.
        settings: The settings of `knowgate decide`, such as model, gate, threshold and rules.
    """
    return Decider(build_pipeline(load_settings(config, **settings), retrieves=False), fall_open)


def as_decider(value: AdaptiveRAG | Decider) -> Decider:
    """Return a decider unchanged; make one from a pipeline."""
    if isinstance(value, Decider):
        return value
    if isinstance(value, AdaptiveRAG):
        return Decider(value)
    raise BadSetting(f"{value!r} cannot decide. Use an AdaptiveRAG, or open_decider(model=..., gate=...).")


def cache_decisions(decider: AdaptiveRAG | Decider, on_decision: DecisionCallback | None) -> Callable[[str], Decision]:
    """Return a function that decides on each question once, because agents ask again at every step of a run.

    Args:
        decider: What decides.
        on_decision: Called once for each decision.
    """
    source = as_decider(decider)

    @functools.lru_cache(maxsize=MAX_CACHED_DECISIONS)
    def decide(question: str) -> Decision:
        decision = source.decide(question)
        if on_decision is not None:
            on_decision(question, decision)
        return decision

    return decide


def run_in_model_thread(model: Model, work: Callable[[], ResultT]) -> ResultT:
    """Run work in a thread of the model and wait for it, so that concurrent callers take turns.

    Work that is already in such a thread runs directly, because it would wait for itself forever.
    """
    if threading.current_thread().name.startswith(MODEL_THREAD_PREFIX):
        return work()
    return model.workers.submit(work).result()
