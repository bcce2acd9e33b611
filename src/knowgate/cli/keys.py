"""`knowgate keys`: the API keys of a server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import WORDS, plain_console
from knowgate.cli.paths import path
from knowgate.cli.tables import print_table
from knowgate.display import harmless
from knowgate.server import add_key, read_keys, revoke_key

app = typer.Typer(help="API keys of `knowgate serve --keys FILE`.", no_args_is_help=True)
KeysFile = Annotated[
    Path | None,
    typer.Option(
        "--keys", parser=path, metavar="FILE", help="The file of keys; it holds hashes only. Default keys.json."
    ),
]
Name = Annotated[str, typer.Argument(help="Whose key it is.")]
DEFAULT = Path("keys.json")


Rate = Annotated[int | None, typer.Option(min=1, help="Requests a minute; one more is answered 429.")]
Budget = Annotated[int | None, typer.Option(min=1, help="Tokens a day (UTC); after that requests are answered 429.")]


@app.command()
def add(name: Name, keys: KeysFile = None, rate: Rate = None, budget: Budget = None) -> None:
    """Make a key and print it. It is shown this once."""
    file = keys or DEFAULT
    plain_console().print(add_key(file, name, rate=rate, budget=budget), markup=False)
    WORDS.print(harmless(f"Kept in {file} as a hash. Serve with it: knowgate serve --keys {file}"), markup=False)


@app.command("list")
def list_(keys: KeysFile = None) -> None:
    """Say whose keys there are."""
    rows = [
        (harmless(key.name), time.strftime("%Y-%m-%d", time.gmtime(key.created)), _most(key.rate), _most(key.budget))
        for key in read_keys(keys or DEFAULT)
    ]
    print_table(("name", "made", "requests a minute", "tokens a day"), rows)


def _most(limit: int | None) -> str:
    return "" if limit is None else f"{limit:,}"


@app.command()
def revoke(name: Name, keys: KeysFile = None) -> None:
    """Make a key worthless; a running server refuses it from then on."""
    revoke_key(keys or DEFAULT, name)
    WORDS.print(harmless(f"The key of {name} is revoked."), markup=False)
