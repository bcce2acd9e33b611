"""Removal of secrets from messages: keys, tokens, passwords, and logins in URLs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

REDACTED = "***"
MAX_MESSAGE_CHARS = 300  # a server's message is cut to this length in an error
MIN_SECRET_CHARS = 6  # replacing shorter values, such as "1" or "true", would garble a text
SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
SECRET_PATTERNS = [
    # A PostgreSQL password may contain slashes.
    (re.compile(r"(postgres(?:ql)?://)[^\s?]*:[^\s?]*@"), rf"\1{REDACTED}@"),
    (re.compile(r"(?<!postgres:)(?<!postgresql:)//[^/\s'\"]*@"), f"//{REDACTED}@"),
    (re.compile(r"(?i)([?&;][\w-]*(?:key|token|secret|passw\w*|passfile|sig|auth\w*)=)[^&\s'\"]+"), rf"\1{REDACTED}"),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {REDACTED}"),
    (re.compile(r"\b(?:sk|hf|ghp|pk)[-_][\w-]{8,}"), REDACTED),  # keys of well-known services
    (re.compile(r"(?i)(--[\w-]*(?:key|token|secret|password)[= ])\S+"), rf"\1{REDACTED}"),
]


def redact_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Replace secrets by ***. Examples: logins and keys in URLs, bearer tokens, API keys.

    Args:
        text: Any text.
        environment: Environment variables. Values of those named like a secret (OPENAI_API_KEY) are replaced, too.
    """
    values = [value.strip() for name, value in (environment or {}).items() if SECRET_VARIABLE.search(name)]
    for value in sorted(values, key=len, reverse=True):  # a longer value may contain a shorter one
        if len(value) >= MIN_SECRET_CHARS:
            text = text.replace(value, REDACTED)
    for pattern, replacement in SECRET_PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_urls(text: str) -> str:
    """Hide secrets and the whole query string of HTTP URLs. Any query parameter may be a key."""
    return re.sub(r"(https?://[^\s?#]*)[?#]\S*", rf"\1?{REDACTED}", redact_secrets(text))


def redact_message(text: str, secrets: Iterable[str] = ()) -> str:
    """Remove secrets from a server's message and shorten it to one line."""
    text = text[: 20 * MAX_MESSAGE_CHARS]  # a huge message would be slow to search for secrets
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"


def find_url_secrets(url: str) -> list[str]:
    """Return user, password and query values of a URL, longest first. Each is returned percent-encoded and decoded."""
    address, _, query = url.partition("?")
    login = re.match(r"https?://([^/\s]*)@", address)
    secrets = login.group(1).split(":", 1) if login else []  # user and password
    # A query value such as {query} is a placeholder, which each search fills in, and no secret.
    secrets += [pair.partition("=")[2] for pair in query.split("&") if "{" not in pair]
    secrets += [unquote(secret) for secret in secrets]
    long_secrets = {secret for secret in secrets if len(secret) > 2}  # hiding a shorter text would garble messages
    return sorted(long_secrets, key=len, reverse=True)
