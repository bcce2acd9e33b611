"""`knowgate keys`: create, list and revoke the API keys of a server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import create_console, inform, print_table
from knowgate.cli.options import path_option
from knowgate.core.display import sanitize_text
from knowgate.server.auth.api_keys import add_key, read_keys, revoke_key

app = typer.Typer(help="Manage the API keys of clients of `knowgate serve --keys FILE`.", no_args_is_help=True)
DEFAULT_KEYS_FILE = Path("keys.json")
KeysFile = Annotated[Path | None, path_option("FILE", "File with hashes of API keys. Default: keys.json.", "--keys")]
Name = Annotated[str, typer.Argument(help="Name of the person or application that the key is for.")]
Rate = Annotated[int | None, typer.Option(min=1, help="Maximum requests per minute. Default: no limit.")]

Admin = Annotated[
    bool,
    typer.Option("--admin", help="Let the key open the dashboard, clear alarms and read all decisions."),
]


@app.command()
def add(name: Name, keys: KeysFile = None, rate: Rate = None, admin: Admin = False) -> None:
    """Create an API key and print it. Only its hash is stored, so the key cannot be shown again."""
    file = keys or DEFAULT_KEYS_FILE
    create_console().print(add_key(file, name, rate=rate, admin=admin), markup=False)
    message = f"The hash of the key is stored in {file}. Start the server with: knowgate serve --keys {file}"
    inform(sanitize_text(message))


@app.command("list")
def list_keys(keys: KeysFile = None) -> None:
    """List all API keys with their names, creation dates, limits and rights."""
    rows = []
    for key in read_keys(keys or DEFAULT_KEYS_FILE):
        created = time.strftime("%Y-%m-%d", time.gmtime(key.created))
        rate = "" if key.rate is None else f"{key.rate:,}"
        rows.append((sanitize_text(key.name), created, rate, "yes" if key.admin else ""))
    print_table(("name", "created", "requests per minute", "admin"), rows)


@app.command()
def revoke(name: Name, keys: KeysFile = None) -> None:
    """Revoke an API key. Running servers reject it from the next request on."""
    revoke_key(keys or DEFAULT_KEYS_FILE, name)
    inform(sanitize_text(f"The API key of {name} is revoked."))
