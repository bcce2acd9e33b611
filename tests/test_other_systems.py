"""What Windows lacks is not needed: every module loads without it, and questions are answered; files are the same."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import python
from tools.structure import SOURCE, files, modules, nodes

# Libraries are loaded before: they have their own ways on Windows, which are not what is tested. `os.name` cannot be
# 'nt', or `pathlib` would make Windows paths; what is neither is enough for code that asks for 'posix'.
WITHOUT_POSIX = """
import importlib, importlib.util, os, sys, sysconfig
for name in ("bm25s", "httpx", "pydantic", "rich", "safetensors", "safetensors.numpy", "typer.main", *{libraries!r}):
    if importlib.util.find_spec(name):
        importlib.import_module(name)
for name in ("fcntl", "resource", "pwd", "grp", "termios", "syslog", "posixshmem"):
    sys.modules[name] = None
for name in ("fork", "forkpty", "getuid", "geteuid", "getpgid", "killpg", "setsid", "sysconf", "mkfifo", "O_NOFOLLOW"):
    if hasattr(os, name):
        delattr(os, name)
os.name = "other"
"""
HEAVY = ("torch", "transformers", "sentence_transformers", "sklearn.linear_model", "scipy.optimize", "peft", "datasets")


def without_posix(code: str, *arguments: str, libraries: tuple[str, ...] = ()) -> str:
    return python(WITHOUT_POSIX.format(libraries=libraries) + code, *arguments)


EACH = """
import knowgate.errors
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except knowgate.errors.MissingExtra:
        assert name.startswith("knowgate.integrations."), name  # an adapter, whose framework is not here
print("all")
"""


@pytest.mark.slow
def test_every_module_can_be_imported():
    names = [name for name in modules() if not name.endswith("__main__")]
    assert without_posix(EACH, *names, libraries=HEAVY) == "all\n"


COMMANDS = """
from knowgate.cli.main import run
os.chdir(sys.argv[1])
open("questions.jsonl", "w", encoding="utf-8").write('{"question": "Who?", "answers": ["me"]}')
assert run(["--help"]) == 0
assert run(["ask", "Who?", "--model", "fake", "--gate", "never"]) == 0
assert run(["label", "--data", "jsonl:questions.jsonl", "--model", "fake", "--samples", "0", "--out", "run"]) == 0
"""


def test_the_command_line_answers_and_labels(tmp_path: Path):
    without_posix(COMMANDS, str(tmp_path))
    assert (tmp_path / "run" / "labels.jsonl").is_file()


# --- files ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextCall:
    """A call that opens a file as text."""

    line: int
    writes: bool
    given: frozenset[str | None]


def text_calls(path: Path) -> list[TextCall]:
    calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
    modes = [(call, _mode(call)) for call in calls]
    return [
        TextCall(call.lineno, mode != "r", frozenset(keyword.arg for keyword in call.keywords))
        for call, mode in modes
        if mode and "b" not in mode
    ]


def _mode(call: ast.Call) -> str:
    """'' of what opens no file: of `open` the mode stands first in `path.open` and second elsewhere."""
    if isinstance(call.func, ast.Name):
        return _word(call.args[1:], "r") if call.func.id == "open" else ""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name == "write_text" and ast.unparse(call.func) == "files.write_text":
        return ""  # knowgate.core.files, which writes UTF-8 with one line end
    if name in ("read_text", "write_text"):
        return name[0]
    if name == "fdopen":
        return _word(call.args[1:], "r")
    return _word(call.args, "r") if name == "open" else ""


def _word(arguments: list[ast.expr], default: str) -> str:
    if not arguments:
        return default
    value = arguments[0].value if isinstance(arguments[0], ast.Constant) else ""
    return value if isinstance(value, str) else ""


def test_text_files_have_one_encoding_and_one_line_end_on_every_system():
    calls = [(f"{path.relative_to(SOURCE)}:{call.line}", call) for path in files() for call in text_calls(path)]
    assert [where for where, call in calls if "encoding" not in call.given] == []
    assert [where for where, call in calls if call.writes and "newline" not in call.given] == []


def test_a_call_without_them_would_be_seen(tmp_path: Path):
    (tmp_path / "a.py").write_text(
        "path.open()\npath.open('ab')\nopen(path, 'a', encoding='utf-8')\npath.write_text('x')\nos.fdopen(2, 'w')\n"
        "prompts.open(question)\npath.read_text(encoding='utf-8')\n",
        encoding="utf-8",
    )
    found = {call.line: (call.writes, sorted(map(str, call.given))) for call in text_calls(tmp_path / "a.py")}
    expected = {1: (False, []), 3: (True, ["encoding"]), 4: (True, []), 5: (True, []), 7: (False, ["encoding"])}
    assert found == expected
