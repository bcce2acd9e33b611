"""One HTML file that needs nothing else: plotly's JavaScript is in it, and no other script can run."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata, resources

from knowgate.errors import MissingExtra
from knowgate.markup import escape
from knowgate.report import markup


def whole_page(title: str, about: str, body: Sequence[str]) -> str:
    """A page of these sections, with the script that draws their charts."""
    (library, library_hash), (drawing, drawing_hash) = markup.script(plotly_js()), markup.script(_piece("page.js"))
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; font-src data:"
    joined = "\n".join(body)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}; script-src {library_hash} {drawing_hash}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}: {escape(about)}</title>
<style>{_piece("page.css")}</style>
</head>
<body>
<header><h1>{escape(title)}</h1><p>{escape(about)} · knowgate {metadata.version("knowgate")}</p></header>
<noscript><p class="remark">The charts need JavaScript; the tables hold their main numbers.</p></noscript>
<main>
{joined}
</main>
{library}
{drawing}
</body>
</html>
"""


def plotly_js() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise MissingExtra("the HTML report", "report") from None
    return str(get_plotlyjs())


def _piece(name: str) -> str:
    return (resources.files("knowgate.report") / "assets" / name).read_text(encoding="utf-8")
