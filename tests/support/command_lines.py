"""Shell lines as documentation shows them, taken apart and held against the real commands. Runs none of them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from knowgate.cli.main import app

BETWEEN = {"|", "||", "&&", ";", "&"}
REDIRECTIONS = {"<", ">", ">>"}


def programs(text: str) -> Iterator[list[str]]:
    """The words of each program in a block of shell lines: `a | b > c` gives those of a and of b."""
    for line in text.replace("\\\n", " ").splitlines():
        yield from _programs(_words(line.removeprefix("$ ")))


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split, lexer.commenters = True, "#"
    return list(lexer)


def _programs(words: Sequence[str]) -> Iterator[list[str]]:
    current: list[str] = []
    skip = False
    for word in [*words, ";"]:
        if word in BETWEEN:
            if current:
                yield current
            current = []
        elif skip or word in REDIRECTIONS:
            skip = not skip
        else:
            current.append(word)


def root() -> Any:
    """The command `knowgate`; to make it takes half a second."""
    return typer.main.get_command(app)


def is_group(node: Any) -> bool:
    return callable(getattr(node, "list_commands", None))


def check(top: Any, words: Sequence[str]) -> None:
    """Parse as the command line would; whatever it would refuse is raised. Old names of options are refused too."""
    _parse(top, "knowgate", list(words), None)


def _parse(node: Any, name: str, words: list[str], parent: Any) -> None:
    _refuse_hidden(node, words)
    try:
        context = node.make_context(name, list(words), parent=parent)
    except typer.Exit:  # --help and --version are done after parsing
        return
    if is_group(node) and (rest := [*getattr(context, "_protected_args", []), *context.args]):
        child_name, child, left = node.resolve_command(context, rest)
        _parse(child, child_name, left, context)


def _refuse_hidden(node: Any, words: Sequence[str]) -> None:
    hidden = {name for param in node.params if getattr(param, "hidden", False) for name in param.opts}
    old = [word for word in words if word.split("=")[0] in {*hidden, *getattr(node, "renamed", ())}]
    assert not old, f"{old} are old names"


def check_names(top: Any, words: Sequence[str]) -> None:
    """For a mention such as `knowgate index SOURCE --out DIR`: the command and its options exist."""
    node, context = top, top.context_class(top)
    for word in words:
        child = node.get_command(context, word) if is_group(node) and re.fullmatch(r"[a-z][a-z-]*", word) else None
        if child is None and is_group(node) and not word.startswith("-"):
            raise AssertionError(f"knowgate has no command '{word}'")
        if child is None:
            break
        node, context = child, child.context_class(child, parent=context)
    named = {name for param in node.params for name in [*param.opts, *param.secondary_opts]} | {"--help"}
    unknown = [word for word in words if word.startswith("--") and word not in named]
    assert not unknown, f"{' '.join(words)}: unknown {unknown}"
