"""What the server understands, as OpenAPI: for programs at /openapi.json, for people at /docs.

Written down here rather than read off the code: the requests are mostly OpenAI's, of which only what matters here is
said. The page needs nothing from outside.
"""

from __future__ import annotations

import html
import json
from importlib import metadata
from typing import Any

Schema = dict[str, Any]
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}
FRACTION: Schema = {"type": "number", "minimum": 0, "maximum": 1}
PATTERNS: Schema = {"anyOf": [STRING, {"type": "array", "items": STRING}]}
REQUEST_OPTIONS: Schema = {
    "type": "object",
    "description": "What this request wants of the gate.",
    "additionalProperties": False,
    "properties": {
        "retrieve": {"enum": ["auto", "always", "never"]},
        "threshold": {**FRACTION, "description": "Retrieve where the need is above it."},
        "max_loss": {**FRACTION, "description": "Retrieve unless skipping is proven to lose no more of the answers."},
        "filter": {
            "type": "object",
            "description": "Only documents that fit these patterns, such as hr/*.",
            "additionalProperties": False,
            "properties": {"id": PATTERNS, "title": PATTERNS},
        },
    },
}
MESSAGES: Schema = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {"role": STRING, "content": {"anyOf": [STRING, {"type": "array"}, {"type": "null"}]}},
    },
}
COMMON_FIELDS: Schema = {
    "model": {**STRING, "description": "knowgate, knowgate/GATE, or one of /v1/models."},
    "knowgate": REQUEST_OPTIONS,
}
QUESTION: Schema = {**STRING, "minLength": 1}


def _object(required: list[str], **properties: Any) -> Schema:
    return {"type": "object", "required": required, "properties": properties}


CHAT = _object(["messages"], **COMMON_FIELDS, messages=MESSAGES, stream=BOOLEAN)
PROMPT = _object(["prompt"], **COMMON_FIELDS, prompt={"anyOf": [STRING, {"type": "array"}]}, stream=BOOLEAN)
RESPONSE = _object(["input"], **COMMON_FIELDS, input={"anyOf": [STRING, {"type": "array"}]}, stream=BOOLEAN)
EMBEDDING = _object(["input"], **COMMON_FIELDS, input={"anyOf": [STRING, {"type": "array"}]})
DECIDE: Schema = {
    "type": "object",
    "description": "One of question, questions and messages.",
    "properties": {
        **COMMON_FIELDS,
        "question": QUESTION,
        "questions": {"type": "array", "items": QUESTION, "minItems": 1, "maxItems": 256},
        "messages": MESSAGES,
    },
}
DOCUMENT: Schema = {"anyOf": [STRING, _object(["text"], text=STRING)]}
RERANK = _object(
    ["query", "documents"],
    query=QUESTION,
    documents={"type": "array", "items": DOCUMENT, "minItems": 1, "maxItems": 1000},
    top_n={"type": "integer", "minimum": 1},
    return_documents=BOOLEAN,
)
FEEDBACK = _object(["id", "rating"], id=STRING, rating={"enum": ["up", "down"]}, comment=STRING, correction=STRING)
CLEAR_ALARM = _object([], arm={"enum": ["a", "b"]})
FORGET = _object(["question"], question=QUESTION)

# (method, address) -> (what it does, body)
ROUTES: dict[tuple[str, str], tuple[str, Schema | None]] = {
    ("post", "/v1/chat/completions"): ("Decide and answer a chat, streamed or not.", CHAT),
    ("post", "/v1/completions"): (
        "Decide on a prompt that is a plain question and send it on; others go through.",
        PROMPT,
    ),
    ("post", "/v1/responses"): (
        "Decide on an input that is a plain question and send it on; others go through.",
        RESPONSE,
    ),
    ("post", "/v1/embeddings"): ("Go through to the upstream.", EMBEDDING),
    ("post", "/v1/decide"): ("Decide alone: for one question, several, or a chat.", DECIDE),
    ("post", "/v1/rerank"): ("Order documents by how well they answer a query (with --rerank).", RERANK),
    ("post", "/v1/feedback"): ("Say what you think of an answer (with --decisions).", FEEDBACK),
    ("post", "/v1/forget"): ("Delete all that is kept of a question.", FORGET),
    ("get", "/v1/decisions/{id}"): ("Look up a decision (with --decisions).", None),
    ("delete", "/v1/decisions/{id}"): ("Delete a decision, and all that is kept of its question.", None),
    ("get", "/v1/learning"): ("What was learnt from traffic (with --audit, --shadow, --log ...).", None),
    ("post", "/v1/learning/clear"): ("End an alarm: begin to count again what skipping costs.", CLEAR_ALARM),
    ("get", "/"): ("The dashboard, a page.", None),
    ("get", "/v1/dashboard"): ("What the dashboard at / shows.", None),
    ("get", "/v1/models"): ("List the models and the gates that can be named.", None),
    ("get", "/health"): ("Say that the server runs.", None),
    ("get", "/ready"): ("Say whether a question would be answered as it should.", None),
    ("get", "/metrics"): ("What was counted, for Prometheus.", None),
    ("get", "/openapi.json"): ("This, for programs.", None),
    ("get", "/docs"): ("This, for people.", None),
}
ERROR = _object(
    ["error"], error=_object(["message", "type"], message=STRING, type=STRING, code={"type": ["string", "null"]})
)


def build_openapi() -> Schema:
    paths: dict[str, Schema] = {}
    for (method, address), (words, body) in ROUTES.items():
        paths.setdefault(address, {})[method] = _operation(method, address, words, body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "knowgate",
            "version": metadata.version("knowgate"),
            "description": "An OpenAI-compatible endpoint that retrieves only where the LLM does not know.",
        },
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": {"Problem": ERROR},
        },
        "security": [{}, {"key": []}],
        "paths": paths,
    }


def _operation(method: str, address: str, words: str, body: Schema | None) -> Schema:
    problem = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    found: Schema = {
        "summary": words,
        "operationId": f"{method} {address}",
        "responses": {
            "200": {"description": "done"},
            "default": {"description": "a sentence that says what was wrong", "content": problem},
        },
    }
    if "{id}" in address:
        found["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": QUESTION}]
    if body is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return found


DOCS_PAGE_HEAD = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>knowgate: addresses</title><style>
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem}
code,pre{font:14px/1.4 ui-monospace,monospace}pre{overflow:auto;padding:.6rem;border:1px solid #8885}
summary{cursor:pointer;padding:.3rem 0}b{display:inline-block;min-width:4.5rem}</style>
<h1>knowgate</h1><p>Applications that talk to OpenAI change their base URL to <code>/v1</code> here, and nothing else.
The decision is in the field <code>knowgate</code> of a reply and in its <code>x-knowgate-</code> headers. For programs:
<a href="openapi.json">openapi.json</a>.</p>
"""


def build_docs_page() -> str:
    rows = [_row(method, address, words, body) for (method, address), (words, body) in ROUTES.items()]
    return f"{DOCS_PAGE_HEAD}{''.join(rows)}</html>"


def _row(method: str, address: str, words: str, body: Schema | None) -> str:
    head = f"<b>{method.upper()}</b> <code>{html.escape(address)}</code><br>{html.escape(words)}"
    if body is None:
        return f"<p>{head}</p>"
    return f"<details><summary>{head}</summary><pre>{html.escape(json.dumps(body, indent=1))}</pre></details>"
