"""What nobody foresaw: one sentence with an id, details on disk, exit code 70; --debug shows them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from knowgate.cli.error_messages import compute_error_id, format_error_report
from knowgate.core.redaction import redact_secrets
from knowgate.errors import KnowgateError
from tests.cli.conftest import Call


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch):
    """A command that raises what it is told to."""

    def breaks(error: BaseException) -> None:
        def raise_it(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr("knowgate.cli.catalog.print_table", raise_it)

    return breaks


def test_an_unexpected_error_is_one_sentence_with_an_id_and_exits_70(call: Call, broken, tmp_path: Path):
    broken(ZeroDivisionError("of all things"))
    outcome = call("gates")
    assert (outcome.code, outcome.out) == (70, "")
    found = re.fullmatch(r"Error: internal error: ZeroDivisionError \(id (\w{8})\)\. .+\n", outcome.err)
    assert found
    file = tmp_path / "cache" / "errors" / f"{found[1]}.log"
    assert file.stat().st_mode & 0o077 == 0
    log = file.read_text(encoding="utf-8")
    assert "knowgate gates" in log
    assert "ZeroDivisionError: of all things" in log
    assert "catalog.py" in log
    assert "numpy " in log


@pytest.mark.parametrize("arguments", [["--debug", "gates"], ["gates", "--debug"]])
def test_debug_shows_where_it_came_from(call: Call, broken, arguments: list[str]):
    broken(ZeroDivisionError("of all things"))
    outcome = call(*arguments)
    assert outcome.code == 70
    assert outcome.err.startswith("Traceback")
    assert outcome.err.splitlines()[-1].startswith("Error: ")


def test_the_variable_asks_for_debugging_too(call: Call, broken, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KNOWGATE_DEBUG", "1")
    broken(ZeroDivisionError())
    assert call("gates").err.startswith("Traceback")


def test_debug_shows_where_a_foreseen_error_came_from(call: Call):
    outcome = call("decide", "who?", "--debug", "--model", "nope")
    assert outcome.code == 1
    assert outcome.err.startswith("Traceback")
    assert "unknown model 'nope'" in outcome.err.splitlines()[-1]


def test_behind_two_dashes_debug_is_a_question(call: Call):
    outcome = call("decide", "--model", "fake", "--gate", "never", "--json", "--", "--debug")
    assert outcome.code == 0
    assert '"question": "--debug"' in outcome.out


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), "out of memory"), (RecursionError(), "nested too deeply")])
def test_no_memory_and_endless_nesting_have_words_of_their_own(call: Call, broken, error: Exception, said: str):
    broken(error)
    outcome = call("gates")
    assert outcome.code == 70
    assert said in outcome.err


def test_a_cache_that_cannot_be_written_leaves_the_details_in_the_temporary_folder(
    call: Call, broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "cache").write_text("no folder", encoding="utf-8")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "other"))
    broken(ZeroDivisionError())
    assert str(tmp_path / "other" / "errors") in call("gates").err


def test_without_any_place_for_details_the_sentence_still_comes(
    call: Call, broken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "cache").write_text("no folder", encoding="utf-8")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "cache"))
    broken(ZeroDivisionError())
    outcome = call("gates")
    assert outcome.code == 70
    assert "--debug" in outcome.err


def test_an_error_while_explaining_an_error_ends_here_too(call: Call, broken, monkeypatch: pytest.MonkeyPatch):
    def fail(*arguments: object) -> None:
        raise RuntimeError("no command")

    monkeypatch.setattr("knowgate.cli.error_messages.find_command", fail)
    broken(KnowgateError("samples=0"))
    assert call("gates").code == 70


def test_an_os_error_that_is_not_the_systems_is_unexpected(call: Call, broken):
    broken(OSError("a library's own"))
    assert call("gates").code == 70


def test_a_full_disk_says_to_make_room(call: Call, broken):
    broken(OSError(28, "No space left on device"))
    outcome = call("gates")
    assert outcome.code == 1
    assert outcome.err == (
        "Error: cannot read or write: No space left on device. Check the path, its permissions and the free disk space.\n"
    )


def test_one_defect_has_one_id():
    assert compute_error_id(_raised("a")) == compute_error_id(_raised("b"))
    assert compute_error_id(_raised("a")) != compute_error_id(ValueError())


def _raised(words: str) -> Exception:
    try:
        raise ValueError(words)
    except ValueError as error:
        return error


@pytest.mark.parametrize(
    "text",
    [
        "https://me:hush-hush@host/v1",
        "http://host/search?api_key=hush-hush&k=3",
        "Authorization: Bearer hush-hush",
        "sk-hush-hush1234",
        "--api-key hush-hush",
        "the key is hush-hush",
    ],
)
def test_secrets_are_blotted_out(text: str):
    assert "hush-hush" not in redact_secrets(text, {"KNOWGATE_API_KEY": "hush-hush"})
    if not text.startswith("the key"):  # only the environment tells that this is one
        assert "hush" not in redact_secrets(text, {})


def test_the_details_hold_no_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "hush-hush")
    written = format_error_report(_raised("refused hush-hush"), ["ask", "--model", "openai:m@http://me:pw@host/v1"])
    assert "hush-hush" not in written
    assert "me:pw" not in written
    assert "openai:m@http://***@host/v1" in written
