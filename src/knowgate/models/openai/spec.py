"""Parse the model spec `openai:MODEL@URL#OPTIONS`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

import httpx

from knowgate.core.redaction import redact_secrets
from knowgate.core.validation import expand_path
from knowgate.errors import BadSetting

DEFAULT_CONCURRENCY = 8
MAX_CONCURRENCY = 1_024
SPEC_OPTIONS = ("concurrency", "layers", "depth", "storage")
SPEC_FORM = "openai:MODEL@URL, such as openai:Qwen/Qwen3-8B@http://127.0.0.1:8000/v1"


@dataclass(frozen=True)
class HiddenStateConfig:
    """The hidden states that a server was started to give.

    Args:
        layers: Layer numbers in the server's order, counted as in transformers (0 is the embeddings).
        depth: Number of hidden states that transformers has for this model.
        storage: The folder that vLLM writes them to, as this machine sees it.
    """

    layers: tuple[int, ...]
    depth: int
    storage: Path | None = None


@dataclass(frozen=True)
class OpenAISpec:
    """A model on a server, with the options of its spec."""

    model: str
    url: str
    concurrency: int = DEFAULT_CONCURRENCY
    hidden_states: HiddenStateConfig | None = None


def parse_openai_spec(value: str) -> OpenAISpec:
    """Parse what follows 'openai:' in a model spec.

    Example:
        >>> parse_openai_spec("m@http://127.0.0.1:8000/v1#concurrency=32").concurrency
        32
    """
    match = re.fullmatch(r"(?P<model>\S+?)@(?P<url>https?://[^\s#]+)(#(?P<options>\S*))?", value)
    if match is None:
        raise BadSetting(f"'openai:{redact_secrets(value)}' is not of the form {SPEC_FORM}.")
    pairs = parse_qsl(match["options"] or "", keep_blank_values=True)
    options = dict(pairs)
    if not set(options) <= set(SPEC_OPTIONS) or len(options) < len(pairs):
        raise BadSetting(
            f"cannot parse the options '#{match['options']}' after a server's URL. Give each of "
            f"{', '.join(SPEC_OPTIONS)} at most once, as in #layers=15,23&storage=/mnt/states&concurrency=32."
        )
    concurrency = _parse_number("concurrency", options.get("concurrency", str(DEFAULT_CONCURRENCY)), MAX_CONCURRENCY)
    return OpenAISpec(match["model"], match["url"], concurrency, _parse_hidden_states(options))


def _parse_hidden_states(options: dict[str, str]) -> HiddenStateConfig | None:
    """Parse the options layers, depth and storage."""
    if "layers" not in options:
        if others := [name for name in ("depth", "storage") if name in options]:
            raise BadSetting(f"'{others[0]}' of a server needs the layers of its hidden states too: #layers=15,23.")
        return None
    layers = tuple(_parse_number("layers", word, 100_000, minimum=0) for word in options["layers"].split(","))
    if len(set(layers)) < len(layers):
        raise BadSetting(f"layers={options['layers']} of a server names a layer twice.")
    depth = _parse_number("depth", options.get("depth", str(max(layers) + 1)), 100_001)
    if depth <= max(layers):
        raise BadSetting(
            f"depth={depth} is too small for layer {max(layers)}: it counts the embeddings and every layer."
        )
    return HiddenStateConfig(layers, depth, expand_path(options["storage"]) if options.get("storage") else None)


def _parse_number(name: str, text: str, maximum: int, minimum: int = 1) -> int:
    """Parse a whole number within limits."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
    if not minimum <= number <= maximum:
        raise BadSetting(f"{name} of a server must be a whole number from {minimum} to {maximum:,}, got '{text}'.")
    return number


def check_server_url(url: str) -> None:
    """Raise BadSetting for a URL that is invalid or contains a login, which would be shown in messages."""
    redacted = redact_secrets(url)
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BadSetting(f"'{redacted}' is not a URL: {error}.") from None
    if parsed.userinfo:
        raise BadSetting(f"'{redacted}' contains a login. Put the key into KNOWGATE_API_KEY.")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise BadSetting(f"'{redacted}' must be http(s)://HOST[:PORT]/PATH, such as http://127.0.0.1:8000/v1.")
