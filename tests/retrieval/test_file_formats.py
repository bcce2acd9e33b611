from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

from knowgate.errors import BadInput, MissingExtra
from knowgate.retrieval.documents import Document, find_documents
from knowgate.retrieval.file_formats import read_pdf
from tests.support.extras import needs_pdf


def read_only_document(folder: Path) -> Document:
    (document,) = find_documents(folder)
    return document


def write_pdf(path: Path, text: str, password: str = "") -> None:
    pypdf = pytest.importorskip("pypdf")
    names = importlib.import_module("pypdf.generic")
    writer = pypdf.PdfWriter()
    page = writer.add_blank_page(200, 200)
    font = names.DictionaryObject(
        {
            names.NameObject("/Type"): names.NameObject("/Font"),
            names.NameObject("/Subtype"): names.NameObject("/Type1"),
            names.NameObject("/BaseFont"): names.NameObject("/Helvetica"),
        }
    )
    fonts = names.DictionaryObject({names.NameObject("/F1"): font})
    page[names.NameObject("/Resources")] = names.DictionaryObject({names.NameObject("/Font"): fonts})
    stream = names.DecodedStreamObject()
    stream.set_data(f"BT /F1 12 Tf 10 100 Td ({text}) Tj ET".encode())
    page[names.NameObject("/Contents")] = writer._add_object(stream)
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    with path.open("wb") as file:
        writer.write(file)


def test_a_pdf_has_its_file_name_as_title(tmp_path: Path):
    write_pdf(tmp_path / "manual.pdf", "Hello from a page")
    assert read_only_document(tmp_path) == Document("manual.pdf", "manual", "Hello from a page")


@needs_pdf
def test_a_broken_pdf_is_a_problem(tmp_path: Path):
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4 and then nothing")
    assert "bad.pdf cannot be read as PDF" in read_only_document(tmp_path).problem


def test_an_encrypted_pdf_is_a_problem(tmp_path: Path):
    write_pdf(tmp_path / "locked.pdf", "secret", password="x")
    assert "locked.pdf cannot be read as PDF: it is encrypted" in read_only_document(tmp_path).problem


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pdf_that_takes_too_long_is_an_error_and_the_next_one_is_read(tmp_path: Path):
    write_pdf(tmp_path / "a.pdf", "Hello")
    os.mkfifo(tmp_path / "endless.pdf")  # nobody writes to it, so that reading it never ends
    with pytest.raises(BadInput, match=r"took longer than 0\.1 seconds"):
        read_pdf(tmp_path / "endless.pdf", timeout=0.1)
    assert read_pdf(tmp_path / "a.pdf") == "Hello"


def test_a_pdf_without_pypdf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(MissingExtra, match=r"knowgate\[pdf\]"):
        list(find_documents(tmp_path))


def test_html_keeps_title_and_paragraphs_and_drops_scripts(tmp_path: Path):
    (tmp_path / "a.html").write_text(
        "<html><head><title>A &amp; B</title><style>p {}</style></head><body><h1>Head</h1>"
        "<p>One <b>two</b>\nthree.</p><script>alert('no')</script><ul><li>x</li><li>y</li></ul></body></html>"
    )
    document = read_only_document(tmp_path)
    assert document.title == "A & B"
    assert document.text == "Head\n\nOne two three.\n\nx\n\ny"


def test_html_is_decoded_with_its_declared_character_set(tmp_path: Path):
    (tmp_path / "a.htm").write_bytes('<meta charset="gb18030"><p>北京</p>'.encode("gb18030"))
    assert read_only_document(tmp_path).text == "北京"
