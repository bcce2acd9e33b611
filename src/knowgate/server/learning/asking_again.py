"""The answer that was not given: with passages where the reply was from memory, from memory where it had passages.

Asked after the reply has gone out, of the same LLM with the same settings, and never streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from knowgate.errors import ModelError
from knowgate.prompts import detect_language, packaged
from knowgate.server.forwarding import Exchange, Forwarding
from knowgate.server.gatekeeper import Gatekeeper
from knowgate.server.learning.replies import said_in
from knowgate.server.passages import with_passages
from knowgate.server.prompts import FORMS
from knowgate.server.trace import Asked, Trace
from knowgate.types import Passage, Question

YES, NO = ("yes", "是"), ("no", "否", "不")
NOT_AGAIN = ("stream", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "knowgate")


class AskingAgain:
    """forwarding: where an upstream answers; else the model in this process does."""

    def __init__(self, keeper: Gatekeeper, forwarding: Forwarding | None, seconds: float):
        self.keeper = keeper
        self.forwarding = forwarding
        self.seconds = seconds

    async def answer(self, asked: Asked, question: str, *, given: str, opened: bool) -> str | None:
        """None where it cannot be had. Where nothing is found the answer `given` from memory is the only one."""
        async with asyncio.timeout(self.seconds):
            if self.forwarding is None:
                return await self._here(question, opened)
            own = Trace()
            passages = await self.keeper.search(self.keeper.rag, Question(question), own) if opened else ()
            if own.degraded:
                return None
            if opened and not passages:
                return given
            return await self._there(self.forwarding, asked, passages)

    async def says_same(self, asked: Asked, question: str, closed: str, opened: str) -> bool:
        """What the upstream's LLM says to that; an error where it says neither yes nor no."""
        assert self.forwarding is not None
        lang = detect_language(question)
        words = packaged("compare").fill("same", lang, question=question, first=closed, second=opened)
        known = {key: asked.body[key] for key in ("model", "user") if key in asked.body}
        body = {**known, "messages": [{"role": "user", "content": words}], "max_tokens": 8, "temperature": 0}
        async with asyncio.timeout(self.seconds):
            said = await self._there(self.forwarding, Asked(body, asked.headers), ())
        word = (said or "").strip().lower()
        if not word.startswith((*YES, *NO)):
            raise ModelError(f"asked whether two answers say the same, the LLM said '{word[:40]}'.")
        return word.startswith(YES)

    async def _here(self, question: str, opened: bool) -> str:
        gate = self.keeper.always if opened else self.keeper.never
        rag = self.keeper.rag.altered(gate=gate, threshold=None, rules=None, log=None)
        return (await rag.aanswer(question)).text

    async def _there(self, forwarding: Forwarding, asked: Asked, passages: Sequence[Passage]) -> str | None:
        body = {key: value for key, value in asked.body.items() if key not in NOT_AGAIN}
        until = asyncio.get_running_loop().time() + self.seconds
        exchange = Exchange(body, b"", asked.headers, Trace(), until, sent=body)
        await forwarding.name_model(exchange)
        if passages:
            amend = FORMS[asked.path].with_passages if asked.path in FORMS else with_passages
            exchange.sent = amend(exchange.request, passages, forwarding.options.place)
        return said_in(await forwarding.answer(exchange, asked.path))
