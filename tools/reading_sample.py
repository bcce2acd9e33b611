"""Draw definitions or messages at random from several code bases, shuffled, for a blind reading.

    python -m tools.reading_sample definitions 11 30 ours=src/knowgate other=DIR > sample.md
    python -m tools.reading_sample messages 11 30 ours=src/knowgate other=DIR > sample.md

The reader sees no file names and marks each item 1 (clear at first reading), 2 (had to read twice) or 3 (not understood
without more context). Which item came from which code base is written to `sample.key.json`.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

LONGEST_DEFINITION = 60  # lines; longer ones are not drawn
SHOWN_LINES = 25
SHORTEST_MESSAGE = 4  # words
HELP_KEYWORDS = ("help", "description")
HELP_CALLS = ("Doc", "Field", "Option", "Argument", "Typer", "command")
HELP_POSITIONS = {"Doc": 0, "option": 1, "path_option": 1, "path_argument": 1}  # arguments that are help texts


def definitions(tree: ast.Module, text: str) -> Iterator[str]:
    """Yield functions and classes with a docstring, cut to their first lines."""
    lines = text.splitlines()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and ast.get_docstring(node):
            end = node.end_lineno or node.lineno
            if SHORTEST_MESSAGE <= end - node.lineno + 1 <= LONGEST_DEFINITION:
                yield "\n".join(lines[node.lineno - 1 : min(end, node.lineno + SHOWN_LINES - 1)])


def messages(tree: ast.Module, text: str) -> Iterator[str]:
    """Yield texts of raised errors and of options. Inserted values are shown as {name}."""
    for node in ast.walk(tree):
        for part in [*_error_texts(node), *_help_texts(node)]:
            message = _render(part)
            if message and len(message.split()) >= SHORTEST_MESSAGE:
                yield " ".join(message.split())


def _error_texts(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return [*node.exc.args, *(keyword.value for keyword in node.exc.keywords)]
    return []


def _help_texts(node: ast.AST) -> list[ast.expr]:
    if not isinstance(node, ast.Call):
        return []
    function = ast.unparse(node.func).split(".")[-1]
    if function in HELP_POSITIONS:
        position = HELP_POSITIONS[function]
        return node.args[position : position + 1]
    if function not in HELP_CALLS:
        return []
    return [keyword.value for keyword in node.keywords if keyword.arg in HELP_KEYWORDS]


def _render(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        pieces = [
            _render(value) if isinstance(value, ast.Constant) else f"{{{ast.unparse(getattr(value, 'value', value))}}}"
            for value in node.values
        ]
        return "".join(pieces)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _render(node.left) + _render(node.right)
    return ""


KINDS: dict[str, Callable[[ast.Module, str], Iterator[str]]] = {"definitions": definitions, "messages": messages}


def read_items(folder: Path, kind: str) -> list[str]:
    """Return all items of one kind in a code base, without its tests."""
    items: list[str] = []
    for path in sorted(folder.rglob("*.py")):
        if {"test", "tests"} & set(path.relative_to(folder).parts):
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            items += KINDS[kind](ast.parse(text), text)
        except SyntaxError:
            continue
    return items


def main() -> None:
    """Print the shuffled sample and write its key."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("kind", choices=KINDS, help="what to draw")
    parser.add_argument("seed", type=int, help="random seed")
    parser.add_argument("count", type=int, help="items per code base")
    parser.add_argument("sources", nargs="+", metavar="NAME=DIR", help="code bases")
    parser.add_argument("--key", type=Path, default=Path("sample.key.json"), help="file for the key")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    sample: list[tuple[str, str]] = []
    for source in options.sources:
        name, _, folder = source.partition("=")
        items = read_items(Path(folder), options.kind)
        sample += [(name, item) for item in rng.sample(items, min(options.count, len(items)))]
    rng.shuffle(sample)
    for number, (_, item) in enumerate(sample):
        sys.stdout.write(f"### {number}\n```\n{item}\n```\n\n")
    options.key.write_text(json.dumps([name for name, _ in sample]), encoding="utf-8")


if __name__ == "__main__":
    main()
