"""Server processes: signals, workers, crashes and reloading."""

import asyncio
import errno
import itertools
import os
import signal
import socket
import sqlite3
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

import knowgate as kg
from knowgate.data.history import open_history
from knowgate.server.app import create_app
from knowgate.server.options import ServeOptions
from knowgate.server.worker_supervisor import HANG_SECONDS
from tests.server.conftest import KNOWN, UNKNOWN
from tests.server.test_chat import ask, events
from tests.support.params import also_slow
from tests.support.postgres_server import postgres_server
from tests.support.processes import until
from tests.support.served import is_healthy, served
from tools.local_server import run_server

pytestmark = pytest.mark.process
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def arguments(stub, invented, tmp_path):
    """Arguments of a server that always retrieves and has a decision log."""
    stored = str(tmp_path / "d.db")
    return ["--upstream", stub.url, "--gate", "always", "--docs", str(invented.docs), "--decisions", stored]


# --- shutdown and crashes --------------------------------------------------------------------------------------


def test_sigterm_finishes_streams_and_writes_all_rows(stub, arguments, tmp_path):
    stub.slow = 0.4
    found = []
    with served(tmp_path, *arguments) as server:
        asking = threading.Thread(target=lambda: found.append(ask(server.address, stream=True)))
        asking.start()
        until(lambda: bool(stub.bodies))
        server.process.send_signal(signal.SIGTERM)
        asking.join()
        server.wait()
    chunks = events(found[0])
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert rows(tmp_path / "d.db") == {chunks[0]["knowgate"]["id"]}


@pytest.mark.parametrize("workers", [also_slow("1"), "2"])
def test_sigterm_refuses_new_connections_while_streams_end_and_exits_with_0(stub, arguments, tmp_path, workers):
    stub.slow = 0.7
    found = []
    with served(tmp_path, *arguments, "--workers", workers) as server:
        asking = threading.Thread(target=lambda: found.append(ask(server.address, stream=True)))
        asking.start()
        until(lambda: bool(stub.bodies))
        server.process.send_signal(signal.SIGTERM)
        until(lambda: is_refused(server.address))
        assert asking.is_alive()
        asking.join()
        assert server.wait() == 0
    assert events(found[0])[-1]["choices"][0]["finish_reason"] == "stop"


def is_refused(address):
    """Return whether the server refuses a connection. One that is not answered is a failure."""
    try:
        httpx.get(f"{address}/health", timeout=2)
    except httpx.ConnectError:
        return True
    except (httpx.ReadError, httpx.RemoteProtocolError):  # it was accepted just before the port was closed
        return False
    return False


def rows(path):
    file = sqlite3.connect(path)
    try:
        return {row[0] for row in file.execute("SELECT id FROM decisions")}
    finally:
        file.close()


def test_acknowledged_feedback_survives_sigkill_under_load(arguments, tmp_path):
    acknowledged, over = [], threading.Event()

    def rate(number):
        with httpx.Client(timeout=60) as client:
            while not over.is_set():
                try:
                    body = {"model": "m", "messages": [{"role": "user", "content": UNKNOWN}]}
                    id = client.post(f"{server.address}/v1/chat/completions", json=body).headers["x-knowgate-id"]
                    feedback = {"id": id, "rating": "up", "comment": f"{number}"}
                    if client.post(f"{server.address}/v1/feedback", json=feedback).status_code == 200:
                        acknowledged.append(id)
                except httpx.TransportError:
                    return

    with served(tmp_path, *arguments) as server, ThreadPoolExecutor(4) as pool:
        working = [pool.submit(rate, number) for number in range(4)]
        until(lambda: len(acknowledged) >= 40)
        server.process.send_signal(signal.SIGKILL)
        server.wait()
        over.set()
        for item in working:
            item.result()
    file = sqlite3.connect(tmp_path / "d.db")
    stored = {row[0] for row in file.execute("SELECT decision FROM feedback")}
    decided = {row[0] for row in file.execute("SELECT id FROM decisions")}
    assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    file.close()
    assert set(acknowledged) <= stored
    assert set(acknowledged) <= decided


@pytest.mark.parametrize("stream", [also_slow(False), True])
def test_acknowledged_decisions_survive_sigkill_with_durable(arguments, tmp_path, stream):
    acknowledged, over = [], threading.Event()

    def send():
        while not over.is_set():
            try:
                acknowledged.append(ask(server.address, stream=stream).headers["x-knowgate-id"])
            except (httpx.TransportError, KeyError):
                return

    with served(tmp_path, *arguments, "--durable") as server, ThreadPoolExecutor(4) as pool:
        working = [pool.submit(send) for _ in range(4)]
        until(lambda: len(acknowledged) >= 60)
        server.process.send_signal(signal.SIGKILL)
        server.wait()
        over.set()
        for item in working:
            item.result()
    assert set(acknowledged) <= rows(tmp_path / "d.db")


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_acknowledged_history_labels_survive_sigkill_under_load(stub, invented, tmp_path, kind):
    """A label is in the history as soon as it is acknowledged, whatever happens afterwards."""
    stored, history = str(tmp_path / "d.db"), str(tmp_path / "h.db")
    if kind == "postgresql":
        stored = history = postgres_server().address()
    arguments = ["--upstream", stub.url, "--gate", "never", "--docs", str(invented.docs)]
    arguments += ["--decisions", stored, "--keep-questions", "--log", history]
    labeled_questions = []

    def rate(number):
        with httpx.Client(timeout=60) as client:
            for turn in itertools.count():
                question = f"What is the capital of Land {number} of {turn}?"
                try:
                    body = {"model": "m", "messages": [{"role": "user", "content": question}]}
                    id = client.post(f"{server.address}/v1/chat/completions", json=body).headers["x-knowgate-id"]
                    feedback = client.post(f"{server.address}/v1/feedback", json={"id": id, "rating": "up"})
                    if feedback.status_code == 200 and feedback.json()["learnt"]:
                        labeled_questions.append(question)
                except httpx.TransportError:
                    return

    module = "tests.support.hashed_knowgate"
    with served(tmp_path, *arguments, module=module) as server, ThreadPoolExecutor(4) as pool:
        working = [pool.submit(rate, number) for number in range(4)]
        until(lambda: len(labeled_questions) >= 40)
        server.process.send_signal(signal.SIGKILL)
        server.wait()
        for item in working:
            item.result()
    found = {item.question for item in open_history(history).entries()}
    assert set(labeled_questions) <= found


# --- several workers ------------------------------------------------------------------------------


def test_workers_share_decision_log_metrics_and_dashboard(arguments, tmp_path):
    with served(tmp_path, *arguments, "--workers", "2") as server:
        with ThreadPoolExecutor(8) as pool:
            replies = list(pool.map(lambda _: ask(server.address), range(40)))
        ids = [reply.headers["x-knowgate-id"] for reply in replies]
        for id in ids:  # one worker writes after its response, another one reads
            until(lambda id=id: httpx.get(f"{server.address}/v1/decisions/{id}", timeout=60).status_code == 200)

        def read_statistics():
            """Read the dashboard several times: every connection may reach another worker."""
            pages = [httpx.get(f"{server.address}/v1/dashboard", timeout=60).json() for _ in range(8)]
            return [(page["figures"]["requests"], page["figures"]["arms"]["all"]["retrieved"]) for page in pages]

        until(lambda: read_statistics() == [({"2xx": 40}, 40)] * 8)
        metrics = httpx.get(f"{server.address}/metrics", timeout=30).text
    assert 'knowgate_requests_total{route="/v1/chat/completions",status="200"} 40.0' in metrics
    assert rows(tmp_path / "d.db") == set(ids)


def test_workers_without_a_decision_log_share_metrics_and_dashboard(stub, invented, tmp_path):
    arguments = ["--upstream", stub.url, "--gate", "always", "--docs", str(invented.docs), "--shadow"]
    with served(tmp_path, *arguments, "--workers", "2") as server:
        assert [ask(server.address).status_code for _ in range(10)] == [200] * 10

        def read_counts():
            """Read the counts several times: every connection may reach another worker."""
            pages = [httpx.get(f"{server.address}/v1/dashboard", timeout=60).json() for _ in range(6)]
            return [page["figures"]["requests"] for page in pages]

        until(lambda: read_counts() == [{"2xx": 10}] * 6)
        learning, metrics = (httpx.get(f"{server.address}{path}", timeout=60) for path in ("/v1/learning", "/metrics"))
    assert learning.json()["arms"]["a"]["audits"] == {}
    assert 'knowgate_requests_total{route="/v1/chat/completions",status="200"} 10.0' in metrics.text


def test_no_worker_shows_a_question_that_another_one_forgot(stub, invented, tmp_path):
    arguments = ["--upstream", stub.url, "--gate", "always", "--docs", str(invented.docs), "--keep-questions"]
    with served(tmp_path, *arguments, "--workers", "2") as server, ThreadPoolExecutor(8) as pool:

        def send(question):
            body = {"messages": [{"role": "user", "content": question}]}
            httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=60)

        def list_questions():
            """Read the dashboard of both workers, which show different decisions, and return the questions of each."""
            questions = {}
            while len(questions) < 2:
                list(pool.map(send, [KNOWN] * 8))
                replies = pool.map(lambda _: httpx.get(f"{server.address}/v1/dashboard", timeout=60), range(16))
                pages = [reply.json()["recent"] for reply in replies]
                questions = {rows[0]["id"]: {row["question"] for row in rows} for rows in pages if rows}
            return list(questions.values())

        def both_show_it():
            list(pool.map(send, [UNKNOWN] * 8))
            return list_questions() == [{UNKNOWN, KNOWN}] * 2

        until(both_show_it)
        reply = httpx.post(f"{server.address}/v1/forget", json={"question": UNKNOWN.upper()}, timeout=60)
        assert reply.json()["forgotten"] is True
        assert list_questions() == [{KNOWN}] * 2
        until(both_show_it)  # later requests with the question are shown


def test_audits_are_summed_over_all_workers(arguments, tmp_path):
    audits = ["--audit", "1", "--audit-budget", "10000"]
    with served(tmp_path, *arguments, *audits, "--workers", "2") as server:
        count = 20 + wait_for_two_serving_workers(server, tmp_path)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda _: ask(server.address), range(20)))

        def read_counts():
            """Read the counts several times: every connection may reach another worker."""
            arms = [httpx.get(f"{server.address}/v1/learning", timeout=60).json()["arms"] for _ in range(8)]
            metrics = [httpx.get(f"{server.address}/metrics", timeout=60).text for _ in range(8)]
            lines = [line for text in metrics for line in text.splitlines() if line.startswith("knowgate_audits_total")]
            return [arm["a"]["audits"] for arm in arms], lines

        line = f'knowgate_audits_total{{arm="a",result="loss"}} {count}.0'
        until(lambda: read_counts() == ([{"loss": count}] * 8, [line] * 8))


def wait_for_two_serving_workers(server, folder):
    """Send requests until two workers have written their statistics, which they do after a request. Return how many."""
    replies = []

    def both_have_written():
        replies.append(ask(server.address))
        file = sqlite3.connect(folder / "d.db")
        (count,) = file.execute("SELECT COUNT(*) FROM figures").fetchone()
        file.close()
        return count == 2

    until(both_have_written)
    return len(replies)


@linux
def test_a_worker_that_cannot_be_replaced_leaves_the_other_one_serving(arguments, invented, tmp_path):
    with served(tmp_path, *arguments, "--workers", "2") as server:
        wait_for_two_serving_workers(server, tmp_path)

        def list_problems():
            return httpx.get(f"{server.address}/ready", timeout=60).json()["degraded"]

        docs = Path(invented.docs)
        docs.rename(tmp_path / "away")
        os.kill(list_workers(server)[0], signal.SIGKILL)
        until(lambda: list_problems() == ["1 of 2 workers cannot start; the server's log says why"], server.process)
        assert ask(server.address).status_code == 200
        (tmp_path / "away").rename(docs)
        until(lambda: list_problems() == [], server.process)
        assert len(list_workers(server)) == 2


@pytest.mark.slow
def test_workers_that_cannot_start_stop_the_server_with_a_message(stub, invented, tmp_path):
    arguments = ["--upstream", stub.url, "--gate", "nosuch", "--docs", str(invented.docs), "--workers", "2"]
    with served(tmp_path, *arguments, is_up=False) as server:
        assert server.wait() == 1
        assert "nosuch" in server.said.read_text()


def list_workers(server):
    """Return the process ids of the workers, which are not the resource tracker of Python."""
    children = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
    return [int(id) for id in children if b"spawn_main" in Path(f"/proc/{id}/cmdline").read_bytes()]


@pytest.mark.parametrize("workers", [also_slow("1"), "2"])
def test_a_busy_port_ends_the_server_with_one_sentence(arguments, tmp_path, workers):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        with served(tmp_path, *arguments, "--workers", workers, "--port", port, is_up=False) as server:
            assert server.wait() == 1
    (message,) = server.said.read_text().splitlines()
    assert f"cannot listen on 127.0.0.1:{port}" in message


@linux
def test_workers_end_after_their_parent_was_killed(arguments, tmp_path):
    with served(tmp_path, *arguments, "--workers", "2") as server:
        server.process.kill()
        server.wait()
        until(lambda: not is_healthy(server.address))


@linux
def test_a_killed_worker_is_replaced_with_a_line_in_the_log(arguments, tmp_path):
    with served(tmp_path, *arguments, "--workers", "2") as server:
        worker = list_workers(server)[0]
        os.kill(worker, signal.SIGKILL)
        until(lambda: f"Worker process {worker} ended unexpectedly" in server.said.read_text())


@linux
def test_the_open_breakers_of_killed_workers_are_no_longer_reported(invented, tmp_path):
    arguments = ["--upstream", "http://127.0.0.1:1/v1", "--gate", "never", "--docs", str(invented.docs)]
    with served(tmp_path, *arguments, "--workers", "2") as server:

        def is_open():
            text = httpx.get(f"{server.address}/metrics", timeout=60).text
            return 'knowgate_breaker_open{part="upstream"} 1.0' in text

        while ask(server.address).status_code != 503:  # each worker opens its breaker after five failures
            pass
        until(is_open)
        for worker in list_workers(server):
            os.kill(worker, signal.SIGKILL)
            until(lambda worker=worker: f"Worker process {worker} ended unexpectedly" in server.said.read_text())
        until(lambda: is_healthy(server.address))
        until(lambda: not is_open())


@linux
def test_a_worker_that_is_paused_for_seconds_lives_and_one_that_ends_meanwhile_is_replaced_at_once(arguments, tmp_path):
    with served(tmp_path, *arguments, "--workers", "2") as server:
        until(lambda: len(list_workers(server)) == 2)
        worker = list_workers(server)[0]
        os.kill(worker, signal.SIGSTOP)  # as on a machine that is too busy to run it
        time.sleep(7)
        assert worker in list_workers(server)
        assert "ended unexpectedly" not in server.said.read_text()
        start = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        until(lambda: f"Worker process {worker} ended unexpectedly" in server.said.read_text())
    assert time.monotonic() - start < HANG_SECONDS - 10


@linux
def test_sigterm_ends_a_reload_and_several_sighups_are_one_more_reload(arguments, tmp_path):
    with served(tmp_path, *arguments, "--workers", "2") as server:
        until(lambda: len(list_workers(server)) == 2)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: len(list_workers(server)) == 3)
        for _ in range(5):
            server.process.send_signal(signal.SIGHUP)
        server.process.send_signal(signal.SIGTERM)
        start = time.monotonic()
        assert server.wait() == 0
        assert time.monotonic() - start < 20  # one reload takes seconds for each worker


# --- reloading --------------------------------------------------------------------------


def test_sighup_reloads_settings_while_requests_keep_theirs(stub, invented, tmp_path):
    file = tmp_path / "knowgate.toml"
    file.write_text(f'gate = "never"\ndocs = "{invented.docs}"\n[serve]\nupstream = "{stub.url}"\n')
    with served(tmp_path, "--config", str(file)) as server, ThreadPoolExecutor(1) as pool:
        stub.slow = 2.0
        begun = pool.submit(ask, server.address)
        until(lambda: bool(stub.bodies))
        file.write_text(file.read_text().replace("never", "always"))
        server.process.send_signal(signal.SIGHUP)
        until(lambda: httpx.get(f"{server.address}/ready").json()["gate"] == "always")
        stub.slow = 0.0
        after, before = ask(server.address).json()["knowgate"], begun.result().json()["knowgate"]
    assert (before["gate"], before["retrieve"]) == ("never", False)
    assert (after["gate"], after["retrieve"]) == ("always", True)


@linux
@pytest.mark.parametrize("workers", [also_slow("1"), "2"])
def test_sighup_while_the_server_starts_does_not_end_it(arguments, tmp_path, workers):
    with served(tmp_path, *arguments, "--workers", workers, is_up=False) as server:
        status = Path(f"/proc/{server.process.pid}/status")
        until(lambda: "SigBlk:\t0000000000000001" in status.read_text())  # Python has started knowgate
        while not is_healthy(server.address):
            os.killpg(server.process.pid, signal.SIGHUP)  # also to the workers
            time.sleep(0.2)
            assert server.process.poll() is None
    assert "ended unexpectedly" not in server.said.read_text()


def test_invalid_new_settings_keep_the_old_ones(invented, stub):
    given = [kg.PipelineOptions(gate="nosuch", docs=invented.docs)]
    settings, options = kg.PipelineOptions(gate="never", docs=invented.docs), ServeOptions(upstream=stub.url)
    app = create_app(settings, options, read_settings=lambda: given[0])
    with run_server(app) as address:
        assert reload(app, address) is False
        assert ask(address).json()["knowgate"]["gate"] == "never"
        given[0] = kg.PipelineOptions(gate="always", docs=invented.docs, log="history.db")  # needs a restart
        assert reload(app, address) is False
        given[0] = kg.PipelineOptions(gate="always", docs=invented.docs, threshold=0.25)
        assert reload(app, address) is True
        assert ask(address).json()["knowgate"]["threshold"] == 0.25


def test_audits_of_the_old_gate_do_not_count_for_the_new_one(invented, stub, tmp_path):
    options = ServeOptions(upstream=stub.url, decisions=str(tmp_path / "d.db"), audit=1.0)
    again = kg.PipelineOptions(gate="always", docs=invented.docs)
    app = create_app(kg.PipelineOptions(gate="never", docs=invented.docs), options, read_settings=lambda: again)
    with run_server(app) as address:
        ask(address)
        until(lambda: httpx.get(f"{address}/v1/learning").json()["arms"]["a"]["loss"]["drawn"] == 1)
        assert reload(app, address) is True
        found = httpx.get(f"{address}/v1/learning").json()["arms"]["a"]
        assert (found["gate"], found["loss"]["drawn"]) == ("always", 0)
        assert ask(address).headers["x-knowgate-retrieve"] == "true"
        assert 'knowgate_loss_low{arm="a"} 0.0' in httpx.get(f"{address}/metrics").text


def reload(app, address):
    """Reload the settings in the event loop of the server, as the signal does."""
    httpx.get(f"{address}/health")
    done = asyncio.run_coroutine_threadsafe(app.state.reloader.reload(), app.state.reloader.loop)
    return done.result(60)


@linux
def test_reloading_closes_the_files_of_the_old_index(stub, tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    settings = kg.PipelineOptions(gate="always", docs=docs)

    def count_files():
        ask(address)
        files = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum("passages.jsonl" in str(file) or file.suffix == ".npy" or "deleted" in str(file) for file in files)

    (docs / "a.md").write_text("Mira runs the canteen.")
    app = create_app(settings, ServeOptions(upstream=stub.url), read_settings=lambda: settings)
    with run_server(app) as address:
        before = count_files()
        for number in range(4):
            (docs / "a.md").write_text(f"Mira runs {number} canteens.")
            assert reload(app, address) is True
            assert count_files() <= before


def test_a_reload_that_fails_for_want_of_descriptors_is_logged(invented, stub, caplog):
    def read_settings():
        raise OSError(errno.EMFILE, "Too many open files")

    settings = kg.PipelineOptions(gate="always", docs=invented.docs)
    app = create_app(settings, ServeOptions(upstream=stub.url), read_settings=read_settings)
    with run_server(app) as address:
        assert reload(app, address) is False
        assert ask(address).json()["knowgate"]["gate"] == "always"
    assert "the old ones stay in effect: OSError: [Errno 24] Too many open files" in caplog.text


def test_reloading_keeps_the_loaded_model(invented):
    settings = kg.PipelineOptions(model=invented.model, docs=invented.docs, gate="never")
    again = kg.PipelineOptions(model=invented.model, docs=invented.docs, gate="always")
    app = create_app(settings, ServeOptions(), read_settings=lambda: again)
    model = app.state.service.gate_service.rag.model
    with run_server(app) as address:
        assert reload(app, address) is True
        assert app.state.service.gate_service.rag.model is model
        assert ask(address, model="knowgate").json()["knowgate"]["retrieve"] is True


# --- slow clients -------------------------------------------------------------------------------


def test_slow_connections_do_not_block_others(serve, stub):
    address, _ = serve(gate="never")
    host, port = address.removeprefix("http://").split(":")
    wires = [socket.create_connection((host, int(port)), timeout=30) for _ in range(100)]
    try:
        for wire in wires:
            wire.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 500\r\n\r\n{")
        assert [ask(address).status_code for _ in range(5)] == [200] * 5
    finally:
        for wire in wires:
            wire.close()
    until(lambda: httpx.get(f"{address}/ready").status_code == 200)
