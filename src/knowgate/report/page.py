"""One HTML file that needs nothing else: style and script are in it, and no other script can run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from knowgate.markup import escape
from knowgate.report import markup
from knowgate.version import VERSION


def whole_page(title: str, about: str, body: Sequence[str]) -> str:
    """A page of these parts. Its policy lets nothing be fetched and no script run but its own."""
    script, script_hash = markup.script(_piece("page.js"))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {script_hash}"
    joined = "\n".join(part for part in body if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: {escape(about)}</title>
<style>{_piece("page.css")}</style>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header><h1>{escape(title)}</h1><p>{markup.text(about)}</p></header>
<main id="main">
{joined}
</main>
<footer><p>Made by knowgate {VERSION}. This file is complete: it fetches nothing.</p></footer>
{script}
</body>
</html>
"""


def _piece(name: str) -> str:
    return (resources.files("knowgate.report") / "assets" / name).read_text(encoding="utf-8")
