"""Wrong usage, as typer reports it, in one sentence each.

typer brings its own copy of click, so what `import click` names would match nothing that typer raises: the class is
taken from typer itself.
"""

from __future__ import annotations

from typing import Any

import typer

CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]  # BadParameter < UsageError < ClickException


def explain(error: Any) -> tuple[str, int]:
    """(sentence, exit code) for an error of typer's."""
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        return _unknown_option(error), 1
    sentence = " ".join(error.format_message().split()).rstrip(".")
    context = getattr(error, "ctx", None)
    known = ", ".join(getattr(context.command, "commands", ())) if context else ""
    hint = f"Known: {known}." if known else f"See: {context.command_path if context else 'knowgate'} --help"
    return f"{sentence}. {hint}", 2


def _unknown_option(error: Any) -> str:
    command = error.ctx.command if error.ctx else None
    listed = sorted(name for param in (command.params if command else ()) for name in param.opts)
    known = ", ".join(name for name in [*listed, "--help"] if name.startswith("--"))
    return f"unknown option '{error.option_name}'. Known: {known}."
