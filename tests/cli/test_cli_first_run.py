"""`knowgate start`: what it asks, what it says, how it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import knowgate.cli.start as command
from tests.cli.conftest import Call, Outcome
from tests.evaluation.first_run.conftest import asked, hue, said, table

N = 40


@pytest.fixture
def lamps(tmp_path: Path) -> Path:
    (tmp_path / "lamps").mkdir()
    for i in range(N):
        (tmp_path / "lamps" / f"lamp{i}.txt").write_text(said(i), encoding="utf-8")
    lines = [json.dumps({"question": asked(i), "answers": [hue(i)]}) for i in range(N)]
    (tmp_path / "q.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "t.json").write_text(json.dumps(table(N)), encoding="utf-8")
    return tmp_path


def started(call: Call, *more: object, stdin: bytes = b"") -> Outcome:
    return call("start", "--docs", "lamps", "--questions", "q.jsonl", "--model", "fake:t.json", *more, stdin=stdin)


def test_three_lines_on_stdout_say_how_to_use_it(call: Call, lamps: Path):
    outcome = started(call)
    assert outcome.code == 0
    first, *rest = outcome.out.splitlines()
    assert first.startswith("knowgate ask --explain 'What is the colour of lamp number")
    assert rest == ["knowgate ask -i", "knowgate ask --json < questions.txt > answers.jsonl"]


def test_what_was_written_answers_a_question(call: Call, lamps: Path):
    started(call)
    assert call("ask", asked(4)).out.splitlines()[0] == hue(4)


def test_where_nothing_is_proven_a_greeting_is_not_retrieved_for_and_a_question_is(call: Call, lamps: Path):
    started(call, "--count", 3)
    asked_both = call("ask", "Hi", asked(4), "--json").out.splitlines()
    assert [json.loads(line)["retrieve"] for line in asked_both] == [False, True]


def test_the_report_and_the_settings_are_named(call: Call, lamps: Path):
    said = started(call).err
    assert str(lamps / "knowgate-start" / "report" / "report.html") in said
    assert str(lamps / "knowgate.toml") in said


def test_the_same_command_without_a_word_continues(call: Call, lamps: Path):
    started(call)
    outcome = call("start")
    assert outcome.code == 0
    assert "Continuing in knowgate-start." in outcome.err


def test_nothing_is_asked_where_nobody_sits_at_a_terminal(call: Call, lamps: Path):
    outcome = call("start", stdin=b"lamps\n")
    assert outcome.code == 1
    assert "no documents to search are given. Set --docs" in outcome.err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--docs", "nowhere"], "there is no folder or file 'nowhere'"),
        (["--docs", "empty"], "the folder 'empty' contains no documents"),
        (["--docs", "lamps", "--questions", "none.txt"], "there is no file 'none.txt' with questions"),
        (["--docs", "lamps", "--model", "gpt-4o"], "Did you mean openai:gpt-4o@"),
        (["--docs", "lamps", "--out", "lamps"], "not a first run's"),
    ],
)
def test_what_is_wrong_is_one_sentence_and_nothing_is_left_behind(
    call: Call, lamps: Path, words: list[str], problem: str
):
    (lamps / "empty").mkdir()
    outcome = call("start", *words)
    assert outcome.code == 1
    assert problem in outcome.err
    assert not (lamps / "knowgate-start" / "start.json").exists()


def test_on_a_terminal_it_asks_again_for_what_cannot_be_used(call: Call, lamps: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "is_terminal", lambda: True)
    answers = b"nowhere\nlamps\nsmoll\nfake:t.json\nnone.txt\nq.jsonl\n\n"
    outcome = call("start", stdin=answers)
    assert outcome.code == 0
    assert "the folder or file 'nowhere' does not exist" in outcome.err
    assert "unknown model 'smoll'" in outcome.err
    assert "there is no file 'none.txt' with questions" in outcome.err


def test_yes_asks_nothing(call: Call, lamps: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(command, "is_terminal", lambda: True)
    assert started(call, "--yes").code == 0


def test_interrupted_it_says_where_things_are_and_what_to_type(
    call: Call, lamps: Path, monkeypatch: pytest.MonkeyPatch
):
    from knowgate.models.fake import FakeModel

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(FakeModel, "read", interrupted)
        outcome = started(call)
    assert outcome.code == 130
    assert "To continue, run: knowgate start --docs lamps --model fake:t.json --questions q.jsonl" in outcome.err
    assert call("start").code == 0


def test_interrupted_while_the_llm_is_loaded_what_was_said_is_not_asked_again(
    call: Call, lamps: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(spec: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("knowgate.evaluation.first_run.runner.resolve_model", interrupted)
        assert started(call).code == 130
    outcome = call("start")
    assert outcome.code == 0
    assert "Continuing in knowgate-start." in outcome.err


def test_options_that_turn_out_wrong_do_not_replace_those_that_worked(call: Call, lamps: Path):
    started(call)
    assert call("start", "--model", "gpt-4o").code == 1
    assert "Changed" not in call("start").err


def test_the_page_is_opened_only_where_asked(call: Call, lamps: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setattr(command.webbrowser, "open", opened.append)
    started(call)
    assert opened == []
    started(call, "--open")
    assert opened == [(lamps / "knowgate-start" / "report" / "report.html").as_uri()]


def test_a_document_that_cannot_be_read_is_named_and_the_rest_continues(call: Call, lamps: Path):
    (lamps / "lamps" / "broken.pdf").write_bytes(b"%PDF-1.4 nothing else")
    outcome = started(call)
    assert outcome.code == 0
    assert "broken.pdf" in outcome.err
