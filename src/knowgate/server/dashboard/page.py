"""The dashboard: its web page, scripts and data.

Anyone can load the page. If the server uses API keys, the data of the page needs one.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import resources
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

from knowgate.core import VERSION
from knowgate.errors import KnowgateError
from knowgate.pipeline.stages import describe_constant
from knowgate.server.chat.request_options import update_fingerprint
from knowgate.server.json_api import ApiError, json_response
from knowgate.server.schemas import DashboardResponse
from knowgate.server.service import Service
from knowgate.server.telemetry.trace import RequestTrace

MAX_DECISIONS_SHOWN = 30
SECURITY_HEADERS = {
    # Load nothing from other origins, run no inline scripts, and do not allow framing.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class DashboardAssets(StaticFiles):
    """Serves the scripts and style sheets of the dashboard, with security headers."""

    def __init__(self) -> None:
        super().__init__(packages=[("knowgate.server.dashboard", "assets"), ("knowgate.evaluation.report", "assets")])

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(SECURITY_HEADERS)
        return response


async def get_dashboard_page(service: Service, request: Request, trace: RequestTrace) -> Response:
    """Answer GET / with the page of the dashboard. The page asks for an API key if the server uses keys."""
    page = (resources.files("knowgate.server.dashboard") / "assets" / "index.html").read_text(encoding="utf-8")
    if service.options.keys is not None:
        page = page.replace('data-keys="no"', 'data-keys="yes"')
    return HTMLResponse(page, headers=SECURITY_HEADERS)


async def get_dashboard(service: Service, request: Request, trace: RequestTrace) -> Response:
    """Answer GET /v1/dashboard with the data of the dashboard, combined over all server processes."""
    rag = service.gate_service.rag
    snapshot = service.get_snapshot().combine(await service.snapshot_exchange.read_others())
    await update_fingerprint(rag)
    guarantee = ""
    with suppress(KnowgateError):  # the index cannot be identified, so no guarantee is known to hold for it
        guarantee = "" if service.gate_service.staleness else rag.guarantee
    data = {
        "version": VERSION,
        "gate": service.gate_service.gate_spec,
        "threshold": rag.used_threshold,
        "model": name_model(service),
        "retriever": rag.retriever.name if rag.retriever else None,
        "stale": service.gate_service.staleness,
        "constant": describe_constant(rag.gate, rag.used_threshold),  # whether the gate always decides the same
        "guarantee": guarantee,
        "promise": guarantee,  # the same under its former name, for earlier clients
        "breakers": {breaker.name: breaker.state for breaker in service.breakers},
        "keeps_texts": service.recent.stores_texts,
        "takes_feedback": service.decision_log is not None,
        "learning": None if service.learner is None else service.learner.to_json(service.metrics.count_audits),
        "figures": snapshot.to_json(service.options),
        "recent": await list_recent_decisions(service, snapshot.since),
    }
    return json_response(DashboardResponse.model_validate(data))


def name_model(service: Service) -> str:
    """Return the name of the LLM for the user. For an unknown model of the upstream, the upstream is named."""
    if service.forwarder is None:
        return service.gate_service.rag.model.name
    upstream = service.forwarder.upstream
    return service.options.upstream_model or upstream.default_model or f"the LLM at {upstream.url}"


async def list_recent_decisions(service: Service, since: float) -> list[dict[str, Any]]:
    """Return the newest decisions of all server processes. Own decisions come from memory, others from the log.

    Args:
        service: The service of this process.
        since: Time of the oldest decision to read from the log, in seconds since 1970.
    """
    # Another process may have deleted decisions.
    await service.recent.apply_deletions(await service.snapshot_exchange.read_deletions())
    own_rows = service.recent.list_newest(MAX_DECISIONS_SHOWN)
    if service.decision_log is None:
        return own_rows
    try:
        stored_rows = await service.decision_log.list_newest(MAX_DECISIONS_SHOWN, since)
    except ApiError:
        return own_rows
    own_ids = {row["id"] for row in own_rows}
    rows = [*own_rows, *(row for row in stored_rows if row["id"] not in own_ids)]
    return sorted(rows, key=lambda row: float(row["at"]), reverse=True)[:MAX_DECISIONS_SHOWN]
