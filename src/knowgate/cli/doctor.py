"""`knowgate doctor`: checks the installation or the server's settings, and says how to fix problems."""

from __future__ import annotations

import asyncio
import importlib.util
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import typer
from rich.text import Text

from knowgate.cli.console import create_console
from knowgate.core import VERSION
from knowgate.core.files import cache_dir
from knowgate.core.options import Options, option
from knowgate.core.postgres.address import is_postgres_address
from knowgate.core.redaction import redact_urls
from knowgate.errors import KnowgateError, WeightsError
from knowgate.models import embedded_weights as weights
from knowgate.pipeline.settings import PipelineOptions, load_settings
from knowgate.server.auth.api_keys import read_keys
from knowgate.server.options import ServeOptions, load_serve_options

# Package -> (module to import, optional dependency group of knowgate that installs the package)
OPTIONAL_PACKAGES = {
    "torch": ("torch", "local"),
    "transformers": ("transformers", "local"),
    "gguf": ("gguf", "local"),
    "sentence-transformers": ("sentence_transformers", "local"),
    "PyStemmer": ("Stemmer", "stem"),
    "pypdf": ("pypdf", "pdf"),
    "faiss-cpu": ("faiss", "faiss"),
}
SERVER_MODULES = ("starlette", "uvicorn", "httptools", "aiohttp", "prometheus_client")
UPSTREAM_TIMEOUT = 3.0  # seconds to wait for a connection to the upstream server
MIN_FREE_GB = 2


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        name: What was checked.
        state: Result of the check, in words.
        advice: Command that fixes the problem; empty if there is no problem.
        is_broken: Whether knowgate does not work until the problem is fixed.
        is_minor: Whether the result is shown only with `--all`.
    """

    name: str
    state: str
    advice: str = ""
    is_broken: bool = False
    is_minor: bool = False


class DoctorOptions(Options):
    """Options of `knowgate doctor`."""

    everything: bool = option(False, "Show all checks, including optional packages.", flag="--all")
    serve: bool = option(False, "Check whether `knowgate serve` would start, and nothing else.", flag="--serve")
    config: Path | None = option(
        None, "Settings file to check with --serve. Default: knowgate.toml in this folder, if any.", metavar="FILE"
    )


def doctor(options: DoctorOptions) -> None:
    """Check packages, weights, cache and GPU, and say how to fix what is missing.

    The exit code is 1 if something is broken.
    """
    findings = list(check_serving(options.config) if options.serve else check_installation())
    shown = [finding for finding in findings if options.everything or not finding.is_minor]
    _print_findings(shown)
    create_console().print(summarize_findings(findings, "knowgate serve" if options.serve else "knowgate demo"))
    if any(finding.is_broken for finding in findings):
        raise typer.Exit(1)


def _print_findings(findings: Sequence[Finding]) -> None:
    """Print each finding on a line, and advice on a line of its own."""
    console = create_console()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        color = "yellow" if finding.advice else "green"
        if finding.is_broken:
            color = "red"
        console.print(Text.assemble(f"{finding.name:<{width}}  ", (finding.state, color)))
        if finding.advice:  # on its own line, so that it can be copied
            console.print(f"{'':<{width}}  type: {finding.advice}")


def summarize_findings(findings: Sequence[Finding], next_command: str) -> Text:
    """Summarize the checks in one line, with the next step.

    Args:
        findings: Results of the checks.
        next_command: Command to suggest if all checks passed.
    """
    n_broken = sum(finding.is_broken for finding in findings)
    n_missing = sum(bool(finding.advice) and not finding.is_broken for finding in findings)
    if n_broken:
        return Text(f"Not ready: {n_broken} broken. Type the commands shown above, then: knowgate doctor", "bold red")
    if n_missing:
        return Text(f"Ready. To add {n_missing} optional parts, type the commands above.", "bold yellow")
    return Text(f"All {len(findings)} checks passed. Next: {next_command}", "bold green")


# --- installation ---------------------------------------------------------------------------------


def check_installation() -> Iterator[Finding]:
    """Check packages, weights, cache and GPU, and yield a result for each."""
    yield Finding("knowgate", f"{VERSION}, python {platform.python_version()}")
    for package, (module, extra) in OPTIONAL_PACKAGES.items():
        if _is_installed(module):
            yield Finding(package, metadata.version(package), is_minor=True)
        else:
            yield Finding(package, "not installed", f"pip install 'knowgate[{extra}]'")
    for name in weights.WEIGHTS:
        yield _check_weights(name)
    yield _check_cache()
    yield _check_gpu()


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _check_weights(name: str) -> Finding:
    """Check whether model weights are downloaded and match their checksum."""
    label = f"weights {name}"
    spec = weights.get_weights(name)
    if not weights.is_cached(name):
        if spec.downloads_on_use:
            return Finding(label, "not downloaded yet", f"knowgate models pull {name}")
        return Finding(label, f"not downloaded (optional): {spec.summary}", is_minor=True)
    try:
        weights.verify_weights(name)
    except WeightsError:
        command = f"rm -r '{weights.locate_weights(name)}' && knowgate models pull {name}"
        return Finding(label, "corrupted (wrong sha256)", command, is_broken=True)
    return Finding(label, "cached, checksum good", is_minor=not spec.downloads_on_use)


def _check_cache() -> Finding:
    """Check whether the cache folder is writable and has free space."""
    folder = cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        advice = "export KNOWGATE_CACHE=/a/folder/you/can/write"
        return Finding("cache", f"{folder}: {error.strerror}", advice, is_broken=True)
    free = shutil.disk_usage(folder).free / 1e9
    advice = "" if free > MIN_FREE_GB else "free some disk space: the embedded models take 0.8 GB"
    return Finding("cache", f"{folder}, {free:.1f} GB free", advice)


def _check_gpu() -> Finding:
    """Report whether models run on a GPU or on the CPU. Neither is a problem."""
    if not _is_installed("torch"):
        return Finding("GPU", "unknown without torch")
    import torch

    if torch.cuda.is_available():
        return Finding("GPU", f"{torch.cuda.get_device_name(0)}, bf16")
    return Finding("GPU", f"none: models run on {torch.get_num_threads()} CPU thread(s) in fp32")


# --- server ---------------------------------------------------------------------------------------


def check_serving(config: Path | None = None) -> Iterator[Finding]:
    """Check whether `knowgate serve` would start, and yield a result for each check. Nothing is started or changed.

    Args:
        config: The settings file. Default: knowgate.toml in the current folder, if there is one.
    """
    yield _check_server_packages()
    try:
        settings = load_settings(config)
        options = load_serve_options(settings)
    except KnowgateError as error:
        yield Finding("settings", str(error), "correct the file, then: knowgate doctor --serve", is_broken=True)
        return
    findings = [_check_documents(settings), _check_port(options), _check_keys(options)]
    if options.upstream is None:
        findings.append(Finding("upstream", f"none: the server runs {settings.model} itself"))
    else:
        findings.append(_check_upstream(options.upstream))
    yield from findings
    if not any(finding.is_broken for finding in findings):
        yield _check_components(settings, options)


def _check_server_packages() -> Finding:
    """Check whether the packages of the server are installed."""
    missing = [name for name in SERVER_MODULES if not _is_installed(name)]
    if missing:
        return Finding("server", f"{', '.join(missing)} not installed", "pip install 'knowgate[serve]'", is_broken=True)
    return Finding("server", "all packages are installed")


def _check_components(settings: PipelineOptions, options: ServeOptions) -> Finding:
    """Load what the server would load, such as gates, rules, arbiter and documents. New databases are not created."""
    from knowgate.server.app import build_service

    with tempfile.TemporaryDirectory() as folder:
        try:
            settings = settings.model_copy(update={"log": _replace_new_file(settings.log, folder)})
            options = options.model_copy(update={"decisions": _replace_new_file(options.decisions, folder)})
            asyncio.run(build_service(settings, options).close())
        except (KnowgateError, OSError) as error:
            return Finding(
                "components", str(error), "correct the settings, then: knowgate doctor --serve", is_broken=True
            )
    return Finding("components", "gates, rules and documents can be loaded")


def _replace_new_file(path: str | None, folder: str) -> str | None:
    """Return the path of a file in `folder` instead of a file that does not exist yet, if it could be created."""
    if path is None or is_postgres_address(path) or Path(path).exists() or not Path(path).parent.is_dir():
        return path
    return str(Path(folder, Path(path).name))


def _check_documents(settings: PipelineOptions) -> Finding:
    """Check whether the settings name documents or an index to retrieve from."""
    if settings.index is None and settings.docs is None:
        return Finding("documents", "none", "knowgate serve --docs FOLDER, or docs = ... in knowgate.toml")
    if settings.docs is not None and not settings.docs.exists():
        return Finding("documents", f"'{settings.docs}' is missing", "correct docs in knowgate.toml", is_broken=True)
    return Finding("documents", redact_urls(str(settings.docs or settings.index)))


def _check_port(options: ServeOptions) -> Finding:
    """Check whether the server's port is free."""
    address = f"{options.host}:{options.port}"
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((options.host, options.port))
        except OSError as error:
            return Finding("port", f"{address}: {error.strerror}", "knowgate serve --port ANOTHER", is_broken=True)
    return Finding("port", f"{address} is free")


def _check_keys(options: ServeOptions) -> Finding:
    """Check the file of API keys. A server for other machines must have keys."""
    if options.keys is None:
        if options.is_local:
            return Finding("API keys", "none: only clients on this machine are served")
        state = f"none, but other machines can reach {options.host}"
        return Finding("API keys", state, "knowgate keys add NAME", is_broken=True)
    try:
        n_keys = len(read_keys(options.keys))
    except KnowgateError as error:
        return Finding("API keys", str(error), "knowgate keys list", is_broken=True)
    advice = "" if n_keys else f"knowgate keys add NAME --keys {options.keys}"
    return Finding("API keys", f"{n_keys} in {options.keys}", advice)


def _check_upstream(url: str) -> Finding:
    """Check whether the upstream LLM server accepts connections, without sending a request."""
    parts = urlsplit(url)
    address = redact_urls(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), UPSTREAM_TIMEOUT).close()
    except OSError as error:
        state = f"{address}: {error.strerror or error}"
        return Finding("upstream", state, "start it, or correct its address", is_broken=True)
    return Finding("upstream", f"{address} accepts connections")
