"""`knowgate keys`: the API keys of a server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import STDERR_CONSOLE, create_console, print_table
from knowgate.cli.options import parse_path
from knowgate.core.display import sanitize_text
from knowgate.server.auth.api_keys import add_key, read_keys, revoke_key

app = typer.Typer(help="API keys of `knowgate serve --keys FILE`.", no_args_is_help=True)
KeysFile = Annotated[
    Path | None,
    typer.Option(
        "--keys", parser=parse_path, metavar="FILE", help="The file of keys; it holds hashes only. Default keys.json."
    ),
]
Name = Annotated[str, typer.Argument(help="Whose key it is.")]
DEFAULT_KEYS_FILE = Path("keys.json")


Rate = Annotated[int | None, typer.Option(min=1, help="Requests a minute; one more is answered 429.")]
Budget = Annotated[int | None, typer.Option(min=1, help="Tokens a day (UTC); after that requests are answered 429.")]


@app.command()
def add(name: Name, keys: KeysFile = None, rate: Rate = None, budget: Budget = None) -> None:
    """Make a key and print it. It is shown this once."""
    file = keys or DEFAULT_KEYS_FILE
    create_console().print(add_key(file, name, rate=rate, budget=budget), markup=False)
    STDERR_CONSOLE.print(
        sanitize_text(f"Kept in {file} as a hash. Serve with it: knowgate serve --keys {file}"), markup=False
    )


@app.command("list")
def list_(keys: KeysFile = None) -> None:
    """Say whose keys there are."""
    rows = [
        (
            sanitize_text(key.name),
            time.strftime("%Y-%m-%d", time.gmtime(key.created)),
            _most(key.rate),
            _most(key.budget),
        )
        for key in read_keys(keys or DEFAULT_KEYS_FILE)
    ]
    print_table(("name", "made", "requests a minute", "tokens a day"), rows)


def _most(limit: int | None) -> str:
    return "" if limit is None else f"{limit:,}"


@app.command()
def revoke(name: Name, keys: KeysFile = None) -> None:
    """Make a key worthless; a running server refuses it from then on."""
    revoke_key(keys or DEFAULT_KEYS_FILE, name)
    STDERR_CONSOLE.print(sanitize_text(f"The key of {name} is revoked."), markup=False)
