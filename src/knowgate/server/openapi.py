"""What the server understands, as OpenAPI: for programs at /openapi.json, for people at /docs.

Written down here rather than read off the code: the requests are mostly OpenAI's, of which only what matters here is
said. The page needs nothing from outside.
"""

from __future__ import annotations

import html
import json
from importlib import metadata
from typing import Any

Record = dict[str, Any]
TEXT: Record = {"type": "string"}
FLAG: Record = {"type": "boolean"}
SHARE: Record = {"type": "number", "minimum": 0, "maximum": 1}
PATTERNS: Record = {"anyOf": [TEXT, {"type": "array", "items": TEXT}]}
WISH: Record = {
    "type": "object",
    "description": "What this request wants of the gate.",
    "additionalProperties": False,
    "properties": {
        "retrieve": {"enum": ["auto", "always", "never"]},
        "threshold": {**SHARE, "description": "Retrieve where the need is above it."},
        "max_loss": {**SHARE, "description": "Retrieve unless skipping is proven to lose no more of the answers."},
        "filter": {
            "type": "object",
            "description": "Only documents that fit these patterns, such as hr/*.",
            "additionalProperties": False,
            "properties": {"id": PATTERNS, "title": PATTERNS},
        },
    },
}
MESSAGES: Record = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {"role": TEXT, "content": {"anyOf": [TEXT, {"type": "array"}, {"type": "null"}]}},
    },
}
OURS: Record = {"model": {**TEXT, "description": "knowgate, knowgate/GATE, or one of /v1/models."}, "knowgate": WISH}
QUESTION: Record = {**TEXT, "minLength": 1}


def _object(required: list[str], **properties: Any) -> Record:
    return {"type": "object", "required": required, "properties": properties}


CHAT = _object(["messages"], **OURS, messages=MESSAGES, stream=FLAG)
PROMPT = _object(["prompt"], **OURS, prompt={"anyOf": [TEXT, {"type": "array"}]}, stream=FLAG)
RESPONSE = _object(["input"], **OURS, input={"anyOf": [TEXT, {"type": "array"}]}, stream=FLAG)
EMBEDDING = _object(["input"], **OURS, input={"anyOf": [TEXT, {"type": "array"}]})
DECIDE: Record = {
    "type": "object",
    "description": "One of question, questions and messages.",
    "properties": {
        **OURS,
        "question": QUESTION,
        "questions": {"type": "array", "items": QUESTION, "minItems": 1, "maxItems": 256},
        "messages": MESSAGES,
    },
}
DOCUMENT: Record = {"anyOf": [TEXT, _object(["text"], text=TEXT)]}
RERANK = _object(
    ["query", "documents"],
    query=QUESTION,
    documents={"type": "array", "items": DOCUMENT, "minItems": 1, "maxItems": 1000},
    top_n={"type": "integer", "minimum": 1},
    return_documents=FLAG,
)
FEEDBACK = _object(["id", "rating"], id=TEXT, rating={"enum": ["up", "down"]}, comment=TEXT, correction=TEXT)
CLEAR = _object([], arm={"enum": ["a", "b"]})
FORGET = _object(["question"], question=QUESTION)

# (method, address) -> (what it does, body)
ROUTES: dict[tuple[str, str], tuple[str, Record | None]] = {
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
    ("post", "/v1/learning/clear"): ("End an alarm: begin to count again what skipping costs.", CLEAR),
    ("get", "/"): ("The dashboard, a page.", None),
    ("get", "/v1/dashboard"): ("What the dashboard at / shows.", None),
    ("get", "/v1/models"): ("List the models and the gates that can be named.", None),
    ("get", "/health"): ("Say that the server runs.", None),
    ("get", "/ready"): ("Say whether a question would be answered as it should.", None),
    ("get", "/metrics"): ("What was counted, for Prometheus.", None),
    ("get", "/openapi.json"): ("This, for programs.", None),
    ("get", "/docs"): ("This, for people.", None),
}
PROBLEM = _object(
    ["error"], error=_object(["message", "type"], message=TEXT, type=TEXT, code={"type": ["string", "null"]})
)


def openapi() -> Record:
    paths: dict[str, Record] = {}
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
            "schemas": {"Problem": PROBLEM},
        },
        "security": [{}, {"key": []}],
        "paths": paths,
    }


def _operation(method: str, address: str, words: str, body: Record | None) -> Record:
    problem = {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    found: Record = {
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


PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>knowgate: addresses</title><style>
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:50rem;margin:2rem auto;padding:0 1rem}
code,pre{font:14px/1.4 ui-monospace,monospace}pre{overflow:auto;padding:.6rem;border:1px solid #8885}
summary{cursor:pointer;padding:.3rem 0}b{display:inline-block;min-width:4.5rem}</style>
<h1>knowgate</h1><p>Applications that talk to OpenAI change their base URL to <code>/v1</code> here, and nothing else.
The decision is in the field <code>knowgate</code> of a reply and in its <code>x-knowgate-</code> headers. For programs:
<a href="openapi.json">openapi.json</a>.</p>
"""


def page() -> str:
    rows = [_row(method, address, words, body) for (method, address), (words, body) in ROUTES.items()]
    return f"{PAGE}{''.join(rows)}</html>"


def _row(method: str, address: str, words: str, body: Record | None) -> str:
    head = f"<b>{method.upper()}</b> <code>{html.escape(address)}</code><br>{html.escape(words)}"
    if body is None:
        return f"<p>{head}</p>"
    return f"<details><summary>{head}</summary><pre>{html.escape(json.dumps(body, indent=1))}</pre></details>"
