"""The mkdocs hook: fill the marked places of the pages with text generated from the code.

A page writes `<!-- from code: gates -->` where a generated section belongs, and `<!-- example: docs/examples/FILE -->`
where a file is shown.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

from mkdocs.exceptions import PluginError

from tools import structure
from tools.docs import commands, gate_sections, reference, savings, settings_table

MARKER = re.compile(r"<!-- (from code|example): (.+?) -->")
SECTIONS: Mapping[str, Callable[[], str]] = {
    "commands": commands.markdown,
    "gates": gate_sections.markdown,
    "layers": structure.layer_table,
    "measures": structure.measure_table,
    "names": reference.markdown,
    "savings": savings.markdown,
    "settings": settings_table.markdown,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace every marker of a page; mkdocs calls this."""
    return MARKER.sub(lambda marker: _content(marker[1], marker[2]), markdown)


def _content(kind: str, name: str) -> str:
    if kind == "example":
        return _example(name)
    if name not in SECTIONS:
        raise PluginError(f"unknown section '{name}'. Known: {', '.join(SECTIONS)}.")
    return SECTIONS[name]()


def _example(file: str) -> str:
    if not (ROOT / file).is_file():
        raise PluginError(f"the example '{file}' does not exist.")
    return f"```python\n{(ROOT / file).read_text(encoding='utf-8').strip()}\n```"
