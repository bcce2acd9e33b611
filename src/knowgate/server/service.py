"""What the server does, one method for each address. Knows requests; the ways of a chat are in files of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from knowgate.errors import BadSetting
from knowgate.pipeline import Settings, build_pipeline
from knowgate.server.bodies import read_body, read_object
from knowgate.server.deciding import decide_questions
from knowgate.server.drafts import AskedModel
from knowgate.server.forwarding import Exchange, Forwarding
from knowgate.server.gatekeeper import Gatekeeper
from knowgate.server.local_chat import LocalChat
from knowgate.server.options import ServeOptions
from knowgate.server.policy import NAMEABLE, PREFIX
from knowgate.server.problems import json_response
from knowgate.server.streaming import while_connected
from knowgate.server.trace import Trace
from knowgate.server.upstream import Upstream

ARRIVE = 30.0  # seconds until a request is there, of those it has


@dataclass
class Service:
    """The parts of a running server. forwarding: with an upstream; local: without one."""

    options: ServeOptions
    keeper: Gatekeeper
    forwarding: Forwarding | None = None
    local: LocalChat | None = None

    async def close(self) -> None:
        self.keeper.close()
        if self.forwarding is not None:
            await self.forwarding.upstream.close()

    async def body(self, request: Request) -> tuple[bytes, dict[str, Any]]:
        raw = await read_body(request, self.options.largest_body, min(ARRIVE, self.options.deadline / 2))
        return raw, read_object(raw)

    async def chat(self, request: Request, trace: Trace) -> Response:
        raw, body = await self.body(request)
        until = asyncio.get_running_loop().time() + self.options.deadline
        if self.forwarding is not None:
            work = self.forwarding.chat(Exchange(body, raw, request.headers, trace, until))
        elif self.local is not None:
            work = self.local.chat(body, trace, until)
        return await while_connected(request, work)

    async def decide(self, request: Request, trace: Trace) -> Response:
        _, body = await self.body(request)
        work = decide_questions(self.keeper, self.forwarding, body, request.headers, trace)
        return json_response(await while_connected(request, work), headers=trace.headers)

    async def models(self, request: Request, trace: Trace) -> Response:
        cards: list[Mapping[str, Any]] = []
        if self.forwarding is not None:
            cards += await self.forwarding.upstream.models(request.headers)
        else:
            cards.append(_card(self.keeper.rag.model.name))
        cards += [_card(PREFIX), *(_card(f"{PREFIX}/{name}") for name in NAMEABLE)]
        return json_response({"object": "list", "data": cards})

    async def health(self, request: Request, trace: Trace) -> Response:
        return json_response({"status": "ok"})

    async def ready(self, request: Request, trace: Trace) -> Response:
        """Whether a question would be answered as it should; what is in the way, where it would not."""
        breakers = {one.name: one.state for one in self.breakers}
        wrong = [f"{name} is {state}" for name, state in breakers.items() if state != "closed"]
        record = {"ready": breakers.get("upstream", "closed") != "open", "breakers": breakers}
        record |= {"gate": self.keeper.rag.gate.name, "stale": self.keeper.stale, "degraded": wrong}
        return json_response(record, 200 if record["ready"] else 503)

    @property
    def breakers(self) -> list[Any]:
        found = [self.keeper.gate_breaker, self.keeper.retriever_breaker]
        return [*found, self.forwarding.upstream.breaker] if self.forwarding is not None else found


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "knowgate"}


def build_service(settings: Settings, options: ServeOptions) -> Service:
    """Everything loaded and found to work together."""
    if options.upstream is None:
        if options.way is not None:
            raise BadSetting("--way belongs to --upstream; a model in this process needs one pass.")
        rag = build_pipeline(settings)
        keeper = Gatekeeper(rag, seconds=options.gate_seconds, strict=options.strict)
        return Service(options, keeper, local=LocalChat(keeper, options))
    if settings.arbiter not in (None, "none"):
        raise BadSetting("--arbiter does not work with --upstream yet: leave it away.")
    if settings.log is not None:
        raise BadSetting("--log does not work with --upstream yet: leave it away.")
    asked = AskedModel(options.upstream, options.upstream_model)
    rag = build_pipeline(settings.model_copy(update={"arbiter": "none"}), model=asked)
    keeper = Gatekeeper(rag, seconds=options.gate_seconds, strict=options.strict)
    if options.way == "question" and not keeper.want_of(rag).is_nothing:
        raise BadSetting(f"gate '{rag.gate.name}' reads a draft: use --way draft or race, or a gate that reads none.")
    upstream = Upstream(options.upstream, passes_keys=True)
    return Service(options, keeper, forwarding=Forwarding(upstream, keeper, options))
