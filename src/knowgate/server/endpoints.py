"""The endpoints of the server: one table, from which the routes, the OpenAPI description and a web page are generated."""

from __future__ import annotations

import html
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from knowgate.core import VERSION
from knowgate.server import schemas
from knowgate.server.dashboard.page import get_dashboard, get_dashboard_page
from knowgate.server.json_api import dump_json, json_response
from knowgate.server.schemas import ErrorResponse
from knowgate.server.service import Service
from knowgate.server.telemetry.trace import RequestTrace

REFERENCE = "#/components/schemas/{model}"
JSON_MEDIA_TYPE = "application/json"
DOCS_PAGE_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>knowgate: endpoints</title><style>
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem}
code,pre{font:14px/1.4 ui-monospace,monospace}pre{overflow:auto;padding:.6rem;border:1px solid #8885}
summary{cursor:pointer;padding:.3rem 0}b{display:inline-block;min-width:4.5rem}</style>
<h1>knowgate</h1><p>To use this server in an application for OpenAI's API, change the base URL to <code>/v1</code> of
this server. The decision is in the field <code>knowgate</code> of a response and in its <code>x-knowgate-</code>
headers. For programs: <a href="openapi.json">openapi.json</a>.</p>
"""


@dataclass(frozen=True)
class Endpoint:
    """Declares an endpoint of the server.

    Attributes:
        method: HTTP method.
        path: URL path, with parameters in braces.
        handler: Function that answers requests. It is called with the service, the request and its trace.
        summary: One sentence for the documentation.
        request: Pydantic model of the request body, if there is a body.
        response: Pydantic model of a successful response. None if the response is a text.
        media_types: Media types of a successful response. Only JSON is described by the model.
        is_public: Whether the endpoint can be used without an API key.
        needs_admin: Whether the endpoint needs an admin key, if the server uses keys.
    """

    method: str
    path: str
    handler: Callable[..., Awaitable[Response]]
    summary: str
    request: type[BaseModel] | None = None
    response: type[BaseModel] | None = None
    media_types: tuple[str, ...] = (JSON_MEDIA_TYPE,)
    is_public: bool = False
    needs_admin: bool = False

    @property
    def needs_slot(self) -> bool:
        """Whether a request counts as in progress. Health checks, metrics and pages must work under full load, too."""
        is_page = self.is_public or self.needs_admin or self.path == "/metrics"
        return self.method != "GET" or not is_page


def _describe_models(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the JSON schema of each request and response model, by its name."""
    models: dict[str, type[BaseModel]] = {"ErrorResponse": ErrorResponse}
    for endpoint in endpoints:
        for model in (endpoint.request, endpoint.response):
            if model is not None:
                models[model.__name__] = model
    _, definitions = models_json_schema([(model, "validation") for model in models.values()], ref_template=REFERENCE)
    schemas: dict[str, Any] = definitions["$defs"]
    return schemas


def build_openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of these endpoints as a JSON object."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _describe_operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "knowgate",
            "version": VERSION,
            "description": "An OpenAI-compatible server that retrieves passages only if the LLM does not know the answer. "
            "Unknown paths get status 404, other methods 405, both with an ErrorResponse.",
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": _describe_models(endpoints),
        },
        "security": [{}, {"key": []}],
        "paths": paths,
    }


def _describe_operation(endpoint: Endpoint) -> dict[str, Any]:
    """Describe one endpoint as an OpenAPI operation."""
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": f"{endpoint.method.lower()} {endpoint.path}",
        "responses": {
            "200": {"description": "success", **_describe_content(endpoint.response, endpoint.media_types)},
            "default": {"description": "an error", **_describe_content(ErrorResponse)},
        },
    }
    if "{id}" in endpoint.path:
        schema = {"type": "string", "minLength": 1}
        operation["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": schema}]
    if endpoint.request is not None:
        operation["requestBody"] = {"required": True, **_describe_content(endpoint.request)}
    return operation


def _describe_content(model: type[BaseModel] | None, media_types: Sequence[str] = (JSON_MEDIA_TYPE,)) -> dict[str, Any]:
    """Return the OpenAPI field `content` of a body. Only JSON bodies get the schema of their model."""
    text_schema = {"type": "string"}
    json_schema = text_schema if model is None else {"$ref": REFERENCE.format(model=model.__name__)}
    schemas = {name: json_schema if name == JSON_MEDIA_TYPE else text_schema for name in media_types}
    return {"content": {name: {"schema": schema} for name, schema in schemas.items()}}


def _format_endpoint(endpoint: Endpoint) -> str:
    """Format one endpoint as HTML. The schema of its request body can be unfolded."""
    heading = f"<b>{endpoint.method}</b> <code>{html.escape(endpoint.path)}</code><br>{html.escape(endpoint.summary)}"
    if endpoint.request is None:
        return f"<p>{heading}</p>"
    schema = html.escape(json.dumps(endpoint.request.model_json_schema(), indent=1))
    return f"<details><summary>{heading}</summary><pre>{schema}</pre></details>"


async def get_health(service: Service, request: Request, trace: RequestTrace) -> Response:
    """Answer GET /health, which shows that the server runs."""
    return json_response(schemas.HealthResponse(status="ok"))


async def get_openapi(service: Service, request: Request, trace: RequestTrace) -> Response:
    """Answer GET /openapi.json with the OpenAPI description of all endpoints."""
    return Response(_dump_openapi(), media_type=JSON_MEDIA_TYPE)


@cache  # building it takes longer than most requests, and anybody may ask for it
def _dump_openapi() -> bytes:
    return dump_json(build_openapi(ENDPOINTS))


async def get_docs(service: Service, request: Request, trace: RequestTrace) -> Response:
    """Answer GET /docs with a web page that describes all endpoints."""
    return HTMLResponse(_build_docs_page())


@cache
def _build_docs_page() -> str:
    """Return an HTML page that lists all endpoints and their request schemas. It loads no external resources."""
    return f"{DOCS_PAGE_HEAD}{''.join(_format_endpoint(endpoint) for endpoint in ENDPOINTS)}</html>"


# fmt: off
FORWARDED = "Forward the request to the upstream. Insert passages if the prompt is a question that needs them."
STREAMED = (JSON_MEDIA_TYPE, "text/event-stream")
HTML = ("text/html",)
ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", Service.chat, "Answer a chat. Passages are retrieved if the gate decides so.",
             schemas.ChatRequest, schemas.LlmResponse, STREAMED),
    Endpoint("POST", "/v1/completions", Service.forward, FORWARDED, schemas.CompletionRequest, schemas.LlmResponse, STREAMED),
    Endpoint("POST", "/v1/responses", Service.forward, FORWARDED, schemas.InputRequest, schemas.LlmResponse, STREAMED),
    Endpoint("POST", "/v1/embeddings", Service.forward, "Forward the request to the upstream unchanged.",
             schemas.InputRequest, schemas.ForwardedResponse),
    Endpoint("POST", "/v1/decide", Service.decide, "Decide whether questions need retrieval, without answering them.",
             schemas.DecideRequest, schemas.DecideResponse),
    Endpoint("POST", "/v1/rerank", Service.rerank, "Order documents by their relevance to a query.",
             schemas.RerankRequest, schemas.RerankResponse),
    Endpoint("POST", "/v1/feedback", Service.add_feedback, "Rate or correct an answer.",
             schemas.FeedbackRequest, schemas.FeedbackResponse),
    Endpoint("POST", "/v1/forget", Service.delete_question, "Delete everything that is stored about a question.",
             schemas.DeletionRequest, schemas.DeletionResponse),
    Endpoint("GET", "/v1/decisions/{id}", Service.get_decision, "Return a decision and its feedback.",
             None, schemas.StoredDecision),
    Endpoint("DELETE", "/v1/decisions/{id}", Service.delete_decision, "Delete a decision, and for an admin key also the history's label of its question.",  # noqa: E501
             None, schemas.DeletionResponse),
    Endpoint("GET", "/v1/learning", Service.get_learning, "Return what audits and A/B tests show: losses, alarms and drift.",
             None, schemas.LearningResponse, needs_admin=True),
    Endpoint("POST", "/v1/learning/clear", Service.clear_alarm, "Clear the alarm of a gate and restart its audits.",
             schemas.ClearAlarmRequest, schemas.LearningResponse, needs_admin=True),
    Endpoint("GET", "/v1/models", Service.list_models, "List models and selectable gates.", None, schemas.ModelList),
    Endpoint("GET", "/v1/dashboard", get_dashboard, "Return the data of the dashboard.",
             None, schemas.DashboardResponse, needs_admin=True),
    Endpoint("GET", "/", get_dashboard_page, "Show the dashboard.", media_types=HTML, is_public=True),
    Endpoint("GET", "/health", get_health, "Return whether the server runs.",
             None, schemas.HealthResponse, is_public=True),
    Endpoint("GET", "/ready", Service.get_readiness, "Return whether the server can answer requests.",
             None, schemas.ReadyResponse, is_public=True),
    Endpoint("GET", "/metrics", Service.get_metrics, "Return metrics for Prometheus.", media_types=("text/plain",)),
    Endpoint("GET", "/openapi.json", get_openapi, "Return this description of the API in the OpenAPI format.",
             None, schemas.OpenApiDocument, is_public=True),
    Endpoint("GET", "/docs", get_docs, "Show this description of the API as a web page.", media_types=HTML, is_public=True),
)
# fmt: on
