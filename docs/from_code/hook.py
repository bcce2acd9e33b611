"""What mkdocs calls while it builds: fills marked places of the pages, and adds a page for each package.

A page says `<!-- from code: gates -->` where a part belongs, and `PARTS` says who makes it;
`<!-- example: docs/examples/FILE -->` shows a file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # mkdocs runs this file alone

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from tests.support import house

from docs.from_code import api, commands, gates, settings

MARKER = re.compile(r"<!-- (from code|example): (.+?) -->")
PARTS: Mapping[str, Callable[[], str]] = {
    "commands": commands.markdown,
    "figures": house.figure_table,
    "gates": gates.markdown,
    "layers": house.layer_table,
    "names": api.public_names,
    "settings": settings.markdown,
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """The pages of the packages come last in the list of pages."""
    packages = [{name: f"packages/{name}.md"} for name in api.packages()]
    config.nav = [*(config.nav or []), {"Packages": packages}]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    handler = config.plugins["mkdocstrings"].get_handler("python")  # reads all of the source, which takes ten seconds
    api.use_source(handler.collect("knowgate", handler.get_options({})))
    for name in api.packages():
        files.append(File.generated(config, f"packages/{name}.md", content=api.package_page(name)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARKER.sub(lambda marker: FILLED[marker[1]](marker[2]), markdown)


def made(part: str) -> str:
    if part not in PARTS:
        raise PluginError(f"no part of the documentation is called '{part}'. Known: {', '.join(PARTS)}.")
    return PARTS[part]()


def shown(file: str) -> str:
    if not (ROOT / file).is_file():
        raise PluginError(f"there is no example '{file}'.")
    return f"```python\n{(ROOT / file).read_text(encoding='utf-8').strip()}\n```"


FILLED: Mapping[str, Callable[[str], str]] = {"from code": made, "example": shown}
