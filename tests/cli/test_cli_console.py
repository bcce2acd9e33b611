"""Where commands print, what other packages may print beside them, and what a card says of the command."""

import io
import json
import logging
import os
import subprocess
import sys

import pytest

from knowgate.cli.console import create_console, print_json
from knowgate.cli.main import SanitizingFormatter
from knowgate.cli.options import format_command_line
from knowgate.pipeline.settings import load_settings
from tests.support.extras import needs_local
from tests.support.hostile_server import HostileServer, http

LOUD = """
import logging, sys, warnings
from knowgate.cli.main import silence_libraries
silence_libraries()
warnings.warn("deprecated")
logging.getLogger("httpx").warning("HTTP Request")
import transformers
transformers.utils.logging.get_logger("transformers.x").warning("be warned")
from tqdm import tqdm
list(tqdm(range(3)))
"""


@pytest.mark.parametrize("text", ["[red]x[/red] :smile: [/] 0.5", "a\\[b"])
def test_a_text_is_no_markup(text):
    console = create_console()
    console.file = io.StringIO()
    console.print(text)
    assert console.file.getvalue() == f"{text}\n"


def test_a_text_steers_no_terminal():
    console = create_console()
    console.file = io.StringIO()
    console.print("a\x1b[2J\x9bb\u202ec")
    assert console.file.getvalue() == "a\\x1b[2J\\x9bb\\u202ec\n"


def test_json_is_read_back_as_it_was(capsys):
    print_json({"text": "\x1b[2J\x9b\u202e巴"})
    out = capsys.readouterr().out
    assert not set("\x1b\x9b\u202e") & set(out)
    assert "巴" in out
    assert json.loads(out) == {"text": "\x1b[2J\x9b\u202e巴"}


def test_a_log_line_steers_no_terminal():
    record = logging.LogRecord("knowgate", logging.INFO, "", 0, "skipped %s", ("a\x1b[2J.txt",), None)
    assert SanitizingFormatter().format(record) == "skipped a\\x1b[2J.txt"


@needs_local
def test_other_packages_are_silent_beside_a_command():
    kept = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONWARNINGS", "TRANSFORMERS_VERBOSITY")
    }
    done = subprocess.run([sys.executable, "-c", LOUD], capture_output=True, text=True, env=kept, check=True)
    assert done.stderr == ""


def test_a_card_shows_no_login_and_no_key_of_an_address(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["knowgate", "fit", "skr", "--index", "http:https://me:pw@x.test/s?api_key=k1"])
    assert format_command_line() == "knowgate fit skr --index 'http:https://***@x.test/s?***'"


SECRETS = ("hunter22", "kk-secret", "sk-secret")


@pytest.mark.parametrize(
    "reply", [http({"passages": [{"id": "1", "text": "Paris"}]}), http(b"kk-secret hunter22", 403)]
)
def test_keys_are_in_no_folder_and_no_word_of_a_run(call, tmp_path, monkeypatch, reply):
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("KNOWGATE_API_KEY", "sk-secret")
    (tmp_path / "q.jsonl").write_text('{"id": "1", "question": "who?", "answers": ["x"]}\n')
    with HostileServer() as server:
        server.reply = reply
        index = "http:" + server.url.replace("//", "//me:hunter22@") + "/find?api_key=kk-secret"
        shared = ("--model", "fake", "--index", index)
        outcomes = [
            call("label", "--data", "jsonl:q.jsonl", *shared, "--samples", "1", "--out", "run"),
            call("ask", "who?", *shared, "--gate", "always", "--record", "kept"),
            call("ask", "who?", *shared, "--gate", "always", "--json"),
        ]
        assert len(server.seen) >= 3
    told = "".join(outcome.out + outcome.err for outcome in outcomes)
    files = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not [secret for secret in SECRETS if secret in told or secret.encode() in files]
    assert "hunter22" not in repr(load_settings(index=index))
