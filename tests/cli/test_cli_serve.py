"""`knowgate serve` until it starts the server, `doctor --serve`, and `keys`."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from knowgate.errors import BadSetting
from knowgate.pipeline.settings import PipelineOptions
from knowgate.server.options import load_serve_options
from tests.cli.conftest import Call


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list:
    """The arguments of `run_server`, which only reports that the server has started."""
    import knowgate.cli.serve as command

    found = []

    def run_server(*given):
        found.append(given[:3])
        given[3]()

    monkeypatch.setattr(command, "run_server", run_server)
    return found


def test_nothing_is_announced_if_the_server_does_not_start(call: Call, docs: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        outcome = call(
            "serve", "--upstream", "http://b/v1", "--docs", docs, "--gate", "never", "--port", taken.getsockname()[1]
        )
    assert outcome.code != 0
    assert "Serving" not in outcome.err


def test_ctrl_c_stops_the_server_without_an_error(call: Call, docs: Path, monkeypatch: pytest.MonkeyPatch):
    def run_server(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("knowgate.cli.serve.run_server", run_server)
    outcome = call("serve", "--upstream", "http://b/v1", "--docs", docs)
    assert (outcome.code, outcome.err) == (0, "Stopped.\n")


def test_the_demo_serves_the_handbook_and_prints_requests_to_try(call: Call, started: list):
    said = call("serve", "--demo", "--port", "8123").err
    settings, options, _ = started[0]
    assert (settings.model, settings.docs.name, options.port) == ("smollm", "handbook", 8123)
    assert "curl http://127.0.0.1:8123/v1/chat/completions" in said


def test_flags_become_options_of_the_server(call: Call, started: list, docs: Path):
    call("serve", "--upstream", "http://b/v1", "--first-byte-seconds", "30", "--docs", docs)
    assert (started[0][1].upstream, started[0][1].first_byte_seconds) == ("http://b/v1", 30.0)


def test_the_startup_message_contains_no_login(call: Call, started: list, docs: Path):
    said = call("serve", "--upstream", "http://user:secret@a/v1", "--docs", docs).err
    assert "http://" in said
    assert "secret" not in said


def test_settings_can_be_reloaded(call: Call, started: list, docs: Path, tmp_path: Path):
    file = tmp_path / "knowgate.toml"
    file.write_text("threshold = 0.5\n", encoding="utf-8")
    call("serve", "--docs", docs, "--k", "2")
    file.write_text("threshold = 0.25\n", encoding="utf-8")
    again = started[0][2]()
    assert (again.threshold, again.k, again.docs) == (0.25, 2, docs)


# --- doctor ---------------------------------------------------------------------------------------


def test_doctor_reports_a_server_that_can_start(call: Call, docs: Path, tmp_path: Path):
    lines = [f'docs = "{docs}"', 'model = "fake"', "[serve]", "port = 0", 'decisions = "decisions.db"']
    (tmp_path / "knowgate.toml").write_text("\n".join(lines), encoding="utf-8")
    outcome = call("doctor", "--serve")
    assert outcome.code == 0
    assert "Next: knowgate serve" in outcome.out
    assert not Path("decisions.db").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('gate = "nonsense"', "unknown gate 'nonsense'"),
        ('rules = "nowhere.toml"', "nowhere.toml"),
        ('arbiter = "nowhere"', "nowhere"),
        ('[serve]\ngate_b = "nonsense"', "unknown gate 'nonsense'"),
        ("[serve]\naudit = 0.1", "`audit` needs a decision log"),
        ('[serve]\ndecisions = "nowhere/decisions.db"', "cannot be opened"),
    ],
)
def test_doctor_reports_a_component_that_cannot_be_loaded(call: Call, docs: Path, tmp_path: Path, line, message):
    table = "" if "[serve]" in line else "\n[serve]"
    lines = [f'docs = "{docs}"', 'model = "fake"', line + table, "port = 0"]
    (tmp_path / "knowgate.toml").write_text("\n".join(lines), encoding="utf-8")
    outcome = call("doctor", "--serve")
    assert outcome.code == 1
    assert message in " ".join(outcome.out.split())


def test_doctor_reports_what_keeps_a_server_from_starting(call: Call, tmp_path: Path):
    with socket.socket() as taken, socket.socket() as closed:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        closed.bind(("127.0.0.1", 0))  # nobody listens there
        port, gone = taken.getsockname()[1], closed.getsockname()[1]
        lines = ['docs = "nowhere"', "[serve]", f"port = {port}", f'upstream = "http://u:secret@127.0.0.1:{gone}/v1"']
        (tmp_path / "other.toml").write_text("\n".join(lines), encoding="utf-8")
        outcome = call("doctor", "--serve", "--config", tmp_path / "other.toml")
    assert outcome.code == 1
    assert "Not ready: 3 broken" in outcome.out
    assert "knowgate serve --port ANOTHER" in outcome.out
    assert "secret" not in outcome.out


def test_doctor_reports_invalid_settings(call: Call, tmp_path: Path):
    (tmp_path / "knowgate.toml").write_text("[serve]\nprot = 3\n", encoding="utf-8")
    outcome = call("doctor", "--serve")
    assert (outcome.code, "unknown option 'prot'" in outcome.out) == (1, True)


def test_a_pipeline_setting_in_the_table_of_the_server_is_reported_with_its_place() -> None:
    with pytest.raises(BadSetting, match=r"has no option 'docs'\. Move 'docs' to the top, before the first table"):
        load_serve_options(PipelineOptions(serve={"docs": "my-docs", "port": 8081}))


# --- keys -----------------------------------------------------------------------------------------


def test_a_key_is_created_with_its_rate(call: Call, tmp_path: Path):
    call("keys", "add", "app", "--rate", "6000")
    (key,) = json.loads((tmp_path / "keys.json").read_text(encoding="utf-8"))["keys"]
    assert key["rate"] == 6000
    assert "6,000" in call("keys", "list").out
