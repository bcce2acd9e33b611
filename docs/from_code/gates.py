"""The gates: the table they are chosen from, and what each says of itself in its docstring. Imports no gate."""

from __future__ import annotations

import ast
import re

from tests.support import house

from docs.from_code.docstrings import as_markdown
from knowgate.core.registry import RegistryEntry
from knowgate.gates import FITTED_GATES, GATES, render_gate_table


def markdown() -> str:
    plain = [_section(name, entry) for name, entry in GATES.items()]
    fitted = [f"{_section(name, entry)}\n\n{_how(name)}" for name, entry in FITTED_GATES.items()]
    parts = [render_gate_table(), "## Gates that work as they are", *plain, "## Gates that are fitted first", *fitted]
    return "\n\n".join(parts)


def _section(name: str, entry: RegistryEntry) -> str:
    return f"### {name}\n\n{as_markdown(docstring(entry))}"


def _how(name: str) -> str:
    return f"`knowgate fit {name} --help` shows how it is fitted."


def docstring(entry: RegistryEntry) -> str:
    """Of the gate's class, without its example."""
    module, _, name = entry.target.partition(":")
    classes = [node for node in house.tree(house.modules()[module]).body if isinstance(node, ast.ClassDef)]
    text = next(ast.get_docstring(node) or "" for node in classes if node.name == name)
    return re.split(r"\n\s*Example:", text)[0]
