"""The page at `/`, its files, and what it shows. The page itself is open; all that it shows asks for a key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import metadata, resources
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from knowgate.server.json_api import ApiError, json_response
from knowgate.server.service import Service
from knowgate.server.telemetry.trace import RequestTrace

MAX_DECISIONS_SHOWN = 30  # decisions
CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
SCRIPTS = ("main.js", "parts.js", "charts.js", "talk.js", "playground.js", "recent.js")
ASSET_PACKAGE = "knowgate.server.dashboard"
DASHBOARD_FILES = {
    "/": (ASSET_PACKAGE, "index.html"),
    "/dashboard/page.css": ("knowgate.evaluation.report", "page.css"),  # the look of the reports
    "/dashboard/dashboard.css": (ASSET_PACKAGE, "dashboard.css"),
    **{f"/dashboard/{name}": (ASSET_PACKAGE, name) for name in SCRIPTS},
}
# Nothing from elsewhere, no script or style in the page, in nobody's frame.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def build_dashboard_routes(*, has_keys: bool) -> list[Route]:
    """Page, style and scripts; has_keys: the page asks for one before it asks the server."""
    return [Route(path, _file(path, has_keys), methods=["GET"]) for path in DASHBOARD_FILES]


def _file(path: str, has_keys: bool) -> Callable[[Request], Awaitable[Response]]:
    package, name = DASHBOARD_FILES[path]
    kind = CONTENT_TYPES[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        content = (resources.files(package) / "assets" / name).read_bytes()
        if has_keys:
            content = content.replace(b'data-keys="no"', b'data-keys="yes"')
        return Response(content, 200, {**SECURITY_HEADERS, "content-type": f"{kind}; charset=utf-8"})

    return answer


async def list_recent_decisions(service: Service, since: float) -> list[dict[str, Any]]:
    """Decisions of all workers, as far as they are kept; of this one's more is known. What another one was told to
    forget is forgotten here, too."""
    own = service.recent.newest(MAX_DECISIONS_SHOWN)
    if service.log is None:
        return own
    try:
        kept = await service.log.newest(MAX_DECISIONS_SHOWN, since)
        service.recent.forget(await service.log.missing([row["id"] for row in own]))
    except ApiError:
        return own
    own = service.recent.newest(MAX_DECISIONS_SHOWN)
    known = {row["id"] for row in own}
    rows = [*own, *(row for row in kept if row["id"] not in known)]
    return sorted(rows, key=lambda row: float(row["at"]), reverse=True)[:MAX_DECISIONS_SHOWN]


async def get_dashboard(service: Service, request: Request, trace: RequestTrace) -> Response:
    """Everything that is shown, but for answers that are still to come."""
    rag = service.keeper.rag
    figures = service.figures.with_others(await service.together.others())
    record = {
        "version": metadata.version("knowgate"),
        "gate": rag.gate.name,
        "threshold": rag.gate.threshold if rag.threshold is None else rag.threshold,
        "model": rag.model.name,
        "retriever": rag.retriever.name if rag.retriever else None,
        "stale": service.keeper.stale,
        "promise": "" if service.keeper.stale else rag.guarantee,
        "breakers": {one.name: one.state for one in service.breakers},
        "keeps_texts": service.recent.keeps_texts,
        "takes_feedback": service.log is not None,
        "learning": None if service.learner is None else service.learner.record,
        "figures": figures.record(service.options),
        "recent": await list_recent_decisions(service, figures.since),
    }
    return json_response(record)
