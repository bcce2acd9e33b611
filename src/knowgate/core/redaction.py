"""Removal of secrets from messages: keys, tokens, passwords, and logins in URLs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

REDACTED = "***"
MAX_MESSAGE_CHARS = 300  # of a server's message in an error
MIN_SECRET_CHARS = 6  # shorter values of variables ("1", "true") would remove half of the text
SECRET_VARIABLE = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
SECRET_PATTERNS = [
    (re.compile(r"(postgres(?:ql)?://)[^\s?]*:[^\s?]*@"), rf"\1{REDACTED}@"),  # passwords may contain slashes
    (re.compile(r"(?<!postgres:)(?<!postgresql:)//[^/\s'\"]*@"), f"//{REDACTED}@"),
    (
        re.compile(r"(?i)([?&;][\w-]*(?:key|token|secret|passw\w*|passfile|sig|auth\w*)=)[^&\s'\"]+"),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {REDACTED}"),
    (re.compile(r"\b(?:sk|hf|ghp|pk)[-_][\w-]{8,}"), REDACTED),  # keys of well-known services
    (re.compile(r"(?i)(--[\w-]*(?:key|token|secret|password)[= ])\S+"), rf"\1{REDACTED}"),
]


def redact_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Replace everything that looks like a secret: logins and keys in URLs, bearer tokens, API keys.

    Args:
        text: Any text.
        environment: Also replace the values of variables that are named like secrets, such as OPENAI_API_KEY.
    """
    values = {value.strip() for name, value in (environment or {}).items() if SECRET_VARIABLE.search(name)}
    for value in sorted((value for value in values if len(value) >= MIN_SECRET_CHARS), key=len, reverse=True):
        text = text.replace(value, REDACTED)
    for pattern, replacement in SECRET_PATTERNS:
        text = pattern.sub(replacement, text)
    return text


def redact_urls(text: str) -> str:
    """Replace secrets and, in HTTP URLs, the whole query string: search services use any name for their keys."""
    return re.sub(r"(https?://[^\s?#]*)[?#]\S*", rf"\1?{REDACTED}", redact_secrets(text))


def redact_message(text: str, secrets: Iterable[str] = ()) -> str:
    """Put a server's message on one line of bounded length, without the given secrets."""
    text = text[: 20 * MAX_MESSAGE_CHARS]
    for secret in secrets:
        text = text.replace(secret, REDACTED)
    text = " ".join(text.split())
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "…"


def find_url_secrets(url: str) -> list[str]:
    """Return the parts of a URL that may be secret (login and query values, quoted and unquoted), longest first."""
    address, _, query = url.partition("?")
    login = re.match(r"https?://([^/\s]*)@", address)
    parts = login.group(1).split(":", 1) if login else []
    parts += [pair.partition("=")[2] for pair in query.split("&") if "{" not in pair]
    forms = {form for part in parts for form in (part, unquote(part)) if len(form) > 2}
    return sorted(forms, key=len, reverse=True)
