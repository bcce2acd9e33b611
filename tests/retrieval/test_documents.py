from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from knowgate.errors import BadInput
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
