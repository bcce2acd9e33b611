"""Commands that read the decision log: `knowgate replay` and `knowgate refit`."""

import asyncio
import json
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from knowgate.cli.start import format_serve_command
from knowgate.evaluation.cost import compare_traffic_costs
from knowgate.evaluation.first_run.gate_selection import GateChoice
from knowgate.evaluation.replay import Prices, Traffic, replay_traffic
from knowgate.evaluation.server_log import read_logged_questions, read_server_log
from knowgate.pipeline.settings import PipelineOptions
from knowgate.server.database import DECISION_TABLES, _to_sqlite
from knowgate.server.learning.audit_store import AuditRecord, AuditStore
from knowgate.server.telemetry.decision_log import DecisionLog
from tests.cli.conftest import call  # noqa: F401 - a fixture
from tests.server.conftest import KNOWN
from tests.server.test_chat import ask
from tests.server.test_learning import wait_for_audits
from tests.support.extras import needs_train
from tests.support.hand_gate import write_gate
from tests.support.invented import write_invented


@pytest.fixture
def many(tmp_path):
    return write_invented(tmp_path / "many", 40)


def served(serve, many, tmp_path, **options):
    """A log of forty questions, half of which the model knows."""
    file = tmp_path / "d.db"
    options = {"decisions": str(file), "keep_questions": True, **options}
    address, _ = serve(upstream=False, gate="prompt", model=many.model, docs=many.docs, options=options)
    ids = [ask(address, item.text, model="knowgate").headers["x-knowgate-id"] for item in many.questions]
    httpx.get(f"{address}/v1/decisions/{ids[-1]}")  # what was read is written
    return file, address, ids


def test_a_decision_log_can_be_replayed(serve, many, tmp_path, call):  # noqa: F811
    file, address, _ = served(serve, many, tmp_path, audit=1.0, audit_budget=1000)
    wait_for_audits(address, 40)
    result = json.loads(call("replay", file, "--json", "--thresholds", "0.5,1").out)
    half, all_skipped = result["thresholds"]
    assert (result["questions"], result["gate"], half["retrieved"], all_skipped["retrieved"]) == (40, "prompt", 20, 0)
    assert half["known"] == 20
    assert half["risk"]["value"] is None  # fewer than 100
    saved = httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["all"]["saved"]["seconds"]
    assert half["savings"]["seconds"]["saved"] == pytest.approx(saved, rel=0.1, abs=0.02)


def test_llm_calls_of_the_gate_itself_are_counted(serve, many, tmp_path):
    file, address, _ = served(serve, many, tmp_path)
    assert httpx.get(f"{address}/v1/dashboard").json()["figures"]["arms"]["all"]["extra_llm_calls"] == 40
    assert [event.extra_calls for event in read_server_log(file).events] == [1] * 40


@pytest.mark.parametrize(("part", "count"), [("arbiter", 2), ("gate", 1)])
def test_decisions_of_the_gate_are_replayed_even_if_the_arbiter_failed(tmp_path, part, count):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
    decided = {"gate": "question", "need": 0.8, "threshold": 0.5, "retrieve": True}
    for number, degraded in enumerate(([], [part])):
        log.append({"id": f"kg-{number}", **decided, "degraded": degraded}, None).result(30)
    log.close()
    assert len(read_server_log(tmp_path / "d.db").events) == count


@pytest.mark.parametrize("kind", ["failed", "loss"])
def test_failed_audits_are_read_from_the_log(tmp_path, kind):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
    log.append({"id": "kg-1", "gate": "question", "need": 0.2, "threshold": 0.5, "retrieve": False}, None).result(30)
    store = AuditStore(log)
    asyncio.run(store.add(AuditRecord("kg-1", "a", "scope", kind, 1.0 if kind == "loss" else None)))
    log.close()
    (event,) = read_server_log(tmp_path / "d.db").events
    assert (event.audit_failed, event.loses_answer) == (kind == "failed", True if kind == "loss" else None)


def test_a_skip_of_a_rule_in_shadow_mode_is_a_skip_at_every_threshold(serve, tmp_path, call):  # noqa: F811
    file = tmp_path / "d.db"
    address, _ = serve(gate="logprob:first", options={"decisions": str(file), "shadow": True})
    ask(address)
    id = ask(address, "Thanks!").headers["x-knowgate-id"]
    assert httpx.get(f"{address}/v1/decisions/{id}").json()["rule"]  # waits until the decisions are written
    low, high = json.loads(call("replay", file, "--json", "--thresholds", "0,1").out)["thresholds"][:2]
    assert low["retrieved"] == 1
    assert high["retrieved"] == 0


def test_the_gate_always_saves_nothing_at_the_highest_threshold(serve, tmp_path, call):  # noqa: F811
    file = tmp_path / "d.db"
    address, _ = serve(gate="always", threshold=1.0, options={"decisions": str(file)})
    reply = ask(address)
    assert reply.json()["knowgate"]["retrieve"]
    httpx.get(f"{address}/v1/decisions/{reply.headers['x-knowgate-id']}")  # waits until the decision is written
    (as_it_ran,) = json.loads(call("replay", file, "--json").out)["thresholds"]
    assert (as_it_ran["retrieved"], as_it_ran["threshold"]) == (1, 1.0)


def test_a_gate_that_always_retrieves_has_no_other_thresholds(serve, tmp_path, call, caplog):  # noqa: F811
    file = tmp_path / "d.db"
    options = {"decisions": str(file), "shadow": True, "audit": 1.0}
    address, _ = serve(gate="always:rules", options=options)
    assert "Use a gate that scores questions" in caplog.text
    id = ask(address).headers["x-knowgate-id"]
    httpx.get(f"{address}/v1/decisions/{id}")  # waits until the decision is written
    outcome = call("replay", file, "--price-search", "0.01")
    assert "The gate always retrieves and has no threshold." in outcome.err
    assert "--shadow" not in outcome.err
    assert "as it ran" in outcome.out
    assert "0.9" not in outcome.out


def test_decisions_of_another_gate_are_skipped_and_counted(serve, many, tmp_path, call):  # noqa: F811
    file, _, _ = served(serve, many, tmp_path)
    with closing(sqlite3.connect(file)) as database, database:
        change = 'UPDATE decisions SET record = replace(record, \'"gate_spec": "prompt\', \'"gate_spec": "other\') WHERE id = '
        database.execute(f"{change}(SELECT min(id) FROM decisions)")
    outcome = call("replay", file)
    assert outcome.code == 0
    assert "1 of another gate, threshold or arm" in outcome.err


def test_requests_with_options_of_their_own_do_not_count_for_the_gate(serve, many, tmp_path, call):  # noqa: F811
    file, address, _ = served(serve, many, tmp_path)
    before = httpx.get(f"{address}/v1/dashboard").json()["figures"]["needs"]
    for _ in range(20):  # with as many decisions, the other gate and threshold would be the most frequent ones
        ask(address, many.questions[0].text, model="knowgate/always")
        ask(address, many.questions[0].text, model="knowgate", knowgate={"max_loss": 0})
        body = {"question": many.questions[0].text, "knowgate": {"threshold": 0.1}}
        id = httpx.post(f"{address}/v1/decide", json=body).json()["id"]
    httpx.get(f"{address}/v1/decisions/{id}")  # waits until the decisions are written
    outcome = call("replay", file, "--json")
    assert (json.loads(outcome.out)["questions"], json.loads(outcome.out)["gate"]) == (40, "prompt")
    assert "60 that set options of their own" in call("replay", file).err
    assert httpx.get(f"{address}/v1/dashboard").json()["figures"]["needs"] == before


@pytest.mark.parametrize("way", ["draft", "race"])
def test_a_draft_that_only_the_arbiter_reads_is_a_second_call_of_each_search(tmp_path, way):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
    decided = {"gate": "question", "threshold": 0.5, "passages": [{"id": "1"}], "milliseconds": {"total": 1.0}}
    for number in range(4):  # the gate reads only the question, so questions that it skips have no draft
        retrieved = {"need": 0.8, "retrieve": True, "way": way}
        skipped = {"need": 0.2, "retrieve": False, "way": "question"}
        log.append({"id": f"kg-{number}", **decided, **(retrieved if number == 0 else skipped)}, None).result(30)
    log.append({"id": "kg-4", **decided, "rule": "small talk", "retrieve": False, "way": "question"}, None).result(30)
    log.close()
    traffic = Traffic(read_server_log(tmp_path / "d.db").events)
    low, used, high = replay_traffic(traffic, [0.1, 0.5, 0.9], Prices())
    assert [round(line.savings["llm_calls"].saved, 6) for line in (low, used, high)] == [-4, -1, 0]
    assert [line.savings["retrievals"].saved for line in (low, used, high)] == [1, 4, 5]
    assert compare_traffic_costs(traffic, 0.1, Prices()).gated.calls == pytest.approx(9 / 5)


@needs_train
def test_one_command_refits_a_gate_from_the_decision_log(serve, many, tmp_path, call):  # noqa: F811
    file, address, ids = served(serve, many, tmp_path, canary=1.0)
    gold = many.questions[1].answers[0]
    httpx.post(f"{address}/v1/feedback", json={"id": ids[1], "correction": gold})
    outcome = call("refit", file, "--model", many.model, "--docs", many.docs, "--out", "again", "--max-loss", "0.3")
    assert outcome.code == 0, outcome.err
    asked = [json.loads(line) for line in (tmp_path / "again" / "questions.jsonl").read_text().splitlines()]
    assert len(asked) == 40
    assert [item["answers"] for item in asked if "answers" in item] == [[gold]]
    assert outcome.out.splitlines()[-1] == "knowgate serve --config again/knowgate.toml"
    assert (tmp_path / "again" / "run" / "report" / "report.html").is_file()
    assert stat.S_IMODE((tmp_path / "again").stat().st_mode) == 0o700


def write_corrected_log(file, corrected, texts=()):
    """Write a log with decisions as (API key, name of the key that corrected it or None), oldest first."""
    log = DecisionLog(str(file), stores_questions=True)
    for number, (owner, giver) in enumerate(corrected):
        text = texts[number] if texts else f"What is item {number}?"
        log.append({"id": f"kg-{number}"}, text, owner).result(30)
        if giver is not None:
            asyncio.run(log.add_feedback(f"kg-{number}", "down", None, giver, correction="Rome"))
    log.close()


@pytest.mark.parametrize(
    ("corrected", "counts"),
    [
        ([("bob", "bob")] * 4 + [("alice", None)] * 4, (4, 1, 4)),  # one key alone decides nothing for the others
        ([("bob", "bob")] * 4 + [("alice", "alice"), ("alice", None)] * 2, (6, 2, 2)),  # bob gives at most half
        ([("bob", "admin")] * 4 + [("alice", None)] * 4, (4, 1, 0)),  # an admin key may decide for all
        ([("bob", "bob")] * 6, (6, 1, 0)),  # there are no other keys
        ([("", "")] * 6 + [("bob", None)], (6, 1, 0)),  # the server had no keys
    ],
)
def test_one_key_gives_at_most_half_of_the_gold_answers(tmp_path, corrected, counts):
    write_corrected_log(tmp_path / "d.db", corrected)
    logged = read_logged_questions(tmp_path / "d.db", 100)
    assert (logged.n_corrections, logged.n_keys, logged.n_unused) == counts
    assert sum(bool(item.answers) for item in logged.questions) == counts[0] - counts[2]
    trusted = read_logged_questions(tmp_path / "d.db", 100, trusts_keys=True)
    assert trusted.n_unused == 0


@pytest.mark.parametrize(
    ("asked", "answers"),
    [
        ([("alice", None), ("bob", "bob")], ()),  # the correction is only that of bob
        ([("bob", "bob"), ("alice", None)], ()),
        ([("alice", "alice"), ("bob", "bob")], ()),
        ([("bob", "bob"), ("bob", None)], ("Rome",)),  # no other key asked this
        ([("alice", None), ("bob", "admin")], ("Rome",)),
        ([("bob", "admin"), ("alice", "alice")], ("Rome",)),
    ],
)
def test_a_key_corrects_no_question_of_another_key(tmp_path, asked, answers):
    write_corrected_log(tmp_path / "d.db", [("alice", "admin"), *asked], ["Q0?", "Q?", "q"])
    log = read_logged_questions(tmp_path / "d.db", 100)
    assert [item.answers for item in log.questions] == [answers, ("Rome",)]
    assert log.n_unused == (not answers)


def test_blank_corrections_are_no_gold_answers(tmp_path):
    log = DecisionLog(str(tmp_path / "d.db"), stores_questions=True)
    log.append({"id": "kg-1"}, KNOWN, "bob").result(30)
    asyncio.run(log.add_feedback("kg-1", "down", None, "bob", correction="   "))  # as earlier versions stored it
    log.close()
    assert read_logged_questions(tmp_path / "d.db", 100).n_corrections == 0


@pytest.mark.parametrize(
    ("asked", "limit", "numbers"),
    [
        ("aaabbbbb", 6, [7, 6, 5, 2, 1, 0]),  # the newest of each key
        ("abbbbb", 4, [5, 4, 3, 0]),  # the other key asked only one
        ("aabcbbbbb", 6, [8, 7, 6, 3, 1, 0]),
        ("bbbbbb", 4, [5, 4, 3, 2]),  # there is only one key
        ("-----b", 4, [5, 4, 3, 2]),  # the server had no keys at first
    ],
)
def test_keys_give_questions_in_turn(tmp_path, asked, limit, numbers):
    write_corrected_log(tmp_path / "d.db", [(key.strip("-"), None) for key in asked])
    logged = read_logged_questions(tmp_path / "d.db", limit)
    assert [item.id for item in logged.questions] == [f"kg-{number}" for number in numbers]
    trusted = read_logged_questions(tmp_path / "d.db", limit, trusts_keys=True)
    assert [item.id for item in trusted.questions] == [f"kg-{len(asked) - 1 - i}" for i in range(limit)]


def test_a_log_without_api_keys_of_an_earlier_version_can_be_read(tmp_path):
    with closing(sqlite3.connect(tmp_path / "d.db")) as database, database:
        for statement in DECISION_TABLES:
            database.execute(_to_sqlite(statement))
        database.execute("INSERT INTO decisions VALUES ('kg-1', 1.0, 'Who wrote Emma?', '{}')")
        database.execute("INSERT INTO corrections VALUES ('kg-1', 2.0, 'Jane Austen')")
    logged = read_logged_questions(tmp_path / "d.db", 6)
    assert [item.answers for item in logged.questions] == [("Jane Austen",)]


def test_refit_says_from_how_many_keys_corrections_come(tmp_path, call):  # noqa: F811
    write_corrected_log(tmp_path / "d.db", [("bob", "bob")] * 3 + [("alice", None)] * 3)
    error = " ".join(call("refit", tmp_path / "d.db", "--docs", "missing").err.split())
    assert "Corrections: 3, from 1 API key. 3 of them are not used" in error


def test_refit_uses_the_upstream_of_the_server(tmp_path, call):  # noqa: F811
    from knowgate.cli.start import get_served_model
    from knowgate.errors import KnowgateError
    from knowgate.pipeline.settings import PipelineOptions

    serve = {"upstream": "http://127.0.0.1:1/v1", "upstream_model": "qwen"}
    assert get_served_model(PipelineOptions(serve=serve)) == "openai:qwen@http://127.0.0.1:1/v1"
    assert get_served_model(PipelineOptions(serve=serve), "fake") == "fake"  # given on the command line
    assert get_served_model(PipelineOptions(model="fake")) == "fake"
    with pytest.raises(KnowgateError, match="upstream_model"):
        get_served_model(PipelineOptions(serve={"upstream": "http://127.0.0.1:1/v1"}))


def test_logs_without_questions_and_other_databases_are_rejected(serve, many, tmp_path, call):  # noqa: F811
    file, _, _ = served(serve, many, tmp_path, keep_questions=False)
    assert "keep_questions=True" in call("refit", file, "--docs", many.docs).err
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as database:
        database.execute("CREATE TABLE t (x)")
    assert "the table `decisions` is missing" in call("replay", other).err
    assert "--arm works only with a decision log of the server" in call("replay", many.docs, "--arm", "a").err
    assert "is not a server log" in call("refit", many.docs).err


@pytest.mark.parametrize(
    ("choice", "k", "flags"),
    [
        (GateChoice("policy", is_policy=True, guarantee="at most 5 %"), 3, "--threshold 0.123 --arbiter rules"),
        (GateChoice("calibrated", guarantee="at most 5 %"), 3, "--threshold 0.456 --arbiter none"),
        (GateChoice("logprob:min", 0.4, "at most 5 %"), 3, "--threshold 0.4 --arbiter none"),
        (GateChoice("always"), 2, "--threshold 0.5 --arbiter none --k 3"),
    ],
)
def test_a_new_gate_is_served_with_its_own_threshold_and_arbiter(choice, k, flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_gate(tmp_path / "policy", threshold=0.123, policy={"arbiter": "rules"})
    write_gate(tmp_path / "calibrated", threshold=0.456)
    settings = PipelineOptions(k=k, threshold=0.9, arbiter="rules")  # of the earlier gate
    command = format_serve_command(Path("knowgate.toml"), settings, choice)
    assert command == f"knowgate serve --config knowgate.toml --gate {choice.gate} {flags}"
