"""The page of gates: the table they are chosen from, and the docstring of each gate's class. Imports no gate."""

from __future__ import annotations

import ast
import re

from knowgate.core.registry import RegistryEntry
from knowgate.gates import FITTED_GATES, GATES
from tools import structure


def markdown() -> str:
    """The table of all gates, then a section for each."""
    plain = [_section(name, entry) for name, entry in GATES.items()]
    fitted = [f"{_section(name, entry)}\n\n{_fit_hint(name)}" for name, entry in FITTED_GATES.items()]
    return "\n\n".join(
        [render_gate_table(), "## Gates that work as they are", *plain, "## Gates that are fitted first", *fitted]
    )


def _section(name: str, entry: RegistryEntry) -> str:
    return f"### {name}\n\n{docstring(entry)}"


def _fit_hint(name: str) -> str:
    return f"To fit it, see `knowgate fit {name} --help`."


def docstring(entry: RegistryEntry) -> str:
    """The docstring of a gate's class without its `Args:` and `Example:` sections."""
    module, _, name = entry.target.partition(":")
    classes = [node for node in structure.tree(structure.modules()[module]).body if isinstance(node, ast.ClassDef)]
    text = next(ast.get_docstring(node) or "" for node in classes if node.name == name)
    return re.split(r"\n\s*(?:Args|Attributes|Examples?|Returns|Raises):", text)[0]


def render_gate_table() -> str:
    """Render a Markdown table of all gates: when they retrieve, what they need and what they cost."""
    header = ("gate", "retrieves when", "needs", "extra cost", "reference")
    entries = {f"`{name}`": entry for name, entry in GATES.items()}
    entries |= {f"`{name}` (fitted)": entry for name, entry in FITTED_GATES.items()}
    rows = [
        (name, entry.summary, entry.needs or "-", entry.cost, entry.paper or "-") for name, entry in entries.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows))
