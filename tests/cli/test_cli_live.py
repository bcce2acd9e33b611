"""`knowgate ask` on a terminal: the decision, then the text as it comes; elsewhere all as ever."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from knowgate.cli.main import run

SKIP = "  skip: the gate 'never' skips retrieval"


class Terminal(io.StringIO):
    """Remembers what was written at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes += [text] if text else []
        return super().write(text)


@pytest.fixture
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("KNOWGATE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TERM", "dumb")  # no colours: what stands there is what was said
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return Terminal()


def ask(terminal: Terminal, *arguments: object, table: dict[str, object] | None = None) -> int:
    Path("table.json").write_text(json.dumps(table or {"who": "it is Anna"}), encoding="utf-8")
    with contextlib.redirect_stdout(terminal):
        return run(["ask", *map(str, arguments), "--model", "fake:table.json"])


def test_the_decision_comes_first_and_the_text_as_it_comes(terminal: Terminal):
    assert ask(terminal, "who?", "--gate", "never") == 0
    decision, answer, time = terminal.getvalue().splitlines()
    assert decision.startswith(SKIP)
    assert answer == "it is Anna"
    assert time.endswith(" s")
    assert [text for text in terminal.writes if text.strip() in ("it", "is", "Anna")] == ["it", " is", " Anna"]


def test_an_answer_that_was_cut_ends_with_dots_and_says_so(terminal: Terminal, capsys: pytest.CaptureFixture[str]):
    assert ask(terminal, "who?", "--gate", "never", "--max-tokens", 2) == 0
    assert terminal.getvalue().splitlines()[1] == "it is…"
    assert capsys.readouterr().err.count("cut off at 2 tokens; change it with --max-tokens") == 1


def test_of_several_answers_that_were_cut_it_is_said_once(terminal: Terminal, capsys: pytest.CaptureFixture[str]):
    assert ask(terminal, "who?", "who else?", "--gate", "never", "--max-tokens", 2) == 0
    assert terminal.getvalue().splitlines().count("it is…") == 2
    assert capsys.readouterr().err.count("cut off at 2 tokens") == 1


def test_as_json_an_answer_says_that_it_was_cut_and_a_whole_one_says_nothing(terminal: Terminal):
    assert ask(terminal, "who?", "--gate", "never", "--max-tokens", 2, "--json") == 0
    assert ask(terminal, "who?", "--gate", "never", "--json") == 0
    cut, whole = map(json.loads, terminal.getvalue().splitlines())
    assert (cut["answer"], cut["finished"]) == ("it is", False)
    assert "finished" not in whole


def test_passages_and_time_stand_below_the_text(terminal: Terminal, docs: Path):
    table = {"vault": {"closed": "no idea", "open": "code 1234", "when": "is 1234"}}
    assert ask(terminal, "What is the vault code?", "--gate", "always", "--docs", docs, table=table) == 0
    decision, answer, passage, time = terminal.getvalue().splitlines()
    assert decision.startswith("  retrieve: the gate 'always' retrieves")
    assert answer == "code 1234"
    assert "The vault code is 1234." in passage
    assert time.endswith(" s")


def test_what_was_found_out_after_the_decision_is_said_below(terminal: Terminal, docs: Path):
    assert ask(terminal, "who xyzzy?", "--gate", "always", "--docs", docs) == 0
    lines = terminal.getvalue().splitlines()
    assert "nothing was found" not in lines[0]
    assert lines[1] == "it is Anna"
    assert len(lines) == 4


def test_control_characters_do_not_reach_the_terminal_even_cut_in_two(terminal: Terminal):
    assert ask(terminal, "who?", "--gate", "never", table={"who": "a\x1b [2J\x9b \x1b]0;x\x07b"}) == 0
    assert not set("\x1b\x9b\x07") & set(terminal.getvalue())
    assert "a\\x1b [2J\\x9b \\x1b]0;x\\x07b\n" in terminal.getvalue()


@pytest.mark.parametrize("text", ["[red]x[/bold]", "[bold] x [/bold]", ":smile: \\[x]", "巴黎 is é", "a\n\nb"])
def test_nothing_in_the_text_is_taken_for_markup(terminal: Terminal, text: str):
    assert ask(terminal, "who?", "--gate", "never", table={"who": text}) == 0
    assert f"\n{text}\n" in terminal.getvalue()


def test_colours_are_ours_alone(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert ask(terminal, "who?", "--gate", "never") == 0
    assert "\x1b[1mit\x1b[0m" in terminal.getvalue()


def test_an_error_begins_on_a_line_of_its_own(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from knowgate.errors import ServerError
    from knowgate.models.fake import FakeModel

    def breaking(self: FakeModel, *_: object, **__: object):
        yield "it is"
        raise ServerError("the server broke off.")

    monkeypatch.setattr(FakeModel, "stream", breaking)
    assert ask(terminal, "who?", "--gate", "never") == 1
    assert terminal.getvalue().endswith("\nit is\n")


def test_several_questions_are_answered_in_batches_as_ever(terminal: Terminal):
    assert ask(terminal, "who?", "who else?", "--gate", "never") == 0
    assert terminal.getvalue().splitlines()[:2] == ["1. who?", "it is Anna"]


def test_json_stays_as_it_is(terminal: Terminal):
    assert ask(terminal, "who?", "--gate", "never", "--json") == 0
    assert json.loads(terminal.getvalue())["answer"] == "it is Anna"


def test_what_goes_into_a_pipe_stays_as_it_is(terminal: Terminal, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal, "isatty", lambda: False)
    assert ask(terminal, "who?", "--gate", "never") == 0
    answer, decision, _ = terminal.getvalue().splitlines()
    assert (answer, decision[: len(SKIP)]) == ("it is Anna", SKIP)
