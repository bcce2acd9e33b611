"""Decide for other frameworks whether a question needs retrieval: first by rules, then by the gate.

The gate runs in the worker threads of its model, so that concurrent callers do not disturb each other.
"""

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
GATE_FAILED = "gate failed"  # note on a decision that retrieves only because the gate failed
METADATA_KEY = "knowgate"  # key of the decision in the metadata of other frameworks
MODEL_THREAD_PREFIX = "knowgate-model"  # the names of a model's worker threads start with this
MAX_CACHED_DECISIONS = 256  # questions whose decisions `cache_decisions` keeps
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Decider:
    """Decides whether questions need retrieval, with the rules and gate of a pipeline. Nothing is retrieved.

    Args:
        rag: The pipeline.
        fall_open: What happens if the gate fails: True decides to retrieve and adds a note, False raises the error.

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
        """Decide whether the last question of a conversation needs retrieval.

        The model first rewrites a follow-up question.

        Args:
            messages: The chat messages, as mappings of the form `{"role": ..., "content": ...}`.
        """
        model = self.rag.model

        def decide() -> Decision:
            return self._decide(run_in_model_thread(model, lambda: question_from_messages(model, messages)))

        return self._handle_failure(decide)

    def __deepcopy__(self, memo: object) -> Decider:
        """Return the decider itself instead of a copy. Copies made by a framework must share one model."""
        return self

    def answer_from_memory(self, question: str) -> str:
        """Return the LLM's answer to a question without retrieval."""
        rag = self.rag
        prompt = rag.prompts.closed(Question(question))
        completions = run_in_model_thread(rag.model, lambda: rag.model.generate([prompt], max_tokens=rag.max_tokens))
        return completions[0][0].text

    def _decide(self, question: str | Question) -> Decision:
        """Decide by the rules or, if none matches, by the gate in a worker thread of the model."""
        return self._apply_rules(question) or run_in_model_thread(self.rag.model, lambda: self.rag.decide(question))

    def _apply_rules(self, question: str | Question) -> Decision | None:
        """Return the decision of the first matching rule, or None. Rules need no LLM.

        Returns:
            The decision, or None if the gate must decide: if no rule matches, the pipeline has no rules, or it runs in
            shadow mode, in which it retrieves for every question.
        """
        rag = self.rag
        text = question if isinstance(question, str) else question.text
        if rag.rules is None or rag.shadow or not isinstance(text, str):
            return None
        return rag.rules.make_decision(text, rag.gate, rag.used_threshold)

    def _handle_failure(self, decide: Callable[[], Decision]) -> Decision:
        """Return the result of `decide`. With `fall_open`, a failure means to retrieve.

        Raises:
            KnowgateError: `decide` failed and `fall_open` is not set.
        """
        try:
            return decide()
        except KnowgateError as error:
            if not self.fall_open:
                raise
            logger.warning("The gate failed, so passages are retrieved: %s", error)
            reason = f"the gate failed, retrieving: {error.brief}"
            return Decision(True, 1.0, self.rag.used_threshold, self.rag.gate.name, reason, notes=(GATE_FAILED,))


def open_decider(config: str | Path | None = None, *, fall_open: bool = False, **settings: Any) -> Decider:
    """Load a model and a gate, and return a decider that uses them.

    Args:
        config: A settings file. Default: `knowgate.toml` in the current folder, if it exists.
        fall_open: If the gate fails, decide to retrieve instead of raising an error.
        settings: Settings that override the file, such as model, gate, threshold and rules. They are the same as for
            the command `knowgate decide`.
    """
    return Decider(build_pipeline(load_settings(config, **settings), retrieves=False), fall_open)


def as_decider(value: AdaptiveRAG | Decider) -> Decider:
    """Return a decider as it is, or make one from a pipeline.

    Raises:
        BadSetting: The object is neither a decider nor a pipeline.
    """
    if isinstance(value, Decider):
        return value
    if isinstance(value, AdaptiveRAG):
        return Decider(value)
    raise BadSetting(f"{value!r} is not an AdaptiveRAG or a Decider. Make one: open_decider(model=..., gate=...).")


def cache_decisions(decider: AdaptiveRAG | Decider, on_decision: DecisionCallback | None) -> Callable[[str], Decision]:
    """Return a function that decides on a question, with a cache. Agents ask the same question at every step.

    Args:
        decider: A `Decider` or an `AdaptiveRAG`.
        on_decision: Called with the question and its decision after each new decision, but not for cached ones.
    """
    source = as_decider(decider)

    @functools.lru_cache(maxsize=MAX_CACHED_DECISIONS)
    def decide(question: str) -> Decision:
        """Decide on a question that is not in the cache."""
        decision = source.decide(question)
        if on_decision is not None:
            on_decision(question, decision)
        return decision

    return decide


def run_in_model_thread(model: Model, work: Callable[[], ResultT]) -> ResultT:
    """Run a function in a worker thread of the model. A worker thread itself calls the function directly.

    Args:
        model: The model whose worker threads are used.
        work: The function to call.
    """
    if threading.current_thread().name.startswith(MODEL_THREAD_PREFIX):
        return work()  # a worker that waits for another one could wait forever
    return model.workers.submit(work).result()
