"""The share of changed answers: bounds, failed audits, and alarms for all keys or for one."""

import gzip
import json
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from benchmarks.alarm import Population, find_alarms, simulate
from knowgate.gates import load_gate
from knowgate.gates.calibration.threshold_calibration import calibrate
from knowgate.server.auth.api_keys import add_key
from knowgate.server.learning.learner import _build_arm
from knowgate.server.learning.loss_monitor import LossMonitor
from knowgate.server.options import ServeOptions
from tests.server.conftest import KNOWN
from tests.server.test_learning import audit_options, wait_until
from tests.support.extras import needs_train
from tests.support.hand_gate import varied_rows, write_gate, write_rows


def add_audits(monitor, owner, values):
    for value in values:
        monitor.add_audit(value, owner)


def test_failed_audits_widen_the_interval_and_raise_no_alarm():
    rng, misses = np.random.default_rng(0), 0
    for _ in range(100):
        monitor = LossMonitor(0.9)
        for changed in rng.random(300) < 0.3:
            if rng.random() < (0.8 if changed else 0.3):  # changed answers fail more often
                monitor.add_failure()
            else:
                monitor.add_audit(float(changed))
        misses += not monitor.low <= 0.3 <= monitor.high
        assert not monitor.alarm
    assert misses <= 5


def test_one_key_raises_the_alarm_for_itself_only():
    monitor = LossMonitor(0.1)
    for _ in range(300):
        add_audits(monitor, "mallory", [1.0])
        add_audits(monitor, "victim", [0.0])
    assert "for key 'mallory'" in monitor.get_alarm("mallory")
    assert (monitor.alarm, monitor.get_alarm("victim"), monitor.get_alarm("new")) == ("", "", "")
    assert list(monitor.key_alarms) == ["mallory"]


def test_several_keys_raise_the_alarm_for_all_and_the_alarm_names_the_first_of_them():
    monitor = LossMonitor(0.1)
    for _ in range(60):
        add_audits(monitor, "one", [1.0, 1.0])
        add_audits(monitor, "two", [1.0, 0.0])
        add_audits(monitor, "three", [0.0])
    assert "most of them for key 'one': 120 of 180" in monitor.alarm_with_key
    assert monitor.to_json()["loss"]["alarm"] == monitor.alarm_with_key
    assert monitor.get_alarm("three") == monitor.alarm
    assert "'one'" not in monitor.alarm  # other keys read this reason in their responses


def test_a_server_without_keys_has_one_alarm():
    monitor = LossMonitor(0.1)
    add_audits(monitor, "", [1.0] * 20)
    assert monitor.alarm == "skipping changes more than 10 % of the answers, with 95 % confidence"
    monitor.reset_loss()
    assert (monitor.alarm, monitor.loss.n) == ("", 0)


@pytest.mark.parametrize("stored", [[0.0], [1.0], [0.0] * 300])
def test_audits_of_an_earlier_key_do_not_prevent_the_alarm_of_a_server_without_keys(stored):
    monitor = LossMonitor(0.1)
    add_audits(monitor, "anna", stored)
    assert not monitor.alarm
    add_audits(monitor, "", [1.0] * 40)
    assert monitor.get_alarm("").startswith("skipping changes more than 10 % of the answers, with 95 % confidence")


def test_audits_of_an_earlier_key_raise_no_alarm_on_a_server_without_keys():
    monitor = LossMonitor(0.1)
    add_audits(monitor, "anna", [1.0] * 40)
    add_audits(monitor, "", [0.0] * 5)
    assert monitor.get_alarm("") == ""


def test_one_client_cannot_switch_the_gate_off_for_others(serve, stub, tmp_path):
    file = tmp_path / "keys.json"
    keys = {name: add_key(file, name, admin=name == "admin") for name in ("mallory", "victim", "admin")}
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
    address, _ = serve(gate="never", options=audit_options(tmp_path, max_changed=0.1, keys=str(file)))

    def send(name):
        body = {"model": "m", "messages": [{"role": "user", "content": KNOWN}]}
        return httpx.post(f"{address}/v1/chat/completions", json=body, headers=headers[name], timeout=30).headers

    wait_until(lambda: "x-knowgate-mode" in send("mallory"))
    assert "x-knowgate-mode" not in send("victim")
    loss = httpx.get(f"{address}/v1/learning", headers=headers["admin"]).json()["arms"]["a"]["loss"]
    assert loss["alarm"] == ""
    assert "for key 'mallory'" in loss["keys"]["mallory"]["alarm"]
    problems = httpx.get(f"{address}/ready").json()["degraded"]
    assert any(text.startswith("alarm for gate never: API keys whose requests all retrieve: 1 (") for text in problems)
    assert 'knowgate_key_alarms{arm="a"} 1.0' in httpx.get(f"{address}/metrics", headers=headers["admin"]).text


def test_a_gate_without_a_bound_has_no_alarm_and_says_what_to_set(serve, caplog):
    _, app = serve(gate="never")
    arm = _build_arm("a", app.state.service.gate_service.rag, "never", ServeOptions(audit=0.1, decisions="d.db"))
    assert arm.monitor.max_changed is None
    assert "Set `max_changed` (a setting and a flag) to the maximum share" in caplog.text


def make_population(changed_share=0.8, n=4000):
    """A gate whose need rises with the risk: harmed and changed questions are rare where the need is low."""
    rng = np.random.default_rng(1)
    needs = rng.random(n)
    harmed = rng.random(n) < 0.4 * needs
    right = rng.random(n) < 0.5
    closed_book_right, open_book_right = right & ~harmed, right | harmed
    differs = harmed | (rng.random(n) < changed_share * needs)
    return Population("made up", needs, closed_book_right, open_book_right, differs)


@needs_train
def test_the_alarm_is_quiet_while_the_guarantee_holds_and_finds_twice_the_loss(monkeypatch):
    monkeypatch.setattr("benchmarks.alarm.STEADY_REQUESTS", 1000)
    rate = simulate(make_population(), 0.1, 2000, 20)
    assert rate.runs >= 15
    assert rate.false_alarms <= 0.05
    assert rate.former_false_alarms > 0.5  # the guaranteed loss is no bound on changed answers
    assert rate.found == 1.0


def test_the_simulation_runs_the_test_of_the_server():
    rng = np.random.default_rng(0)
    changed, limits = rng.random((4, 200)) < np.array([[0.1], [0.2], [0.3], [0.8]]), np.array([0.1, 0.1, 0.15, 0.2])
    expected = []
    for limit, values in zip(limits, changed, strict=True):
        monitor, delay = LossMonitor(float(limit)), np.inf
        for number, value in enumerate(values, 1):
            monitor.add_audit(float(value))
            delay = min(delay, number if monitor.is_violated else np.inf)
        expected.append(delay)
    assert find_alarms(limits, 0.05, changed).tolist() == expected
    assert np.isfinite(expected).tolist() == [False, True, True, True]


@pytest.mark.parametrize("texts", [True, False])
def test_populations_of_the_simulation_use_recorded_answers(tmp_path, monkeypatch, texts):
    from benchmarks import alarm

    monkeypatch.setenv("KNOWGATE_BENCH", str(tmp_path))
    if texts:
        (tmp_path / "gate_llama3_8b").mkdir()
        rows = alarm.load_label_table([alarm.RUNS / "llama3.1-8b" / "gate_llama3_8b-test"], layers=()).rows
        with gzip.open(tmp_path / "gate_llama3_8b" / "test.jsonl.gz", "wt") as file:
            for row in rows:
                meta = {"pred_no_retrieval": "Paris", "pred_one_retrieval": "It is Paris."}
                file.write(json.dumps({"id": row.id, "meta": meta}) + "\n")
    names = [population.name.partition(",")[0] for population in alarm.load_populations()]
    assert names == ["Qwen2.5-Coder-1.5B"] * 3 + ["Llama-3.1-8B"] * texts


@pytest.mark.parametrize(
    ("threshold", "max_changed", "applies"), [(None, None, True), (0.9, None, False), (None, 0.3, False)]
)
def test_the_alarm_tests_the_bound_that_calibrate_recorded(tmp_path, threshold, max_changed, applies):
    folder = write_gate(tmp_path / "gate")
    run = write_rows(tmp_path / "run", varied_rows(300))
    bound = calibrate(folder, run, retrieval_rate=0.2).evidence["changed"]["bound"]
    gate = load_gate(str(folder))
    rag = SimpleNamespace(
        gate=gate, bound_gate=gate, threshold=threshold, retriever=None, guarantee_violations=(), k=1,
        model=SimpleNamespace(fingerprint="m"), prompts=SimpleNamespace(fingerprint="p"), bound_arbiter=None,
        second_look=None, reranker=None,
        used_threshold=gate.threshold if threshold is None else threshold,
    )  # fmt: skip
    monitor = _build_arm("a", rag, "fusion", ServeOptions(audit=0.1, decisions="d.db", max_changed=max_changed)).monitor
    assert monitor.max_changed == (pytest.approx(bound) if applies else max_changed)
    assert monitor.test_delta == pytest.approx(0.025 if applies else 0.05)  # a bound is itself wrong with 2.5 %
