"""Table of the endpoints of the server. The routes and the OpenAPI description are generated from it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from knowgate.server import schemas
from knowgate.server.dashboard.page import get_dashboard, get_dashboard_page
from knowgate.server.json_api import json_response
from knowgate.server.openapi import JSON_MEDIA_TYPE, Endpoint, build_docs_page, build_openapi
from knowgate.server.service import Service
from knowgate.server.telemetry.trace import RequestTrace


async def get_health(service: Service, request: Request, trace: RequestTrace) -> Response:
    """Answer GET /health, which shows that the server runs."""
    return json_response(schemas.HealthResponse(status="ok"))


async def get_openapi(service: Service, request: Request, trace: RequestTrace) -> Response:
    """Answer GET /openapi.json with the OpenAPI description of all endpoints."""
    return json_response(build_openapi(ENDPOINTS))


async def get_docs(service: Service, request: Request, trace: RequestTrace) -> Response:
    """Answer GET /docs with a web page that describes all endpoints."""
    return HTMLResponse(build_docs_page(ENDPOINTS))


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
    Endpoint("DELETE", "/v1/decisions/{id}", Service.delete_decision, "Delete a decision, and all decisions and entries with the same question.",  # noqa: E501
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
