"""After an error one knows what to type: its message says so."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from knowgate import errors
from knowgate.cli.error_messages import explain_library_error, translate_arguments
from tests.cli.conftest import Call
from tools import structure

KINDS = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
COMPUTED = {"MissingExtra", "UnknownName"}  # their classes write the message, with what to type or what is known

# A message says what to do by a command, the allowed values, or an imperative.
ADVICE_VERBS = (
    "Add|Ask|Build|Check|Choose|Convert|Correct|Delete|Download|Enter|Fetch|Fill|Fit|Free|Give|Install|Label|Leave|Let|"
    "Look|Make|Mark|Mend|Move|Name|Put|Record|Remove|Rename|Repair|Restore|Run|Save|Set|Shorten|Split|Take|Try|Type|"
    "Update|Use|Wait|Write"
)
COMMAND_PATTERN = r"\bknowgate [a-z]|\bpip install\b|(^|[\s'(])--[a-z]"
CHOICES_PATTERN = r"\b[Aa]llowed: |\b[Kk]nown( options)?: |\bmust (be|begin|hold|have)\b|\bat (least|most)\b"
ADVICE_PATTERN = rf"(^|[.;:,]\s|\bor\s)({ADVICE_VERBS}|{ADVICE_VERBS.lower()})\b"
NEXT_STEP_PATTERN = re.compile(f"{COMMAND_PATTERN}|{CHOICES_PATTERN}|{ADVICE_PATTERN}")


def has_next_step(message: str) -> bool:
    """Return whether a message says what to do."""
    return NEXT_STEP_PATTERN.search(message) is not None


def raised_messages() -> Iterator[tuple[str, str]]:
    """Where the command line raises an error of ours, and the source of its message."""
    for path in sorted((structure.SOURCE / "cli").rglob("*.py")):
        for node in ast.walk(structure.tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in KINDS - COMPUTED and node.args:
                yield f"{path.name}:{node.lineno}", ast.unparse(node.args[0])


def test_every_error_of_the_command_line_says_what_to_do():
    messages = list(raised_messages())
    assert len(messages) > 20
    assert [where for where, message in messages if not has_next_step(message)] == []


def test_arguments_are_translated_to_the_flags_of_the_command_that_runs():
    option = SimpleNamespace(name="top_p", opts=["--top-p"])
    commands = {"fit": SimpleNamespace(commands={"fusion": SimpleNamespace(params=[option])})}
    assert (
        explain_library_error("top_p=2 is wrong.", ["--debug", "fit", "fusion", "x"], commands) == "--top-p 2 is wrong."
    )
    assert explain_library_error("top_p=2 is wrong.", ["fit"], commands) == "top_p=2 is wrong."


FLAGS = {"samples": "--samples", "mask": "--mask", "top_p": "--top-p", "grade": "--grade"}


@pytest.mark.parametrize(
    ("message", "translated"),
    [
        ("samples=0 is not allowed: it must be at least 1.", "--samples 0 is not allowed: it must be at least 1."),
        ("give `top_p` or `grade`.", "give --top-p or --grade."),
        ("`mask=True` needs samples=1.", "--mask needs --samples 1."),
        ("grade='no such' is not known.", "--grade 'no such' is not known."),
        ("url?samples=3 and row.samples=3 stay.", "url?samples=3 and row.samples=3 stay."),
        ("use hf:folder#samples=3 instead.", "use hf:folder#samples=3 instead."),
        ("unknown=3 stays.", "unknown=3 stays."),
    ],
)
def test_arguments_in_a_library_message_become_flags(message: str, translated: str):
    assert translate_arguments(message, FLAGS) == translated


@pytest.mark.parametrize(
    "arguments",
    [
        ["ask", "who?", "--model", "fake", "--docs", "none"],
        ["ask", "who?", "--model", "replay:none", "--docs", "docs"],
        ["ask", "who?", "--model", "gguf:none", "--docs", "docs"],
        ["ask", "who?", "--model", "fake", "--docs", "docs", "--gate", "./none"],
        ["ask", "who?", "--model", "fake", "--docs", "docs", "--rules", "none.toml"],
        ["ask", "who?", "--model", "fake", "--index", "none"],
        ["calibrate", "none", "--labels", "none", "--max-loss", "0.1"],
        ["compare", "none", "none"],
        ["eval", "--labels", "none"],
        ["eval", "--labels", "none", "--gates", ","],
        ["eval-rerank", "none"],
        ["fit", "fusion", "--labels", "none", "--out", "x"],
        ["fit", "fusion", "--labels", "broken", "--out", "x"],
        ["history", "stats", "--history", "none.db"],
        ["label", "--data", "jsonl:none", "--model", "fake", "--out", "x"],
        ["label", "--data", "jsonl:empty.jsonl", "--model", "fake", "--out", "x"],
        ["prefer", "--labels", "none", "--out", "x"],
        ["replay", "none.jsonl"],
        ["report", "none"],
    ],
    ids=" ".join,
)
def test_what_goes_wrong_on_the_way_ends_with_what_to_type(call: Call, docs: Path, arguments: list[str]):
    Path("empty.jsonl").touch()
    Path("broken").mkdir()
    (Path("broken") / "run.json").write_text("{", encoding="utf-8")
    outcome = call(*arguments)
    assert outcome.code in (1, 2)
    assert len(outcome.err.splitlines()) == 1
    assert has_next_step(outcome.err), outcome.err
