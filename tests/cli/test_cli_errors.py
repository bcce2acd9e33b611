"""Every bad input gives one sentence on stderr and exit code 1, or 2 for wrong usage."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Call, Outcome
from tests.support.extras import needs_local, needs_pdf


def sentence(outcome: Outcome, code: int = 1) -> str:
    """The one line of an error; nothing is on stdout."""
    assert outcome.code == code
    assert outcome.out == ""
    lines = outcome.err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("Error: ")
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "nope"], "unknown model 'nope'"),
        (["--gate", "nope"], "Known: always, consistency, dhicl, flare, logprob"),
        (["--gate", "logprob:nope"], "Use one of: first, mean, min, entropy, margin"),
        (["--gate", "logprob:foo=1"], "unknown option 'foo'. Known options: statistic"),
        (["--gate", "random:rate=7"], "must be between 0 and 1"),
        (["--retriever", "nope"], "kind='nope' is not allowed: it must be 'bm25', 'dense' or 'hybrid'."),
        (["--arbiter", "nope"], "unknown arbiter 'nope'. Known: rules."),
        (["--arbiter", "features"], "must be fitted before use. Run `knowgate fit arbiter`"),
        (["--lang", "fr"], "unknown language 'fr'. Known: en, zh."),
        (["--index", "x"], "--docs and --index are mutually exclusive: give only one of them."),
        (["--model", "openai:m"], "does not have the form openai:MODEL@URL"),
        pytest.param(["--model", "gguf:none.gguf"], "the GGUF file 'none.gguf' does not exist", marks=needs_local),
        pytest.param(["--model", "hf:./none"], "the model folder './none' does not exist", marks=needs_local),
        (["--model", ""], "setting 'model' is empty"),
        (["--docs", ""], "a path on the command line is empty"),
        (["--config", "none.toml"], "cannot read the config file 'none.toml'"),
        (["--record", "docs/vault.txt"], "'docs/vault.txt' is a file, not a folder"),
    ],
)
def test_a_wrong_option_of_ask_is_named_with_what_is_allowed(call: Call, docs: Path, arguments: list[str], said: str):
    assert said in sentence(call("ask", "who?", "--model", "fake", "--docs", docs, *arguments))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "Known: start, ask, decide, serve"),
        (["index", "docs"], "Missing option '--out'"),
        (["ask", "--k", "x"], "Invalid value for '--k'"),
        (["ask", "--k", "0"], "Invalid value for '--k'"),
        (["ask", "--threshold", "2"], "Invalid value for '--threshold'"),
        (["ask", "--threshold", "nan"], "Invalid value for '--threshold'"),
        (["models", "nope"], "Known: pull."),
        (["ask", "--nope"], "No such option: --nope"),
        (["ask", "--gat", "x"], "No such option: --gat (Possible options: --gate, --log)"),
    ],
)
def test_wrong_usage_has_exit_code_2(call: Call, arguments: list[str], said: str):
    assert said in sentence(call(*arguments), code=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("foo = 1", "has the unknown key 'foo'. Remove it, or use one of model, gate"),
        ("k = 'x'", "the config file 'knowgate.toml': k='x' is not allowed: it must be a whole number."),
        ("k = [", "is not valid TOML"),
        ("docs = ''", "setting 'docs' is empty"),
    ],
)
def test_a_bad_config_file_is_an_error(call: Call, docs: Path, text: str, said: str):
    Path("knowgate.toml").write_text(text, encoding="utf-8")
    assert said in sentence(call("ask", "who?", "--model", "fake"))


def test_ask_without_documents_says_which_options_give_them(call: Call):
    assert "Give --docs or --index" in sentence(call("ask", "who?", "--model", "fake"))


@pytest.mark.parametrize("question", ["", "  "])
def test_an_empty_question_is_refused(call: Call, question: str):
    assert "the question is empty" in sentence(call("decide", question, "--model", "fake"))


def test_blank_lines_on_stdin_are_no_questions(call: Call):
    assert "standard input contains no question" in sentence(call("decide", "--model", "fake", stdin=b"\n  \n"))


def test_a_line_of_stdin_that_is_not_utf8_is_named(call: Call):
    outcome = call("decide", "--model", "fake", stdin=b"good\ncaf\xe9\n")
    assert outcome.code == 1
    assert "line 2 of standard input is not UTF-8 text" in outcome.err
    assert "good" in outcome.out  # what came before it was decided already


def test_a_question_with_half_characters_is_refused(call: Call):
    assert "is not UTF-8 text: 'caf\\udce9'" in sentence(call("decide", "caf\udce9", "--model", "fake"))


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("x.txt", b"a\0b", "x.txt holds binary data"),
        ("x.txt", b"\xff\xfe\x01", "x.txt is not UTF-8 text"),
        pytest.param("x.pdf", b"no pdf", "x.pdf cannot be read as PDF", marks=needs_pdf),
        ("x.doc", b"words", "contains no documents"),
    ],
)
def test_a_file_that_cannot_be_indexed_is_named(call: Call, tmp_path: Path, name: str, data: bytes, said: str):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / name).write_bytes(data)
    assert said in sentence(call("index", "bad", "--out", "made"))
    assert not (tmp_path / "made").exists()


def test_a_file_without_permission_is_named_and_the_others_are_indexed(
    call: Call, docs: Path, monkeypatch: pytest.MonkeyPatch
):
    opened = Path.open

    def refuse(path: Path, *options: Any, **more: Any) -> Any:
        if path.name == "markup.md":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *options, **more)

    monkeypatch.setattr(Path, "open", refuse)
    outcome = call("index", docs, "--out", "made")
    assert (outcome.code, outcome.err.startswith("1 documents")) == (0, True)
    assert "1 of the documents could not be read" in outcome.err
    assert "markup.md cannot be read: Permission denied." in outcome.err


@pytest.mark.parametrize("line", ['{"id": 2, "text":', "[" * 100_000], ids=["broken", "nested"])
def test_a_broken_line_of_a_jsonl_file_is_named_by_number(call: Call, tmp_path: Path, line: str):
    (tmp_path / "d.jsonl").write_text('{"id": 1, "text": "a b"}\n' + line + "\n", encoding="utf-8")
    assert "d.jsonl line 2 is" in sentence(call("index", "d.jsonl", "--out", "made"))


def test_an_index_below_a_file_cannot_be_written(call: Call, docs: Path):
    assert "Check the path, its permissions" in sentence(call("index", docs, "--out", docs / "vault.txt" / "x"))


def test_a_folder_with_other_things_is_not_overwritten(call: Call, docs: Path):
    assert "exists and is not an index" in sentence(call("index", docs, "--out", docs))
    assert (docs / "vault.txt").is_file()


def test_a_cache_that_is_a_file_is_named(call: Call, docs: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KNOWGATE_CACHE", str(docs / "vault.txt"))
    assert "vault.txt" in sentence(call("ask", "who?", "--model", "fake", "--docs", docs))


def test_an_index_of_another_version_says_both_versions(call: Call, docs: Path, tmp_path: Path):
    call("index", docs, "--out", "made")
    manifest = tmp_path / "made" / "index.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 9}))
    said = sentence(call("ask", "who?", "--model", "fake", "--index", "made"))
    assert "the index has version 9, but knowgate reads version 1" in said


@pytest.mark.parametrize("part", ["passages.jsonl", "offsets.npy", "bm25/vocab.index.json", "bm25/data.csc.index.npy"])
def test_a_cut_file_of_an_index_is_an_error_without_advice_to_load_it_unsafely(
    call: Call, docs: Path, tmp_path: Path, part: str
):
    call("index", docs, "--out", "made")
    file = tmp_path / "made" / part
    file.write_bytes(file.read_bytes()[:5])
    said = sentence(call("ask", "vault?", "--model", "fake", "--index", "made", "--gate", "always"))
    assert "Rebuild it with `knowgate index`" in said
    assert "pickle" not in said


def test_a_damaged_passage_is_an_error(call: Call, docs: Path, tmp_path: Path):
    call("index", docs, "--out", "made")
    file = tmp_path / "made" / "passages.jsonl"
    file.write_bytes(b"\0" * len(file.read_bytes()))
    said = sentence(call("ask", "vault code?", "--model", "fake", "--index", "made", "--gate", "always"))
    assert "damaged. Rebuild it" in said


@pytest.mark.parametrize("limit", [0, -1])
def test_demo_refuses_a_limit_below_one(call: Call, limit: int):
    outcome = call("demo", "--model", "fake", "--limit", limit)
    assert (outcome.code, outcome.out) == (2, "")
    assert "'--limit'" in outcome.err


@pytest.mark.parametrize("value", ["1.5", "-1e31", '"-1"'])
def test_a_fake_table_with_an_invalid_logprob_is_refused(call: Call, tmp_path: Path, value: str):
    (tmp_path / "table.json").write_text(f'{{"who": {{"logprob": {value}}}}}')
    said = sentence(call("decide", "who?", "--model", "fake:table.json"))
    assert "logprob is " in said


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_extra_says_what_to_install(call: Call, monkeypatch: pytest.MonkeyPatch, package: str):
    modules = {name: module for name, module in sys.modules.items() if name.startswith("knowgate.models.")}
    parents = {**modules, "knowgate.models": sys.modules["knowgate.models"]}
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        monkeypatch.setattr(parents[parent], child, module, raising=False)  # importing again sets it; this undoes that
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    said = sentence(call("ask", "who?", "--gate", "never"))
    assert "pip install 'knowgate[local]'" in said


def test_a_missing_embedding_package_is_said_before_weights_are_fetched(
    call: Call, docs: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    said = sentence(call("index", docs, "--out", "made", "--retriever", "dense"))
    assert "pip install 'knowgate[local]'" in said


def test_an_unknown_gate_may_be_the_folder_of_one(call: Call, docs: Path):
    said = sentence(call("ask", "--docs", docs, "--gate", "my-smal-judge", "Who?"))
    assert "or a folder written by `knowgate fit` (none has this name)." in said


def test_a_folder_without_a_gate_is_told_to_have_none(call: Call, docs: Path):
    said = sentence(call("ask", "--docs", docs, "--gate", docs, "Who?"))
    assert (
        f"the folder '{docs}' contains no fitted gate: it has no gate.json. Pass a folder that `knowgate fit` wrote"
        in said
    )


def test_compare_asks_for_reports(call: Call, docs: Path):
    said = sentence(call("compare", docs, docs))
    assert (
        "is neither a report nor a label run (recorded answers). It contains no summary.json and no run.json. Give"
        in said
    )
