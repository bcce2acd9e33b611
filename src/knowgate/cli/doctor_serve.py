"""`knowgate doctor --serve`: would a server start here, and would it answer? Looks; starts and changes nothing."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from knowgate.cli.findings import Finding
from knowgate.errors import KnowgateError
from knowgate.pipeline import Settings, load_settings
from knowgate.server import ServeOptions, read_keys, serve_options
from knowgate.servers import without_secrets

NEEDED = {"starlette": "serve", "uvicorn": "serve", "aiohttp": "serve", "prometheus_client": "serve"}
FASTER = {"uvloop": "serve", "httptools": "serve"}
SECONDS = 3.0


def examine_serving(config: Path | None = None) -> Iterator[Finding]:
    """config: as of `serve --config`."""
    yield from _packages()
    try:
        settings = load_settings(config)
        options = serve_options(settings)
    except KnowgateError as error:
        yield Finding("settings", str(error), "correct the file, then: knowgate doctor --serve", broken=True)
        return
    yield _documents(settings)
    yield _port(options)
    yield _keys(options)
    if options.upstream is None:
        yield Finding("upstream", f"none: {settings.model} answers in the server's process")
    for written in options.upstream or ():
        yield _upstream(written.partition(",")[0])


def _packages() -> Iterator[Finding]:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    slower = [name for name in FASTER if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding("server", f"{', '.join(missing)} not installed", "pip install 'knowgate[serve]'", broken=True)
    elif slower:
        yield Finding("server", f"works, slower without {', '.join(slower)}", "pip install 'knowgate[serve]'")
    else:
        yield Finding("server", "all packages are here")


def _documents(settings: Settings) -> Finding:
    if settings.index is None and settings.docs is None:
        return Finding("documents", "none named", "knowgate serve --docs FOLDER, or docs = ... in knowgate.toml")
    if settings.docs is not None and not settings.docs.exists():
        return Finding("documents", f"'{settings.docs}' is not there", "correct docs in knowgate.toml", broken=True)
    return Finding("documents", without_secrets(str(settings.docs or settings.index)))


def _port(options: ServeOptions) -> Finding:
    place = f"{options.host}:{options.port}"
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((options.host, options.port))
        except OSError as error:
            return Finding("port", f"{place}: {error.strerror}", "knowgate serve --port ANOTHER", broken=True)
    return Finding("port", f"{place} is free")


def _keys(options: ServeOptions) -> Finding:
    if options.keys is None:
        if options.is_local:
            return Finding("API keys", "none: only this machine is answered")
        return Finding("API keys", f"none, but {options.host} can be reached", "knowgate keys add NAME", broken=True)
    try:
        count = len(read_keys(Path(options.keys).expanduser()))
    except KnowgateError as error:
        return Finding("API keys", str(error), "knowgate keys list", broken=True)
    return Finding(
        "API keys", f"{count} in {options.keys}", "" if count else f"knowgate keys add NAME --keys {options.keys}"
    )


def _upstream(url: str) -> Finding:
    """Whether somebody listens there; nothing is asked of it."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    shown = without_secrets(url)
    try:
        socket.create_connection((parts.hostname or "", port), SECONDS).close()
    except OSError as error:
        return Finding(
            "upstream", f"{shown}: {error.strerror or error}", "start it, or correct its address", broken=True
        )
    return Finding("upstream", f"{shown} listens")
