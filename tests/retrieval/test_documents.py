from __future__ import annotations

import contextlib
import gzip
import os
from pathlib import Path

import pytest

from knowgate.errors import BadInput
from knowgate.retrieval.documents import MAX_DOCUMENT_BYTES, Document, find_documents


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
    assert "photo.txt" in one(tmp_path).problem


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


def test_a_file_that_cannot_be_read_leaves_the_others(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\0")
    (tmp_path / "b.txt").write_text("one")
    first, second = find_documents(tmp_path)
    assert (first.text, second) == ("", Document("b.txt", "b", "one"))


def test_a_file_beyond_the_limit_is_named_and_not_read(tmp_path: Path):
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(MAX_DOCUMENT_BYTES + 1)
    assert "a document may have" in one(tmp_path).problem


@pytest.mark.parametrize(
    "charset", ["undefined", "punycode", "idna", "rot13", "zlib", "nosuch", "unicode_escape", "x" * 900]
)
def test_a_page_in_no_character_set_is_named(tmp_path: Path, charset: str):
    (tmp_path / "a.html").write_text(f"<meta charset={charset}><p>x")
    assert "unknown character set" in one(tmp_path).problem


def test_a_folder_nested_1500_deep_is_read(tmp_path: Path):
    deepest = tmp_path.joinpath(*["d"] * 1500)
    with contextlib.chdir(tmp_path):
        for _ in range(1500):
            Path("d").mkdir(exist_ok=True)
            os.chdir("d")
        Path("a.txt").write_text("deep")
    document = one(tmp_path)
    assert (document.text, document.id.count("/")) == ("deep", 1500)
    (deepest / "a.txt").unlink()
    os.removedirs(deepest)  # what clears up after tests is recursive


def test_what_is_no_ordinary_file_is_named_and_never_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "dangling.md").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle.md").symlink_to(tmp_path / "circle.md")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "a.txt").write_text("one")
    corpus = find_documents(tmp_path)
    assert [document.id for document in corpus] == ["a.txt"]
    assert set(corpus.problems) == {"pipe.txt", "dangling.md", "circle.md"}


def test_a_pipe_in_the_place_of_records_is_refused(tmp_path: Path):
    os.mkfifo(tmp_path / "d.jsonl")
    with pytest.raises(BadInput, match="not a regular file"):
        find_documents(tmp_path / "d.jsonl")


def test_names_that_are_no_text_stay_apart(tmp_path: Path):
    for name in (b"a\xff.txt", b"a\xfe.txt", b" a.txt", b"a\n.txt", b"a\r.txt"):
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_text("one")
    assert len({document.id for document in find_documents(tmp_path)}) == 5


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
    with pytest.raises(BadInput, match="not a complete gzip"):
        list(find_documents(path))
