"""The endpoints of the server: paths, handlers, requests and responses. Routes and OpenAPI are made from this table."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from knowgate.server.dashboard.page import get_dashboard, get_dashboard_page
from knowgate.server.json_api import json_response
from knowgate.server.openapi import Endpoint, build_docs_page, build_openapi
from knowgate.server.schemas import (
    ChatRequest,
    ClearAlarmRequest,
    CompletionRequest,
    DashboardResponse,
    DecideRequest,
    DecideResponse,
    DeletionRequest,
    DeletionResponse,
    FeedbackRequest,
    FeedbackResponse,
    HealthResponse,
    InputRequest,
    LearningResponse,
    LlmResponse,
    ModelList,
    ReadyResponse,
    RerankRequest,
    RerankResponse,
    StoredDecision,
)
from knowgate.server.service import Service
from knowgate.server.telemetry.trace import RequestTrace


async def get_health(service: Service, request: Request, trace: RequestTrace) -> Response:
    """GET /health."""
    return json_response(HealthResponse(status="ok"))


async def get_openapi(service: Service, request: Request, trace: RequestTrace) -> Response:
    """GET /openapi.json."""
    return json_response(build_openapi(ENDPOINTS))


async def get_docs(service: Service, request: Request, trace: RequestTrace) -> Response:
    """GET /docs."""
    return HTMLResponse(build_docs_page(ENDPOINTS))


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", Service.chat, "Decide and answer a chat.", ChatRequest, LlmResponse),
    Endpoint(
        "POST",
        "/v1/completions",
        Service.forward,
        "Forward a prompt to the upstream; with passages, if it is a plain question that needs them.",
        CompletionRequest,
        LlmResponse,
    ),
    Endpoint(
        "POST",
        "/v1/responses",
        Service.forward,
        "Forward an input to the upstream; with passages, if it is a plain question that needs them.",
        InputRequest,
        LlmResponse,
    ),
    Endpoint("POST", "/v1/embeddings", Service.forward, "Forward to the upstream.", InputRequest),
    Endpoint(
        "POST",
        "/v1/decide",
        Service.decide,
        "Decide on one question, several, or a chat, without answering.",
        DecideRequest,
        DecideResponse,
    ),
    Endpoint(
        "POST",
        "/v1/rerank",
        Service.rerank,
        "Order documents by their relevance to a query (needs a reranker).",
        RerankRequest,
        RerankResponse,
    ),
    Endpoint(
        "POST",
        "/v1/feedback",
        Service.add_feedback,
        "Rate or correct an answer (needs a decision log).",
        FeedbackRequest,
        FeedbackResponse,
    ),
    Endpoint(
        "POST",
        "/v1/forget",
        Service.delete_question,
        "Delete everything that is stored about a question.",
        DeletionRequest,
        DeletionResponse,
    ),
    Endpoint(
        "GET",
        "/v1/decisions/{id}",
        Service.get_decision,
        "Return a decision and its feedback (needs a decision log).",
        response=StoredDecision,
    ),
    Endpoint(
        "DELETE",
        "/v1/decisions/{id}",
        Service.delete_decision,
        "Delete a decision, and everything that is stored about its question.",
        response=DeletionResponse,
    ),
    Endpoint(
        "GET",
        "/v1/learning",
        Service.get_learning,
        "Return what was learnt from traffic: losses, alarms and drift.",
        response=LearningResponse,
    ),
    Endpoint(
        "POST",
        "/v1/learning/clear",
        Service.clear_alarm,
        "Clear an alarm, and start measuring the loss again.",
        ClearAlarmRequest,
        LearningResponse,
    ),
    Endpoint("GET", "/v1/models", Service.list_models, "List the models and selectable gates.", response=ModelList),
    Endpoint("GET", "/", get_dashboard_page, "The dashboard, as a page.", is_public=True),
    Endpoint("GET", "/v1/dashboard", get_dashboard, "The data of the dashboard.", response=DashboardResponse),
    Endpoint("GET", "/health", get_health, "Whether the server runs.", response=HealthResponse, is_public=True),
    Endpoint("GET", "/ready", Service.get_readiness, "Whether it can answer.", response=ReadyResponse, is_public=True),
    Endpoint("GET", "/metrics", Service.get_metrics, "Metrics for Prometheus."),
    Endpoint("GET", "/openapi.json", get_openapi, "This description, for programs.", is_public=True),
    Endpoint("GET", "/docs", get_docs, "This description, for people.", is_public=True),
)
