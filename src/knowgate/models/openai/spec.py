"""What `openai:MODEL@URL#OPTIONS` says: which model, where, and what its server was started with. Asks nobody."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

import httpx

from knowgate.core.redaction import redact_secrets
from knowgate.core.validation import expand_path
from knowgate.errors import BadSetting

DEFAULT_CONCURRENCY = 8  # requests in flight
MAX_CONCURRENCY = 1_024
SPEC_OPTIONS = ("concurrency", "layers", "depth", "storage")
SPEC_FORM = "openai:MODEL@URL, such as openai:Qwen/Qwen3-8B@http://127.0.0.1:8000/v1"


@dataclass(frozen=True)
class HiddenStateConfig:
    """The hidden states a server gives with each prompt.

    layers: in the server's order, counted as transformers does (0 are the embeddings). depth: entries of transformers'
    hidden-state tuple. storage: the folder vLLM writes them into, as it is called on this machine.
    """

    layers: tuple[int, ...]
    depth: int
    storage: Path | None = None


@dataclass(frozen=True)
class OpenAISpec:
    model: str
    url: str
    concurrency: int = DEFAULT_CONCURRENCY
    states: HiddenStateConfig | None = None


def parse_openai_spec(value: str) -> OpenAISpec:
    match = re.fullmatch(r"(?P<model>\S+?)@(?P<url>https?://[^\s#]+)(#(?P<options>\S*))?", value)
    if match is None:
        raise BadSetting(f"'openai:{redact_secrets(value)}' is not {SPEC_FORM}.")
    pairs = parse_qsl(match["options"] or "", keep_blank_values=True)
    given = dict(pairs)
    unknown = [name for name, _ in pairs if name not in SPEC_OPTIONS]
    if unknown or len(given) < len(pairs):
        raise BadSetting(
            f"'#{match['options']}' behind a server's URL is not understood. Give each of {', '.join(SPEC_OPTIONS)} at most "
            "once, as in #layers=15,23&storage=/mnt/states&concurrency=32."
        )
    at_once = _number("concurrency", given.get("concurrency", str(DEFAULT_CONCURRENCY)), MAX_CONCURRENCY)
    return OpenAISpec(match["model"], match["url"], at_once, _states(given))


def _states(given: dict[str, str]) -> HiddenStateConfig | None:
    if "layers" not in given:
        if alone := [name for name in ("depth", "storage") if name in given]:
            raise BadSetting(f"'{alone[0]}' of a server is about hidden states: name their layers too, #layers=15,23.")
        return None
    layers = tuple(_number("layers", word, 100_000, least=0) for word in given["layers"].split(","))
    if len(set(layers)) < len(layers):
        raise BadSetting(f"the server's layers {given['layers']} name one of them twice.")
    depth = _number("depth", given.get("depth", str(max(layers) + 1)), 100_001)
    if depth <= max(layers):
        raise BadSetting(
            f"depth={depth} is too little for layer {max(layers)}: it counts the embeddings and every layer."
        )
    return HiddenStateConfig(layers, depth, expand_path(given["storage"]) if given.get("storage") else None)


def _number(name: str, word: str, most: int, least: int = 1) -> int:
    number = int(word) if word.isascii() and word.isdigit() and len(word) < 10 else -1
    if not least <= number <= most:
        raise BadSetting(f"{name} of a server is '{word}'; it must be a whole number from {least} to {most:,}.")
    return number


def check_server_url(url: str) -> None:
    """Refuse what cannot be the address of a server, and logins, which would be shown."""
    shown = redact_secrets(url)
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise BadSetting(f"'{shown}' is not a URL: {error}.") from None
    if parsed.userinfo:
        raise BadSetting(f"'{shown}' has a login in it. Put the key into KNOWGATE_API_KEY.")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise BadSetting(f"'{shown}' must be http(s)://HOST[:PORT]/PATH, such as http://127.0.0.1:8000/v1.")
