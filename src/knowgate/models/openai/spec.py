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
    """Which hidden states of a model a server returns, as the user started it.

    Args:
        layers: Layer numbers in the server's order, counted as in transformers (0 is the embeddings).
        depth: Number of hidden states of the model: its number of layers plus one for the embeddings.
        storage: Path on this machine of the folder that vLLM writes hidden states to; None for SGLang.
    """

    layers: tuple[int, ...]
    depth: int
    storage: Path | None = None


@dataclass(frozen=True)
class OpenAISpec:
    """The parts of a spec `openai:MODEL@URL#OPTIONS`.

    Args:
        model: Name of the model on the server.
        url: Base URL of the server.
        concurrency: Maximum number of simultaneous requests.
        hidden_states: The hidden states that the server was started with; None if it returns none.
    """

    model: str
    url: str
    concurrency: int = DEFAULT_CONCURRENCY
    hidden_states: HiddenStateConfig | None = None


def parse_openai_spec(value: str) -> OpenAISpec:
    """Parse a model spec after its prefix 'openai:'.

    Raises:
        BadSetting: The spec is malformed, or an option is unknown or out of range.

    Example:
        >>> parse_openai_spec("m@http://127.0.0.1:8000/v1#concurrency=32").concurrency
        32
    """
    match = re.fullmatch(r"(?P<model>\S+?)@(?P<url>https?://[^\s#]+)(#(?P<options>\S*))?", value)
    if match is None:
        raise BadSetting(f"the model 'openai:{redact_secrets(value)}' does not have the form {SPEC_FORM}.")
    pairs = parse_qsl(match["options"] or "", keep_blank_values=True)
    options = dict(pairs)
    if not set(options) <= set(SPEC_OPTIONS) or len(options) < len(pairs):
        raise BadSetting(
            f"the options '#{match['options']}' after the server's URL are not valid. Use {', '.join(SPEC_OPTIONS)}, each at "
            "most once. Example: #layers=15,23&storage=/mnt/states&concurrency=32"
        )
    concurrency = _parse_number("concurrency", options.get("concurrency", str(DEFAULT_CONCURRENCY)), MAX_CONCURRENCY)
    return OpenAISpec(match["model"], match["url"], concurrency, _parse_hidden_states(options))


def _parse_hidden_states(options: dict[str, str]) -> HiddenStateConfig | None:
    """Parse the options layers, depth and storage, or return None without them."""
    if "layers" not in options:
        if others := [name for name in ("depth", "storage") if name in options]:
            raise BadSetting(f"the URL option '{others[0]}' also needs the option 'layers'. Example: #layers=15")
        return None
    layers = tuple(_parse_number("layers", word, 100_000, minimum=0) for word in options["layers"].split(","))
    if len(set(layers)) < len(layers):
        raise BadSetting(f"the URL option 'layers' names a layer twice: {options['layers']}. List each layer once.")
    depth = _parse_number("depth", options.get("depth", str(max(layers) + 1)), 100_001)
    if depth <= max(layers):
        raise BadSetting(
            f"depth={depth} after the server's URL is too small for layer {max(layers)}. Set it to the layer count plus one."
        )
    return HiddenStateConfig(layers, depth, expand_path(options["storage"]) if options.get("storage") else None)


def _parse_number(name: str, text: str, maximum: int, minimum: int = 1) -> int:
    """Parse the option `name` as a whole number within limits."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1  # -1 is always out of range
    if not minimum <= number <= maximum:
        raise BadSetting(
            f"the option '{name}' after the server's URL must be a whole number from {minimum} to {maximum:,}, not '{text}'."
        )
    return number


def check_server_url(url: str) -> None:
    """Raise BadSetting if a URL is invalid or contains a login (user:password@)."""
    redacted = redact_secrets(url)
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BadSetting(f"'{redacted}' is not a valid URL: {error}. Example: http://127.0.0.1:8000/v1.") from None
    if parsed.userinfo:
        raise BadSetting(f"the URL '{redacted}' contains a user name. Remove it, and set KNOWGATE_API_KEY instead.")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise BadSetting(f"the URL '{redacted}' must have the form http(s)://HOST[:PORT]/PATH.")
