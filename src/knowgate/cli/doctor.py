"""`knowgate doctor`: is everything here, and what to type if not. What is well and seldom asked for takes `--all`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.text import Text

from knowgate.cli.console import create_console
from knowgate.cli.options import parse_path
from knowgate.core import VERSION
from knowgate.core.files import cache_dir
from knowgate.core.redaction import redact_urls
from knowgate.errors import KnowgateError, WeightsError
from knowgate.models import embedded_weights as weights
from knowgate.pipeline.settings import PipelineOptions, load_settings
from knowgate.server.auth.api_keys import read_keys
from knowgate.server.options import ServeOptions, load_serve_options


@dataclass(frozen=True)
class Finding:
    """One line of the check-up. `advice` is what to type; empty when all is well. minor: told only when all is."""

    what: str
    state: str
    advice: str = ""
    broken: bool = False
    minor: bool = False


REQUIRED_SERVER_PACKAGES = {"starlette": "serve", "uvicorn": "serve", "aiohttp": "serve", "prometheus_client": "serve"}
FAST_SERVER_PACKAGES = {"uvloop": "serve", "httptools": "serve"}
UPSTREAM_TIMEOUT = 3.0


def check_serving(config: Path | None = None) -> Iterator[Finding]:
    """config: as of `serve --config`."""
    yield from _packages()
    try:
        settings = load_settings(config)
        options = load_serve_options(settings)
    except KnowgateError as error:
        yield Finding("settings", str(error), "correct the file, then: knowgate doctor --serve", broken=True)
        return
    yield _documents(settings)
    yield _port(options)
    yield _keys(options)
    if options.upstream is None:
        yield Finding("upstream", f"none: {settings.model} answers in the server's process")
    else:
        yield _upstream(options.upstream)


def _packages() -> Iterator[Finding]:
    missing = [name for name in REQUIRED_SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    slower = [name for name in FAST_SERVER_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding("server", f"{', '.join(missing)} not installed", "pip install 'knowgate[serve]'", broken=True)
    elif slower:
        yield Finding("server", f"works, slower without {', '.join(slower)}", "pip install 'knowgate[serve]'")
    else:
        yield Finding("server", "all packages are here")


def _documents(settings: PipelineOptions) -> Finding:
    if settings.index is None and settings.docs is None:
        return Finding("documents", "none named", "knowgate serve --docs FOLDER, or docs = ... in knowgate.toml")
    if settings.docs is not None and not settings.docs.exists():
        return Finding("documents", f"'{settings.docs}' is not there", "correct docs in knowgate.toml", broken=True)
    return Finding("documents", redact_urls(str(settings.docs or settings.index)))


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
        count = len(read_keys(options.keys))
    except KnowgateError as error:
        return Finding("API keys", str(error), "knowgate keys list", broken=True)
    return Finding(
        "API keys", f"{count} in {options.keys}", "" if count else f"knowgate keys add NAME --keys {options.keys}"
    )


def _upstream(url: str) -> Finding:
    """Whether somebody listens there; nothing is asked of it."""
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    shown = redact_urls(url)
    try:
        socket.create_connection((parts.hostname or "", port), UPSTREAM_TIMEOUT).close()
    except OSError as error:
        return Finding(
            "upstream", f"{shown}: {error.strerror or error}", "start it, or correct its address", broken=True
        )
    return Finding("upstream", f"{shown} listens")


# package -> (import name, extra): what each optional capability stands on
OPTIONAL_PACKAGES = {
    "torch": ("torch", "local"),
    "transformers": ("transformers", "local"),
    "gguf": ("gguf", "local"),
    "sentence-transformers": ("sentence_transformers", "local"),
    "PyStemmer": ("Stemmer", "stem"),
    "pypdf": ("pypdf", "pdf"),
    "faiss-cpu": ("faiss", "faiss"),
}


def doctor(
    everything: Annotated[bool, typer.Option("--all", help="Every package and weight, also what is well.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="Instead: whether `knowgate serve` would start here, and answer.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(parser=parse_path, metavar="FILE", help="With --serve: the config file it would have."),
    ] = None,
) -> None:
    """Check packages, weights, cache and GPU; say what to type where something is missing. Ends with a verdict."""
    findings = list(check_serving(config) if serve else check_installation())
    shown = [finding for finding in findings if everything or not finding.minor]
    console = create_console()
    width = max(len(finding.what) for finding in shown)
    for finding in shown:
        colour = "red" if finding.broken else "yellow" if finding.advice else "green"
        console.print(Text.assemble(f"{finding.what:<{width}}  ", (finding.state, colour)))
        if finding.advice:  # on a line of its own, to be copied whole
            console.print(f"{'':<{width}}  type: {finding.advice}")
    console.print(summarize_findings(findings, "knowgate serve" if serve else "knowgate demo"))
    if any(finding.broken for finding in findings):
        raise typer.Exit(1)


def summarize_findings(findings: Sequence[Finding], then: str = "knowgate demo") -> Text:
    """One line: can one begin, and with what."""
    broken = sum(finding.broken for finding in findings)
    missing = sum(bool(finding.advice) and not finding.broken for finding in findings)
    if broken:
        return Text(f"Not ready: {broken} broken. Type what stands above, then: knowgate doctor", "bold red")
    if missing:
        return Text(f"Ready but for {missing}, which you may not need. Type what stands above.", "bold yellow")
    return Text(f"All {len(findings)} checks are good. Next: {then}", "bold green")


def check_installation() -> Iterator[Finding]:
    yield Finding("knowgate", f"{VERSION}, python {platform.python_version()}")
    for package, (module, extra) in OPTIONAL_PACKAGES.items():
        yield _package(package, module, extra)
    for name in weights.WEIGHTS:
        yield _weights(name)
    yield _cache()
    yield _gpu()
    yield _bench()


def _package(package: str, module: str, extra: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(package, "not installed", f"pip install 'knowgate[{extra}]'")
    return Finding(package, metadata.version(package), minor=True)


def _weights(name: str) -> Finding:
    if not weights.is_cached(name) and not weights.get_weights(name).embedded:
        return Finding(f"weights {name}", f"not fetched (optional): {weights.get_weights(name).summary}", minor=True)
    if not weights.is_cached(name):
        return Finding(f"weights {name}", "not fetched yet", f"knowgate models pull {name}")
    try:
        weights.verify_weights(name)
    except WeightsError:
        command = f"rm -r '{weights.locate_weights(name)}' && knowgate models pull {name}"
        return Finding(f"weights {name}", "corrupted (wrong sha256)", command, broken=True)
    minor = not weights.get_weights(name).embedded
    return Finding(f"weights {name}", "cached, checksum good", minor=minor)


def _cache() -> Finding:
    path = cache_dir()
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        advice = "export KNOWGATE_CACHE=/a/folder/you/can/write"
        return Finding("cache", f"{path}: {error.strerror}", advice, broken=True)
    free = shutil.disk_usage(path).free / 1e9
    advice = "" if free > 2 else "free some disk space: the embedded models take 0.8 GB"
    return Finding("cache", f"{path}, {free:.1f} GB free", advice)


def _gpu() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("GPU", "unknown without torch")
    import torch

    if torch.cuda.is_available():
        return Finding("GPU", f"{torch.cuda.get_device_name(0)}, bf16")
    return Finding("GPU", f"none: fp32 on {torch.get_num_threads()} CPU thread(s)")


def _bench() -> Finding:
    chosen = os.environ.get("KNOWGATE_BENCH")
    if not chosen:
        return Finding("benchmark data", "KNOWGATE_BENCH is not set (only bench: data needs it)", minor=True)
    if not Path(chosen).is_dir():
        return Finding("benchmark data", f"{chosen} is not a folder", "unset KNOWGATE_BENCH", broken=True)
    return Finding("benchmark data", chosen)
