"""What Windows lacks is not needed: every module loads without it, and questions are answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import python
from tools.structure import modules

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
