"""Generates the OpenAPI description of the server, and a web page with the same content, from a table of endpoints."""

from __future__ import annotations

import html
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from knowgate.server.schemas import ErrorResponse

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


def build_openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of these endpoints as a JSON object."""
    models: dict[str, type[BaseModel]] = {"ErrorResponse": ErrorResponse}
    for endpoint in endpoints:
        models |= {model.__name__: model for model in (endpoint.request, endpoint.response) if model is not None}
    _, definitions = models_json_schema([(model, "validation") for model in models.values()], ref_template=REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _describe_operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "knowgate",
            "version": metadata.version("knowgate"),
            "description": "An OpenAI-compatible server that retrieves passages only if the LLM does not know the answer.",
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": definitions["$defs"],
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
    """Describe a body for each of its media types: JSON by a reference to the schema of its model, others as text."""
    text = {"type": "string"}
    json_schema = text if model is None else {"$ref": REFERENCE.format(model=model.__name__)}
    return {"content": {kind: {"schema": json_schema if kind == JSON_MEDIA_TYPE else text} for kind in media_types}}


def build_docs_page(endpoints: Sequence[Endpoint]) -> str:
    """Return an HTML page that lists the endpoints and their request schemas. It loads no external resources."""
    return f"{DOCS_PAGE_HEAD}{''.join(_format_endpoint(endpoint) for endpoint in endpoints)}</html>"


def _format_endpoint(endpoint: Endpoint) -> str:
    """Format one endpoint as HTML. The schema of its request body can be unfolded."""
    heading = f"<b>{endpoint.method}</b> <code>{html.escape(endpoint.path)}</code><br>{html.escape(endpoint.summary)}"
    if endpoint.request is None:
        return f"<p>{heading}</p>"
    schema = html.escape(json.dumps(endpoint.request.model_json_schema(), indent=1))
    return f"<details><summary>{heading}</summary><pre>{schema}</pre></details>"
