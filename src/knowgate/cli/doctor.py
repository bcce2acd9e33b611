"""`knowgate doctor`: is everything here, and what to type if not. What is well and seldom asked for takes `--all`."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from knowgate import weights
from knowgate.cli.console import plain_console
from knowgate.cli.doctor_serve import examine_serving
from knowgate.cli.findings import Finding
from knowgate.cli.paths import path
from knowgate.errors import WeightsError
from knowgate.files import cache_dir

# package -> (import name, extra): what each optional capability stands on
OPTIONAL = {
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
        Path | None, typer.Option(parser=path, metavar="FILE", help="With --serve: the config file it would have.")
    ] = None,
) -> None:
    """Check packages, weights, cache and GPU; say what to type where something is missing. Ends with a verdict."""
    findings = list(examine_serving(config) if serve else examine())
    shown = [finding for finding in findings if everything or not finding.minor]
    console = plain_console()
    width = max(len(finding.what) for finding in shown)
    for finding in shown:
        colour = "red" if finding.broken else "yellow" if finding.advice else "green"
        console.print(Text.assemble(f"{finding.what:<{width}}  ", (finding.state, colour)))
        if finding.advice:  # on a line of its own, to be copied whole
            console.print(f"{'':<{width}}  type: {finding.advice}")
    console.print(verdict(findings, "knowgate serve" if serve else "knowgate demo"))
    if any(finding.broken for finding in findings):
        raise typer.Exit(1)


def verdict(findings: Sequence[Finding], then: str = "knowgate demo") -> Text:
    """One line: can one begin, and with what."""
    broken = sum(finding.broken for finding in findings)
    missing = sum(bool(finding.advice) and not finding.broken for finding in findings)
    if broken:
        return Text(f"Not ready: {broken} broken. Type what stands above, then: knowgate doctor", "bold red")
    if missing:
        return Text(f"Ready but for {missing}, which you may not need. Type what stands above.", "bold yellow")
    return Text(f"All {len(findings)} checks are good. Next: {then}", "bold green")


def examine() -> Iterator[Finding]:
    yield Finding("knowgate", f"{metadata.version('knowgate')}, python {platform.python_version()}")
    for package, (module, extra) in OPTIONAL.items():
        yield _package(package, module, extra)
    for name in weights.TABLE:
        yield _weights(name)
    yield _cache()
    yield _gpu()
    yield _bench()


def _package(package: str, module: str, extra: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        return Finding(package, "not installed", f"pip install 'knowgate[{extra}]'")
    return Finding(package, metadata.version(package), minor=True)


def _weights(name: str) -> Finding:
    if not weights.is_cached(name) and not weights.lookup(name).embedded:
        return Finding(f"weights {name}", f"not fetched (optional): {weights.lookup(name).summary}", minor=True)
    if not weights.is_cached(name):
        return Finding(f"weights {name}", "not fetched yet", f"knowgate models pull {name}")
    try:
        weights.verify(name)
    except WeightsError:
        command = f"rm -r '{weights.folder(name)}' && knowgate models pull {name}"
        return Finding(f"weights {name}", "corrupted (wrong sha256)", command, broken=True)
    minor = not weights.lookup(name).embedded
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
