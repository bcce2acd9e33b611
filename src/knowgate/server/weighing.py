"""After retrieval: the upstream's answer with passages against its draft, and the arbiter's choice is the reply.

Weighed is what has a whole draft: of a stream that is so where the gate read all of a short one. An arbiter that fails
is left out.
"""

from __future__ import annotations

from knowgate.arbiters import choose
from knowgate.pipeline import AdaptiveRAG
from knowgate.server.drafting import Drafted
from knowgate.server.gatekeeper import Gatekeeper
from knowgate.server.trace import Trace
from knowgate.types import BothAnswers, Question


async def weigh(
    keeper: Gatekeeper, rag: AdaptiveRAG, question: Question, draft: Drafted, opened: Drafted, trace: Trace
) -> Drafted:
    """Which of the two is the reply."""
    arbiter = rag.weighing
    if arbiter is None or draft.completion is None or opened.completion is None or opened.called_tool:
        return opened
    both = BothAnswers(question, draft.completion, opened.completion, trace.passages)
    try:
        with trace.timed("arbiter"):
            (trace.choice,) = await keeper.apart(lambda: choose(arbiter, [both]))
    except Exception as error:  # noqa: BLE001 - whatever an arbiter does, there is an answer to give
        keeper.give_up("arbiter", trace, error)
        return opened
    return draft if trace.choice.from_memory else opened
