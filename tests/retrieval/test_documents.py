from __future__ import annotations

import gzip
import importlib
import sys
from pathlib import Path

import pytest

from knowgate.errors import BadInput, MissingExtra
from knowgate.retrieval.documents import Document, find_documents


def one(folder: Path) -> Document:
    (document,) = find_documents(folder)
    return document


def test_a_folder_is_read_in_the_order_of_paths_without_hidden_files(tmp_path: Path):
    for name in ["b.txt", "a/z.md", ".secret.txt", ".git/x.txt", "a.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("some text")
    assert [document.id for document in find_documents(tmp_path)] == ["a.txt", "a/z.md", "b.txt"]


def test_files_of_other_suffixes_are_counted_not_fatal(tmp_path: Path):
    for name in ["a.txt", "b.docx", "c.DOCX", "Makefile"]:
        (tmp_path / name).write_text("some text")
    assert find_documents(tmp_path).skipped == {".docx": 2, "Makefile": 1}


def test_the_title_of_markdown_is_its_first_heading(tmp_path: Path):
    (tmp_path / "a.md").write_text("intro\n\n## Setting up ##\n\ntext")
    assert one(tmp_path).title == "Setting up"


def test_the_title_of_plain_text_is_the_stem(tmp_path: Path):
    (tmp_path / "handbook.txt").write_text("# not markdown")
    assert one(tmp_path).title == "handbook"


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


def test_a_byte_order_mark_and_windows_line_ends_vanish(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert one(tmp_path).text == "one\ntwo"


@pytest.mark.parametrize("data", [b"abc\0def", b"\xff\xfe\xfa"])
def test_a_binary_file_that_calls_itself_text_is_named(tmp_path: Path, data: bytes):
    (tmp_path / "photo.txt").write_bytes(data)
    with pytest.raises(BadInput, match=r"photo\.txt"):
        list(find_documents(tmp_path))


def test_a_missing_folder_is_named(tmp_path: Path):
    with pytest.raises(BadInput, match=r"there is no folder or file '.*nowhere'"):
        find_documents(tmp_path / "nowhere")


def test_a_folder_without_documents_says_what_is_read(tmp_path: Path):
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(BadInput, match=r"\.txt, \.md, \.html, \.htm, \.pdf"):
        find_documents(tmp_path)


def test_a_single_file_of_another_kind_is_refused(tmp_path: Path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(BadInput, match=r"\.jsonl or \.jsonl\.gz"):
        find_documents(tmp_path / "a.csv")


# --- records ---


def test_records_are_read_with_numbers_as_ids_and_titles_left_out(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"id": 7, "text": "one"}\n\n{"id": "b", "title": "T", "text": "two"}\n')
    assert list(find_documents(path)) == [Document("7", "", "one"), Document("b", "T", "two")]


def test_packed_records_are_read(tmp_path: Path):
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress('{"id": "a", "text": "北京"}\n'.encode()))
    assert list(find_documents(path)) == [Document("a", "", "北京")]


def test_half_a_character_is_replaced(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"id": "a", "text": "x\\ud800y"}\n')
    assert next(iter(find_documents(path))).text == "x?y"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{broken", "line 2 is not valid JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"id": "b"}', "line 2 has no text"),
        ('{"id": "b", "text": "  "}', "line 2 has no text"),
        ('{"text": "b"}', "line 2 has no id"),
        ('{"id": "b", "title": 3, "text": "b"}', "line 2 has a title that is not a string"),
        ('{"id": "a", "text": "again"}', "have the id 'a'"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "d.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n' + line + "\n")
    with pytest.raises(BadInput, match=message):
        list(find_documents(path))


def test_a_cut_off_gzip_file_is_named(tmp_path: Path):
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "a", "text": "one"}\n')[:-9])
    with pytest.raises(BadInput, match="broken gzip"):
        list(find_documents(path))


# --- PDF ---


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


def test_a_pdf_is_read_with_its_stem_as_title(tmp_path: Path):
    write_pdf(tmp_path / "manual.pdf", "Hello from a page")
    assert one(tmp_path) == Document("manual.pdf", "manual", "Hello from a page")


def test_a_broken_pdf_is_named(tmp_path: Path):
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4 and then nothing")
    with pytest.raises(BadInput, match=r"bad\.pdf cannot be read as PDF"):
        list(find_documents(tmp_path))


def test_a_pdf_with_a_password_is_named(tmp_path: Path):
    write_pdf(tmp_path / "locked.pdf", "secret", password="x")
    with pytest.raises(BadInput, match=r"locked\.pdf is encrypted"):
        list(find_documents(tmp_path))


def test_a_pdf_without_pypdf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(MissingExtra, match=r"knowgate\[pdf\]"):
        list(find_documents(tmp_path))
