"""Wrong usage, as typer reports it, in one sentence each.

typer brings its own copy of click, so what `import click` names would match nothing that typer raises: the class is
taken from typer itself.
"""

from __future__ import annotations

import difflib
from typing import Any

import typer

CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]  # BadParameter < UsageError < ClickException


def explain(error: Any) -> tuple[str, int]:
    """(sentence, exit code) for an error of typer's."""
    if hasattr(error, "option_name") and hasattr(error, "possibilities"):
        return _unknown_option(error), 2
    sentence = " ".join(error.format_message().split()).rstrip(".") or "no command was named"
    sentence += "" if sentence.endswith("?") else "."
    context = getattr(error, "ctx", None)
    is_value = getattr(error, "param", None) is not None
    known = ", ".join(getattr(context.command, "commands", ())) if context and not is_value else ""
    hint = f"Known: {known}." if known else f"See: {context.command_path if context else 'knowgate'} --help"
    return f"{sentence} {hint}", 2


def _unknown_option(error: Any) -> str:
    """Says what is known and what may be meant; an old name that was mistyped leads to the new one."""
    command, name = error.ctx.command if error.ctx else None, error.option_name
    params = command.params if command else ()
    listed = sorted(opt for param in params if not getattr(param, "hidden", False) for opt in param.opts)
    known = [opt for opt in [*listed, "--help"] if opt.startswith("--")]
    meant = {**{opt: opt for opt in known if opt != "--help"}, **getattr(command, "renamed", {})}
    words = {opt.lstrip("-"): new for opt, new in meant.items()}
    near = difflib.get_close_matches(name.lstrip("-"), words, n=1)
    hint = f" Did you mean '{words[near[0]]}'?" if near else ""
    hint += getattr(command, "elsewhere", lambda option: "")(name)
    if getattr(command, "commands", None):
        hint += f" Options of a command follow its name: {error.ctx.command_path} NAME {name}."
    return f"unknown option '{name}'.{hint} Known: {', '.join(known)}."
