from __future__ import annotations

import contextlib
import gzip
import os
import sys
from pathlib import Path

import pytest

from knowgate.errors import BadInput
from knowgate.retrieval.documents import MAX_DOCUMENT_BYTES, Document, find_documents


def read_only_document(folder: Path) -> Document:
    (document,) = find_documents(folder)
    return document


def test_files_are_read_sorted_by_path_and_hidden_files_are_skipped(tmp_path: Path):
    for name in ["b.txt", "a/z.md", ".secret.txt", ".git/x.txt", "a.txt"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("some text")
    assert [document.id for document in find_documents(tmp_path)] == ["a.txt", "a/z.md", "b.txt"]


def test_files_with_other_suffixes_are_counted_as_skipped(tmp_path: Path):
    for name in ["a.txt", "b.docx", "c.DOCX", "Makefile"]:
        (tmp_path / name).write_text("some text")
    assert find_documents(tmp_path).skipped == {".docx": 2, "Makefile": 1}


def test_the_title_of_markdown_is_its_first_heading(tmp_path: Path):
    (tmp_path / "a.md").write_text("intro\n\n## Setting up ##\n\ntext")
    assert read_only_document(tmp_path).title == "Setting up"


def test_the_title_of_plain_text_is_the_file_name(tmp_path: Path):
    (tmp_path / "handbook.txt").write_text("# not markdown")
    assert read_only_document(tmp_path).title == "handbook"


def test_a_byte_order_mark_and_windows_line_ends_are_removed(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    assert read_only_document(tmp_path).text == "one\ntwo"


@pytest.mark.parametrize("data", [b"abc\0def", b"\xff\xfe\xfa"])
def test_a_binary_file_with_a_text_suffix_is_a_problem(tmp_path: Path, data: bytes):
    (tmp_path / "photo.txt").write_bytes(data)
    assert "photo.txt" in read_only_document(tmp_path).problem


def test_a_missing_folder_is_an_error(tmp_path: Path):
    with pytest.raises(BadInput, match=r"there is no folder or file '.*nowhere'"):
        find_documents(tmp_path / "nowhere")


def test_a_folder_without_documents_lists_the_supported_suffixes(tmp_path: Path):
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(BadInput, match=r"\.txt, \.md, \.html, \.htm, \.pdf"):
        find_documents(tmp_path)


def test_a_single_file_that_is_not_jsonl_is_an_error(tmp_path: Path):
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(BadInput, match=r"\.jsonl or \.jsonl\.gz"):
        find_documents(tmp_path / "a.csv")


def test_an_unreadable_file_does_not_stop_the_others(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\0")
    (tmp_path / "b.txt").write_text("one")
    first, second = find_documents(tmp_path)
    assert (first.text, second) == ("", Document("b.txt", "b", "one"))


def test_a_file_above_the_size_limit_is_a_problem(tmp_path: Path):
    with (tmp_path / "a.txt").open("wb") as file:
        file.truncate(MAX_DOCUMENT_BYTES + 1)
    assert "are allowed. Split it." in read_only_document(tmp_path).problem


@pytest.mark.parametrize(
    "charset", ["undefined", "punycode", "idna", "rot13", "zlib", "nosuch", "unicode_escape", "x" * 900]
)
def test_a_page_in_an_unknown_character_set_is_a_problem(tmp_path: Path, charset: str):
    (tmp_path / "a.html").write_text(f"<meta charset={charset}><p>x")
    assert "unknown character set" in read_only_document(tmp_path).problem


DEPTH = sys.getrecursionlimit() + 50


def test_a_folder_nested_deeper_than_the_recursion_limit_is_read(tmp_path: Path):
    deepest = tmp_path.joinpath(*["d"] * DEPTH)
    with contextlib.chdir(tmp_path):
        for _ in range(DEPTH):
            Path("d").mkdir(exist_ok=True)
            os.chdir("d")
        Path("a.txt").write_text("deep")
    document = read_only_document(tmp_path)
    assert (document.text, document.id.count("/")) == ("deep", DEPTH)
    (deepest / "a.txt").unlink()
    os.removedirs(deepest)  # what clears up after tests is recursive


def test_links_to_files_outside_the_folder_are_not_followed(tmp_path: Path):
    docs = tmp_path / "docs"
    (docs / "sub").mkdir(parents=True)
    (tmp_path / "secret.txt").write_text("secret")
    (docs / "a.txt").write_text("text")
    (docs / "sub" / "inside.txt").symlink_to(Path("..") / "a.txt")
    (docs / "sub" / "outside.txt").symlink_to(Path("..") / ".." / "secret.txt")
    (docs / "chain.txt").symlink_to(docs / "sub" / "outside.txt")
    (tmp_path / "linked").symlink_to(docs)  # the folder itself may be a link
    for folder in (docs, tmp_path / "linked"):
        corpus = find_documents(folder)
        assert [document.id for document in corpus] == ["a.txt", "sub/inside.txt"]
        assert set(corpus.problems) == {"chain.txt", "sub/outside.txt"}
        assert "outside the folder" in corpus.problems["chain.txt"]


def test_pipes_devices_and_broken_links_are_problems_and_never_opened(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "dangling.md").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle.md").symlink_to(tmp_path / "circle.md")
    (tmp_path / "again").symlink_to(tmp_path)
    (tmp_path / "a.txt").write_text("one")
    corpus = find_documents(tmp_path)
    assert [document.id for document in corpus] == ["a.txt"]
    assert set(corpus.problems) == {"pipe.txt", "dangling.md", "circle.md"}


def test_a_pipe_instead_of_a_jsonl_file_is_an_error(tmp_path: Path):
    os.mkfifo(tmp_path / "d.jsonl")
    with pytest.raises(BadInput, match="not a regular file"):
        find_documents(tmp_path / "d.jsonl")


def test_file_names_that_are_not_utf8_stay_distinct(tmp_path: Path):
    for name in (b"a\xff.txt", b"a\xfe.txt", b" a.txt", b"a\n.txt", b"a\r.txt"):
        Path(os.fsdecode(bytes(tmp_path) + b"/" + name)).write_text("one")
    assert len({document.id for document in find_documents(tmp_path)}) == 5


# --- records ---


def test_records_may_have_numeric_ids_and_no_title(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"id": 7, "text": "one"}\n\n{"id": "b", "title": "T", "text": "two"}\n')
    assert list(find_documents(path)) == [Document("7", "", "one"), Document("b", "T", "two")]


def test_gzipped_records_are_read(tmp_path: Path):
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress('{"id": "a", "text": "北京"}\n'.encode()))
    assert list(find_documents(path)) == [Document("a", "", "北京")]


def test_lone_surrogates_are_replaced(tmp_path: Path):
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
        ('{"id": "a", "text": "again"}', "have the same id 'a'"),
    ],
)
def test_an_invalid_record_is_an_error_with_its_line_number(tmp_path: Path, line: str, message: str):
    path = tmp_path / "d.jsonl"
    path.write_text('{"id": "a", "text": "one"}\n' + line + "\n")
    with pytest.raises(BadInput, match=message):
        list(find_documents(path))


def test_a_truncated_gzip_file_is_an_error(tmp_path: Path):
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"id": "a", "text": "one"}\n')[:-9])
    with pytest.raises(BadInput, match="not a complete gzip"):
        list(find_documents(path))
