"""What is asked without a chat (see `prompts`): decided on, looked up, and sent on to where it was meant to go.

A gate that reads a draft gets a short one of its own, made as a chat: these replies have no form that it reads.
"""

from __future__ import annotations

from starlette.responses import Response

from knowgate.server.asking import Ungated
from knowgate.server.deciding import Deciding
from knowgate.server.forwarding import Exchange, Forwarding, Search
from knowgate.server.policy import policy_of
from knowgate.server.prompts import FORMS


async def answer_prompt(forwarding: Forwarding, exchange: Exchange, path: str) -> Response:
    """path: of the upstream's address, /completions or /responses."""
    keeper, trace, form = forwarding.keeper, exchange.trace, FORMS[path]
    rag = keeper.choose(keeper.assign(policy_of(exchange.body), exchange.body, trace))
    asked = form.question(rag.model, exchange.body)
    if isinstance(asked, Ungated):
        trace.ungated = asked.why
        return await forwarding.hand_on(exchange, path)
    await forwarding.name_model(exchange)
    trace.question, trace.way = asked.text, "question"
    trace.decision = await Deciding(keeper, forwarding, rag, exchange.headers).decide(asked, trace)
    if trace.decision.retrieve and rag.retriever is not None:
        trace.passages = await Search(keeper, rag, asked).result(trace)
        if trace.passages:
            exchange.sent = form.with_passages(exchange.request, trace.passages, forwarding.options.place)
    return await forwarding.answer(exchange, path)
