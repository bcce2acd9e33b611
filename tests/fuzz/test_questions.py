"""Question files, logs and tables as users hand them in: a right record, or the file and line of what is wrong."""

import gzip
import io
import json
import os
import tempfile
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.cli.questions import _read_lines
from knowgate.core.text import CHOICE_LETTERS
from knowgate.data.history.entries import entry_from_record
from knowgate.data.questions import load_questions
from knowgate.evaluation.traffic_log import read_traffic_log
from knowgate.gates import load_gate
from knowgate.models.fake import FakeModel, parse_fake_entry
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from tests.support.fuzz import MANY, attempt, attempt_command, trying

DOOR = "question files"
TEXT = st.text(st.characters(), max_size=20)  # half characters too
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | st.sampled_from([10**299, -(10**350), 1e308])
VALUE = st.recursive(
    LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
TEXTS = st.lists(TEXT | st.integers(), max_size=14)
FIELDS = {
    "question": TEXT | st.sampled_from(["Who?", "a\0b", "\u202e", " ", "谁"]),
    "id": TEXT | st.integers() | st.sampled_from(["x" * 2000, "../../x", "a\nb"]),
    "answers": TEXTS,
    "lang": TEXT | st.sampled_from(["en", "zh", "xx-YY"]),
    "choices": TEXTS,
    "contexts": st.lists(st.fixed_dictionaries({"text": TEXT}, optional={"id": LEAF, "title": LEAF}), max_size=3),
    "meta": st.dictionaries(st.sampled_from(["gold_letter", "known", "x"]), VALUE, max_size=2),
}
RECORDS = st.fixed_dictionaries(
    {"question": FIELDS["question"]}, optional={k: v | VALUE for k, v in FIELDS.items() if k != "question"}
)
WHOLE = [
    "[" * 900 + "]" * 900,
    '{"question": "a", "id": ' + "9" * 5000 + "}",
    "null",
    '"x"',
    "{",
    "\ufeff{}",
    "\0",
    '{"question": NaN}',
]
LINES = RECORDS.map(json.dumps) | VALUE.map(json.dumps) | st.sampled_from(WHOLE)


@trying(60, 700)
@given(st.lists(LINES, max_size=4), st.sampled_from(["\n", "\r\n", "\n\n", "\r"]), st.booleans())
def test_questions_are_whole_or_the_line_is_named(lines, end, packed):
    data = end.join(lines).encode("utf-8", "surrogatepass")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / ("q.jsonl.gz" if packed else "q.jsonl")
        path.write_bytes(gzip.compress(data) if packed else data)
        outcome = attempt(DOOR, "records at random", lambda: load_questions(f"jsonl:{path}"))
        if outcome.refusal:
            assert "holds no questions" in outcome.refusal or f"{path.name} line " in outcome.refusal
        else:
            check(outcome.value, [json.loads(line) for line in lines])


def check(questions, records):
    assert [question.text for question in questions] == [record["question"] for record in records]
    assert len({question.id for question in questions}) == len(questions)
    for question, record in zip(questions, records, strict=True):
        assert list(question.answers) == [str(answer) for answer in record.get("answers") or []]
        assert len(question.choices) <= len(CHOICE_LETTERS)
        (question.text + question.id + "".join(question.answers + question.choices)).encode()


@trying(20, 250)
@given(
    st.binary(max_size=200) | st.binary(max_size=60).map(lambda data: gzip.compress(b'{"question": "a"}')[:-5] + data)
)
def test_bytes_that_are_no_file_of_questions_are_refused(data):
    with tempfile.TemporaryDirectory() as folder:
        for name in ("q.jsonl", "q.jsonl.gz"):
            (Path(folder) / name).write_bytes(data)
            outcome = attempt(DOOR, "bytes at random", lambda name=name: load_questions(f"jsonl:{folder}/{name}"))
            assert name in outcome.refusal


EVENTS = st.fixed_dictionaries(
    {"need": st.floats(0, 1) | LEAF, "retrieve": st.booleans()},
    optional=dict.fromkeys(("answer", "question", "passages", "seconds", "tokens", "threshold", "draft"), VALUE),
)


@trying(20, 250)
@given(st.lists(EVENTS.map(json.dumps) | LINES, max_size=4))
def test_lines_of_a_log_are_used_or_counted(lines):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        log = attempt("traffic logs", "lines at random", lambda: read_traffic_log(path)).value
        if log is not None:
            assert len(log.events) + sum(map(len, log.bad_lines.values())) == sum(bool(line.strip()) for line in lines)


LOGGED = st.fixed_dictionaries(
    {"question": TEXT | LEAF, "label": st.sampled_from(["known", "unknown"]) | VALUE},
    optional=dict.fromkeys(("model", "prompts", "weight", "created", "expires", "source", "outcome", "tenant"), VALUE),
)


@trying(20, 250)
@given(LOGGED)
def test_an_entry_of_the_history_is_whole_or_refused(record):
    record = {"model": "m", "prompts": "p", **record}
    outcome = attempt("history", "records at random", lambda: entry_from_record(record, "line 1"))
    if outcome.value:
        assert outcome.value.question == record["question"]
        assert 0 <= outcome.value.trust <= 1e11


@trying(20, 200)
@given(TEXT, VALUE | st.dictionaries(st.sampled_from(["closed", "open", "when", "known", "logprob", "samples"]), VALUE))
def test_an_entry_of_the_fake_table_is_whole_or_refused(key, value):
    attempt("fake tables", "entries at random", lambda: parse_fake_entry(key, value))


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "nothing", "NUL", "nobody's home"])
def test_what_is_no_ordinary_file_is_refused(tmp_path, kind):
    path = tmp_path / "q.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    if kind == "folder":
        path.mkdir()
    name = {"device": "/dev/zero", "NUL": "a\0b", "nobody's home": "~nosuchuser/q.jsonl"}.get(kind, str(path))
    assert attempt(DOOR, "pipes, devices, folders", lambda: load_questions(f"jsonl:{name}")).refusal


@trying(20, 250)
@given(st.lists(st.binary(max_size=30) | TEXT.map(lambda text: text.encode("utf-8", "surrogatepass")), max_size=5))
def test_lines_of_standard_input_are_questions_or_named(lines):
    data = b"\n".join(lines)
    outcome = attempt("standard input", "lines at random", lambda: list(_read_lines(io.BytesIO(data), "stdin")))
    if not outcome.refusal:
        said = enumerate(data.decode("utf-8-sig").split("\n"), start=1)
        expected = [(str(number), line.strip()) for number, line in said if line.strip()]
        assert [(question.id, question.text) for question in outcome.value] == expected


QUESTIONS = [
    "why " * 250_000,
    "x" * 1_000_000,
    "." * 1_000_000,
    "谁" * 300_000,
    "a\0b",
    "\u202e\x1b[31m",
    "\ud800",
    "A " * 500_000,
]


@pytest.mark.parametrize("number", range(len(QUESTIONS)))
def test_a_question_of_a_megabyte_is_answered(number, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    line = ["ask", QUESTIONS[number], "--model", "fake", "--gate", "never", "--json"]
    code = attempt_command("standard input", "long and odd questions", line, lambda: capsys.readouterr().err)
    assert code == ("\ud800" in QUESTIONS[number])


def test_a_hundred_thousand_questions_take_no_more_memory_than_a_thousand():
    """A thousand to warm up, then what all the rest take at most beyond it."""
    rag = AdaptiveRAG(FakeModel(), load_gate("never"))
    lines = (b"question %d?\n" % number for number in range(100_000 if MANY else 6_000))
    asked = _read_lines(lines, "stdin")
    answers = rag.stream(asked)
    for _ in range(1_000):
        next(answers)
    tracemalloc.start()
    try:
        left = sum(1 for _ in answers)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert left == (99_000 if MANY else 5_000)
    assert peak < 40 << 20
