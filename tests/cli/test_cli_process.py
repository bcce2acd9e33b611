"""What only a process of its own shows: signals, pipes, encodings, servers."""

from __future__ import annotations

import http.server
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from knowgate.core.http_client import RetryPolicy
from tests.cli.conftest import Call
from tests.support.processes import PATIENCE, child, until

COMMAND = [sys.executable, "-c", "from knowgate.cli.main import main; main()"]


@contextmanager
def server(status: int, body: bytes, wait: threading.Event | None = None) -> Iterator[str]:
    """A loopback server with one answer to everything; `wait` is set once it was asked, and it then stays silent."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if wait is not None:
                wait.set()
                done.wait(PATIENCE)
                return
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815 - the name http.server looks for

        def log_message(self, *_: object) -> None:
            pass

    done = threading.Event()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"openai:m@http://127.0.0.1:{running.server_port}/v1"
        finally:
            done.set()
            running.shutdown()
            thread.join()


def test_a_refused_key_names_the_variable(call: Call, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KNOWGATE_API_KEY", "secret-key")
    with server(401, b"{}") as spec:
        outcome = call("decide", "who?", "--model", spec)
    assert outcome.code == 1
    assert "refused the API key in the environment variable KNOWGATE_API_KEY" in outcome.err
    assert "secret-key" not in outcome.err


def test_a_reply_that_is_no_json_is_an_error(call: Call):
    with server(200, b"<html>[red]") as spec:
        outcome = call("decide", "who?", "--model", spec)
    assert (outcome.code, outcome.out) == (1, "")
    assert "is not valid JSON" in outcome.err


@pytest.fixture
def can_be_interrupted():
    """A shell starts what runs in the background with interrupts ignored, and so would be what it starts in turn."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("can_be_interrupted")
def test_interrupting_gives_one_line_and_130():
    asked = threading.Event()
    command = [*COMMAND, "ask", "who?", "--gate", "never", "--model"]
    with (
        server(200, b"", wait=asked) as spec,
        child([*command, spec], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        until(asked.is_set, process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=0.9 * RetryPolicy().timeout)  # the silent server is not waited for
    assert (process.returncode, out, err) == (130, "", "Error: interrupted.\n")


@pytest.mark.parametrize("form", [["--json"], []])
def test_a_reader_that_goes_away_is_no_error(form: list[str]):
    questions = "".join(f"question {number}\n" for number in range(2000))
    pipe = subprocess.PIPE
    with child([*COMMAND, "decide", "--model", "fake", *form], stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        feeder = threading.Thread(target=_feed, args=(process.stdin, questions.encode()))
        feeder.start()
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        feeder.join()
        assert process.wait(PATIENCE) == 0


def _feed(stdin: object, data: bytes) -> None:
    try:
        stdin.write(data)  # type: ignore[attr-defined]
        stdin.close()  # type: ignore[attr-defined]
    except BrokenPipeError:
        pass


def test_json_on_a_terminal_without_utf8_is_still_json():
    done = subprocess.run(
        [*COMMAND, "decide", "你好é", "--model", "fake", "--json"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        check=True,
    )
    assert json.loads(done.stdout)["question"] == "你好é"
