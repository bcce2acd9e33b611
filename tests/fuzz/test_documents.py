"""Documents: pages, texts, PDF files and folders that want to break or to stop an index."""

import contextlib
import os
import re
import socket
import tempfile
import time
import zlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.core.text import _normalize_cached, normalize, parse_choice_letter
from knowgate.data.signals.vectors import truncate_words
from knowgate.labels.grading import StringGrader
from knowgate.labels.mask import mask_passages
from knowgate.models.prompts.templates import detect_language
from knowgate.papers.self_assessment import ENTITY_PATTERN
from knowgate.retrieval.chunking import split_text
from knowgate.retrieval.documents import find_documents
from knowgate.retrieval.file_formats import read_html
from knowgate.retrieval.index import build_index
from knowgate.retrieval.tokenizer import Tokenizer
from knowgate.types import Passage, Question
from tests.support.fuzz import attempt, tries, trying
from tests.support.word_counts import count_words

DOOR = "documents"
HARD = [
    *".\n \t<&'’,-#(\r\0[中。A\u3000\u0301", "!?.", "...)", "<!--", "<a '", '<a "', "<![", "<![x[", "<!", "<?", "</",
    "&#1", "&#", "&a", "1,", "a'", "A ", "A of ", "《", "“", "。”", "# ", "\n#", "\n ", "\n\n", "\n- ", "\n1", "\n1.",
    "中 ", "中a", "<script>", "<p>", "<p", "<a b=", "<a b", "<a/", "<a b='", "<a =", "//", "//a@", "\r\n", "]]>",
    "<![CDATA[", "<title>", "<script", "</script", "<template>", "<style/>", "a.b", "MASK ", "1. ", "x.\n\n", "# x\n",
    "&amp;", "\ufeff",
]  # fmt: skip
READERS = {
    "page": read_html,
    "passages": split_text,
    "passages of long texts": lambda text: split_text("word " * 300 + text + "x" + " word" * 300),
    "terms": Tokenizer(stem=False),
    "answer, normalised": normalize,
    "answer, graded": lambda text: StringGrader().grade(
        [text], [Question(text[::2], answers=(text, text[: len(text) // 2]))]
    ),
    "answer, a letter": lambda text: parse_choice_letter(text, (text, text[:9])),
    "answer, masked": lambda text: mask_passages([Passage("a", text)], [text[:300]]),
    "answer, its beginning": lambda text: truncate_words(text, 9),
    "question, its names": ENTITY_PATTERN.findall,
    "question, its language": detect_language,
}
SHAPES = (lambda text: text, lambda text: f"x {text}y", lambda text: f"# {text}\n<p>{text}")


@pytest.mark.parametrize("reader", READERS)
def test_the_time_of_reading_grows_with_the_length_of_the_text(reader):
    """Forty kilobytes at once, and where that takes long, what four times as much takes: not sixteen times as long."""
    for part in HARD[:: tries(9, 1)]:
        for shape in SHAPES[: tries(1, 3)]:
            text = shape((part * 40_000)[:40_000])
            took = seconds(reader, text)
            if took > 0.4:
                four = seconds(reader, shape((part * 160_000)[:160_000]))
                assert four / took < 8, f"{reader} of {part!r}: {took:.2f} s, then {four:.2f} s"


def seconds(reader, text):
    _normalize_cached.cache_clear()
    start = time.process_time()
    attempt(DOOR, f"40 to 160 KB of one thing, as {reader.partition(',')[0]}", lambda: READERS[reader](text))
    return time.process_time() - start


PAGES = st.lists(
    st.sampled_from([*HARD, "<p>", "</p>", "text", "=", ">", "/", '"', "é", "&lt;", "</title>", "</script>", "-->"]),
    max_size=30,
)


@trying(40, 600)
@given(PAGES.map("".join))
def test_any_page_gives_plain_text_whose_passages_hold_all_its_words(markup):
    page = attempt(DOOR, "HTML pages at random", lambda: read_html(markup)).value
    assert not re.search(r"\n\n\n|  ", page.text.replace("\u3000", ""))
    cut = split_text(page.text, 5)
    assert "".join("".join(cut).split()) == "".join(page.text.split())
    assert all(count_words(text) <= 5 for text in cut if len(text.split()) > 1)


FILES = st.dictionaries(
    st.tuples(st.sampled_from([".txt", ".md", ".html", ".pdf", ".docx"]), st.integers(0, 3)),
    st.binary(max_size=200)
    | st.text(max_size=100).map(str.encode)
    | st.sampled_from(
        [b"%PDF-1.7\n", b"<meta charset=undefined>", b"\xef\xbb\xbfone", b"<![if x]>y<![endif]>", b"\xff\xfe"]
    ),
    min_size=1,
    max_size=4,
)


@trying(8, 150)
@given(FILES)
def test_a_file_nobody_can_read_never_costs_the_others(files):
    with _folder() as folder:
        (folder / "good.txt").write_text("the good one")
        for (suffix, number), data in files.items():
            (folder / f"{number}{suffix}").write_bytes(data)
        found = attempt(DOOR, "folders of broken files", lambda: list(find_documents(folder))).value
        assert {one.id for one in found} == {"good.txt", *(f"{n}{s}" for s, n in files if s != ".docx")}
        assert "the good one" in [one.text for one in found]
        assert all(one.problem == "" or one.text == "" for one in found)


@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "dangling", "circle", "folder", "unreadable bytes"])
def test_an_index_of_odd_entries_holds_the_good_file(tmp_path, kind):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "good.txt").write_text("the good one")
    _make(docs / "odd.txt", kind)
    report = attempt(DOOR, "pipes, devices, links", lambda: build_index(docs, tmp_path / "index")).value
    assert report.documents == 1
    assert len(report.problems) == (kind != "folder")


@pytest.mark.parametrize("part", HARD[:: tries(20, 2)])
@pytest.mark.parametrize("suffix", [".txt", ".md", ".html"])
def test_an_index_of_40_kilobytes_of_one_thing_is_built(tmp_path, part, suffix):
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "good.txt").write_text("the good one")
    (docs / f"hard{suffix}").write_text((part * 40_000)[:40_000], encoding="utf-8")
    report = attempt(DOOR, "40 KB of one thing, indexed", lambda: build_index(docs, tmp_path / "index")).value
    assert report.documents >= 1


@trying(10, 150)
@given(st.data())
def test_a_damaged_pdf_is_read_or_named(data):
    pdf = bytearray(PDF)
    for _ in range(data.draw(st.integers(1, 8))):
        pdf[data.draw(st.integers(0, len(pdf) - 1))] = data.draw(st.integers(0, 255))
    with _folder() as folder:
        (folder / "a.pdf").write_bytes(pdf[: data.draw(st.integers(20, len(pdf)))])
        (document,) = attempt(DOOR, "damaged PDF files", lambda: list(find_documents(folder))).value
        assert bool(document.problem) <= (not document.text)


def test_a_pdf_bomb_is_named(tmp_path):
    """A page that unpacks to more than a process may have."""
    packed = zlib.compress(b"0" * (64 << 20), 9)
    (tmp_path / "bomb.pdf").write_bytes(pdf_of(packed, b"/Filter /FlateDecode"))
    (document,) = attempt(DOOR, "PDF bombs", lambda: list(find_documents(tmp_path))).value
    assert document.text == ""


def pdf_of(stream, filters=b""):
    """One page, by hand."""
    parts = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d %s>>stream\n%s\nendstream" % (len(stream), filters, stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    made, places = b"%PDF-1.4\n", []
    for number, part in enumerate(parts, start=1):
        places.append(len(made))
        made += b"%d 0 obj%s endobj\n" % (number, part)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 6\n0000000000 65535 f \n%strailer<</Size 6/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF"
    return made + head % (table, len(made))


PDF = pdf_of(b"BT /F1 12 Tf 10 50 Td (Hello from a page) Tj ET")


def _make(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
            made.bind(path.name)
    elif kind == "folder":
        path.mkdir()
    elif kind == "unreadable bytes":
        path.write_bytes(b"\xff\0")
    else:
        path.symlink_to(path if kind == "circle" else "nowhere")


@contextlib.contextmanager
def _folder():
    """A folder for one input of Hypothesis's, which shares fixtures among many."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(made)
