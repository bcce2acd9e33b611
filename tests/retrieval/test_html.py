from __future__ import annotations

from pathlib import Path

from knowgate.retrieval.documents import Document, find_documents


def one(folder: Path) -> Document:
    (document,) = find_documents(folder)
    return document


def test_html_keeps_title_and_paragraphs_and_drops_scripts(tmp_path: Path):
    (tmp_path / "a.html").write_text(
        "<html><head><title>A &amp; B</title><style>p {}</style></head><body><h1>Head</h1>"
        "<p>One <b>two</b>\nthree.</p><script>alert('no')</script><ul><li>x</li><li>y</li></ul></body></html>"
    )
    document = one(tmp_path)
    assert document.title == "A & B"
    assert document.text == "Head\n\nOne two three.\n\nx\n\ny"


def test_html_declares_its_character_set(tmp_path: Path):
    (tmp_path / "a.htm").write_bytes('<meta charset="gb18030"><p>北京</p>'.encode("gb18030"))
    assert one(tmp_path).text == "北京"
