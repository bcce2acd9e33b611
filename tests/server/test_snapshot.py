"""Statistics of the server, combined over its processes."""

import asyncio
import errno
import struct
import time
from types import SimpleNamespace

import pytest
from prometheus_client.mmap_dict import MmapedDict, mmap_key

from knowgate.data.history.entries import question_key
from knowgate.server.json_api import ApiError
from knowgate.server.options import ServeOptions
from knowgate.server.telemetry import metrics as metrics_module
from knowgate.server.telemetry import snapshot as snapshots
from knowgate.server.telemetry import snapshot_exchange
from knowgate.server.telemetry.decision_log import DecisionLog
from knowgate.server.telemetry.deletions import Deletion, DeletionIndex
from knowgate.server.telemetry.metrics import ServerMetrics, merge_worker
from knowgate.server.telemetry.snapshot import MetricsSnapshot
from knowgate.server.telemetry.snapshot_exchange import SnapshotExchange
from knowgate.server.telemetry.trace import RequestTrace, TokenUsage
from knowgate.types import Completion, Decision, DecisionNote, Passage


def count(snapshot, *, retrieve, arm="", milliseconds=100.0):
    decision = Decision(retrieve, 0.9 if retrieve else 0.1, 0.5, "always", "a reason")
    trace = RequestTrace(decision=decision, arm=arm, milliseconds={"gate": milliseconds})
    snapshot.add_request(200, 0.2, trace)


def test_combined_statistics_are_sums():
    first, second = MetricsSnapshot(since=20.0), MetricsSnapshot(since=10.0)
    count(first, retrieve=True, arm="a")
    count(second, retrieve=False, arm="b")
    count(second, retrieve=True, arm="a", milliseconds=300.0)
    report = first.combine([second.model_dump_json()]).to_json(ServeOptions())
    assert (report["since"], report["requests"]) == (10.0, {"2xx": 3})
    assert {arm: (item["decided"], item["retrieved"]) for arm, item in report["arms"].items()} == {
        "all": (3, 2),
        "a": (2, 2),
        "b": (1, 0),
    }
    needs = report["needs"]  # those of the second gate have another threshold
    assert (sum(needs["retrieved"]), sum(needs["skipped"])) == (2, 0)
    assert [sum(column) for column in zip(*report["minutes"], strict=True)] == [2, 1]
    assert report["stages"]["gate"] == {"n": 3, "p50": 100.0, "p95": 300.0, "p99": 300.0}


def test_the_last_hour_is_shown_after_a_correction_of_the_clock(monkeypatch):
    snapshot, now = MetricsSnapshot(), time.time()
    for minutes in (*range(600, 660), 0, 1):
        monkeypatch.setattr("knowgate.server.telemetry.snapshot.time.time", lambda at=now + 60 * minutes: at)
        count(snapshot, retrieve=True)
    assert len(snapshot.minutes) == 2


def test_questions_that_the_gate_would_skip_are_counted():
    snapshot = MetricsSnapshot()
    count(snapshot, retrieve=True)
    decision = Decision(True, 0.1, 0.5, "prompt", "shadow mode", notes=(DecisionNote.WOULD_SKIP,))
    snapshot.add_request(200, 0.2, RequestTrace(decision=decision))
    totals = snapshot.to_json(ServeOptions())["arms"]["all"]
    assert (totals["retrieved"], totals["skipped"], totals["would_skip"]) == (2, 0, 1)


@pytest.mark.parametrize(
    ("way", "saved", "extra_calls"), [("question", 3, 0), ("draft", 3, 1), ("race", 0, 1), ("separate-draft", 3, 4)]
)
def test_raced_searches_are_not_saved_and_separate_drafts_are_extra_calls(way, saved, extra_calls):
    totals = snapshots.DecisionTotals()
    for retrieve in (True, False, False, False):
        trace = RequestTrace(way=way, decision=Decision(retrieve, 0.5, 0.5, "logprob", ""))
        trace.passages = (Passage("1", "Mira runs it."),) if retrieve else ()
        totals.add_request(trace, 0.0, 0.0)
    figures = totals.to_json(ServeOptions())
    assert (figures["saved"]["retrievals"], figures["extra_llm_calls"]) == (saved, extra_calls)


def test_a_search_beside_the_draft_is_not_paid_for_twice():
    totals = snapshots.DecisionTotals()
    times = {"draft": 1000.0, "retrieve": 1000.0}
    skipped = RequestTrace(way="race", decision=Decision(False, 0.1, 0.5, "logprob", ""), milliseconds=times)
    retrieved = RequestTrace(way="race", decision=Decision(True, 0.9, 0.5, "logprob", ""))
    retrieved.milliseconds = {**times, "answer": 1000.0}
    retrieved.passages = (Passage("1", "Mira runs it."),)
    totals.add_request(skipped, 0.0, seconds=1.0)
    totals.add_request(retrieved, 5.0, seconds=2.0)
    # Always retrieving takes 2 s for each request: 1 s for the search and 1 s for the answer.
    assert totals.to_json(ServeOptions())["saved"]["seconds"] == pytest.approx(1.0)


def test_the_reasoning_of_a_discarded_draft_is_extra_cost():
    totals = snapshots.DecisionTotals()
    retrieved = RequestTrace(way="draft", decision=Decision(True, 0.9, 0.5, "logprob", ""))
    retrieved.passages = (Passage("1", "Mira runs it."),)
    retrieved.draft, retrieved.draft_usage = Completion("Nowhere.", None, True, 2), TokenUsage(30, 3002)
    totals.add_request(retrieved, 5.0, seconds=2.0)
    assert (totals.draft_tokens, totals.draft_prompt_tokens) == (3002, 30)


def test_the_time_of_the_gate_and_the_draft_reduces_the_saved_seconds():
    totals = snapshots.DecisionTotals()
    times = {"draft": 20.0, "gate": 75.0}
    skipped = RequestTrace(decision=Decision(False, 0.1, 0.5, "fusion", ""), milliseconds=times)
    retrieved = RequestTrace(decision=Decision(True, 0.9, 0.5, "fusion", ""), milliseconds={**times, "retrieve": 30.0})
    retrieved.passages = (Passage("1", "Mira runs it."),)
    totals.add_request(skipped, 0.0, seconds=0.105)
    totals.add_request(skipped, 0.0, seconds=0.105)
    totals.add_request(retrieved, 5.0, seconds=0.145)
    # Always retrieving takes 0.05 s for each request. The three requests took 0.105, 0.105 and 0.145 s.
    assert totals.to_json(ServeOptions())["saved"]["seconds"] == pytest.approx(3 * 0.05 - 0.355)


def test_unreadable_statistics_of_other_workers_are_ignored(caplog):
    snapshot = MetricsSnapshot()
    count(snapshot, retrieve=True)
    combined = snapshot.combine(["{", '{"since": "never"}'])
    assert combined.requests == {"2xx": 1}
    assert caplog.text.count("cannot be read") == 2


def test_workers_without_a_decision_log_share_statistics_in_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("KNOWGATE_SERVER", "one-server")
    monkeypatch.setenv("KNOWGATE_COUNTS", str(tmp_path / "counts.db"))

    def start(status, milliseconds):
        minutes = {1: [1, 0], int(time.time() / 60): [2, 3]}
        snapshot = MetricsSnapshot(requests={status: 1}, times={"total": [milliseconds]}, minutes=minutes)
        return SnapshotExchange(snapshot.model_dump_json, None)

    async def run():
        first, second, third = start("2xx", 5.0), start("4xx", 6.0), start("5xx", 7.0)
        for ended in (first, second):
            ended.schedule_write()
            await ended.close()  # writes at once what was scheduled
        texts = await third.read_others()
        await third.close()
        return texts

    (text,) = asyncio.run(run())  # one row for all ended workers
    ended = MetricsSnapshot.model_validate_json(text)
    assert (ended.requests, ended.times) == ({"2xx": 1, "4xx": 1}, {})
    assert list(ended.minutes.values()) == [[4, 6]]


def test_durations_of_a_killed_worker_do_not_count_for_long(tmp_path, monkeypatch):
    monkeypatch.setenv("KNOWGATE_SERVER", "one-server")
    now = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    snapshot = MetricsSnapshot(requests={"2xx": 1}, times={"total": [60_000.0]})

    async def run(seconds):
        log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
        await SnapshotExchange(snapshot.model_dump_json, log)._write()
        now[0] += seconds
        (text,) = await SnapshotExchange(lambda: "", log).read_others()
        await log.execute(("DELETE FROM figures", []))
        log.close()
        return MetricsSnapshot.model_validate_json(text)

    fresh, stale = asyncio.run(run(60)), asyncio.run(run(600))
    assert (fresh.requests, len(fresh.times)) == ({"2xx": 1}, 1)
    assert (stale.requests, len(stale.times)) == ({"2xx": 1}, 0)


@pytest.mark.parametrize(("seconds_ago", "texts"), [(170, ["of the ended server"]), (190, [])])
def test_a_server_that_has_ended_counts_for_three_minutes(tmp_path, monkeypatch, seconds_ago, texts):
    async def run():
        log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
        now = time.time()
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda: now - seconds_ago)
            ended = SnapshotExchange(lambda: "of the ended server", log)
            ended.schedule_write()
            await ended.close()
        others = await SnapshotExchange(lambda: "", log).read_others()
        log.close()
        return others

    assert asyncio.run(run()) == texts


def test_ended_workers_count_as_long_as_their_server_runs(tmp_path, monkeypatch):
    now = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def start(log, server, text):
        monkeypatch.setenv("KNOWGATE_SERVER", server)
        return SnapshotExchange(lambda: text, log)

    async def run():
        log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
        ended, worker = start(log, "first", "of the ended worker"), start(log, "first", "of its successor")
        other, ended_server = start(log, "second", "of the other server"), start(log, "third", "of the ended server")
        await ended._write()
        await ended_server._write()
        now[0] += 86_401
        for exchange in (worker, other, worker, other):  # each of them deletes what is old
            await exchange._write()
        others = await worker.read_others()
        rows = await log.run(lambda store: store.fetch_rows("SELECT record FROM figures"))
        log.close()
        return sorted(others), len(rows)

    assert asyncio.run(run()) == (["of the ended worker", "of the other server"], 3)


def test_metrics_can_be_read_while_another_worker_creates_its_files(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    file = MmapedDict(str(tmp_path / "counter_1.db"))
    key = mmap_key("knowgate_audits", "knowgate_audits_total", ["arm", "result"], ["a", "loss"], "Audits.")
    file.write_value(key, 3.0, 0.0)
    file.close()
    (tmp_path / "counter_2.db").touch()
    (tmp_path / "gauge_livemax_3.db").symlink_to(tmp_path / "gone")  # was deleted after the folder was listed
    metrics = ServerMetrics([])
    assert metrics.count_audits("a") == {"loss": 3}
    assert b'knowgate_audits_total{arm="a",result="loss"} 3.0' in metrics.format(None)


def test_counters_of_ended_workers_are_merged_into_one_file(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    counter = mmap_key("knowgate_audits", "knowgate_audits_total", ["arm", "result"], ["a", "loss"], "Audits.")
    histogram = mmap_key("knowgate_seconds", "knowgate_seconds_bucket", ["le"], ["1.0"], "Seconds.")
    for pid in (1, 2, 3):
        for kind, key in (("counter", counter), ("histogram", histogram)):
            file = MmapedDict(str(tmp_path / f"{kind}_{pid}.db"))
            file.write_value(key, float(pid), 0.0)
            file.close()
    (tmp_path / "gauge_livemax_1.db").touch()
    before = sorted(ServerMetrics([]).format(None).splitlines())
    for pid in (1, 2, 2):
        merge_worker(pid)
        assert sorted(ServerMetrics([]).format(None).splitlines()) == before
    names = sorted(path.name for path in tmp_path.glob("*.db"))
    assert names == ["counter_3.db", "counter_ended.db", "histogram_3.db", "histogram_ended.db"]
    assert b'knowgate_audits_total{arm="a",result="loss"} 6.0' in before
    assert b'knowgate_seconds_bucket{le="1.0"} 6.0' in before

    def fail(file):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(metrics_module, "_count_used_bytes", fail)
        merge_worker(3)
    assert "The metrics of the ended worker 3 stay" in caplog.text
    assert sorted(ServerMetrics([]).format(None).splitlines()) == before
    broken = struct.pack("ii", 4000, 0) + struct.pack("i", 9999) * 1000  # the worker was killed while it wrote
    (tmp_path / "counter_4.db").write_bytes(broken)
    merge_worker(4)
    assert "The metrics of the ended worker 4 stay" in caplog.text


def test_without_decision_log_and_file_there_are_no_other_workers(monkeypatch):
    monkeypatch.delenv("KNOWGATE_COUNTS", raising=False)
    assert asyncio.run(SnapshotExchange(lambda: "", None).read_others()) == []


def test_only_new_deletions_are_read_and_earlier_ones_count_until_they_expire(tmp_path, monkeypatch):
    now = [1_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    key, counts = question_key("Who is Jane?"), []

    async def read_deletions(exchange, after):
        now[0] += after
        deletions = await exchange.read_deletions()
        return [deletions.covers("kg-1", [key], owner, 999_999.0) for owner in ("alice", "bob")]

    async def run():
        log = DecisionLog(str(tmp_path / "d.db"), stores_questions=False)
        exchange = SnapshotExchange(lambda: "", log)
        await log.delete(question="Who is Jane?", owner="alice")
        fetch_rows = log._store.fetch_rows
        log._store.fetch_rows = lambda *query: counts.append(len(rows := fetch_rows(*query))) or rows
        results = [await read_deletions(exchange, after) for after in (0, 700, 700, 2600)]
        log.close()
        return results

    assert asyncio.run(run()) == [[True, False]] * 3 + [[False, False]]
    assert counts == [1, 1, 0, 0]  # the clocks of other machines may differ, so the newest ones are read again


@pytest.mark.parametrize("max_per_owner", [10, 1000])
def test_deletions_of_one_key_do_not_replace_those_of_another(monkeypatch, max_per_owner):
    monkeypatch.delenv("KNOWGATE_COUNTS", raising=False)
    monkeypatch.setattr(snapshot_exchange, "MAX_DELETIONS_PER_OWNER", max_per_owner)

    async def run():
        exchange = SnapshotExchange(lambda: "", None)
        await exchange.share_deletion("Who is Jane?", "alice")
        for number in range(600):
            await exchange.share_deletion(f"Question {number}", "bob")
        return await exchange.read_deletions()

    start = time.time()
    deletions = asyncio.run(run())
    assert deletions.covers("kg-1", [question_key("Who is Jane?")], "alice", start)
    assert not deletions.covers("kg-2", [question_key("Who is Emma?")], "alice", start)
    assert all(deletions.covers("kg-3", [question_key(f"Question {number}")], "bob", start) for number in range(600))
    assert len(deletions._times["bob"]) <= max_per_owner
    assert deletions.covers("kg-4", ["another"], "bob", start) is (max_per_owner < 600)  # instead of too many hashes
    assert not deletions.covers("kg-5", ["another"], "bob", time.time() + 1)


@pytest.mark.parametrize(("price", "money"), [(0.0, None), (2.0, None)])
def test_money_is_unknown_without_prices_or_retrievals(price, money):
    snapshot = MetricsSnapshot()
    count(snapshot, retrieve=False)
    report = snapshot.to_json(ServeOptions(price_retrieval=price))
    assert report["arms"]["all"]["saved"]["money"] is money


def test_a_deletion_covers_requests_that_began_before_it_and_only_those_of_its_key():
    recent = snapshots.RecentDecisions(stores_texts=True)
    keys = [question_key("Who is Jane?")]
    recent.append({"id": "ended"}, "Who is Jane?", "alice", keys)
    deletion = Deletion(time.time(), "", question_key("who is JANE"), "alice")
    recent.append({"id": "running"}, "And now?", "alice", [question_key("And now?"), *keys], seconds=5.0)
    recent.append({"id": "other key"}, "Who is Jane?", "bob", keys, seconds=5.0)
    recent.append({"id": "other question"}, "Who is Emma?", "alice", [question_key("Who is Emma?")], seconds=5.0)
    recent.append({"id": "later"}, "Who is Jane?", "alice", keys)
    asyncio.run(recent.apply_deletions(DeletionIndex([deletion])))
    assert {row["id"] for row in recent.list_newest(9)} == {"other key", "other question", "later"}


def test_many_deletions_are_applied_without_comparing_each_with_each_decision():
    recent = snapshots.RecentDecisions(stores_texts=True)
    for number in range(snapshots.MAX_RECENT_DECISIONS):
        recent.append({"id": f"kg-{number}"}, "?", "alice", [f"key {number}"])
    deletions = [Deletion(time.time(), "", f"key {number}", "alice") for number in range(100_000, 0, -1)]
    start = time.process_time()
    asyncio.run(recent.apply_deletions(DeletionIndex(deletions)))
    assert time.process_time() - start < 3  # 50 million comparisons take longer
    assert [row["id"] for row in recent.list_newest(9)] == ["kg-0"]


@pytest.mark.parametrize(
    ("owner", "at", "is_covered"),
    [("alice", 2.0, True), ("alice", 3.0, False), ("bob", 2.0, False), ("bob", 1.0, True)],
)
def test_a_deletion_covers_earlier_requests_of_its_key_and_one_of_an_admin_those_of_all_keys(owner, at, is_covered):
    index = DeletionIndex(
        [Deletion(1.0, "", "key", None), Deletion(1.5, "", "key", "alice"), Deletion(2.0, "", "key", "alice")]
    )
    assert index.covers("kg-1", ["other", "key"], owner, at) is is_covered


def test_forgetting_hashes_only_the_question_to_forget(monkeypatch):
    computed = []
    monkeypatch.setattr(snapshots, "question_key", lambda text: computed.append(text) or text.lower())
    recent = snapshots.RecentDecisions(stores_texts=True)
    for number in range(5):
        keys = [f"question {number}", *(["earlier"] if number == 3 else [])]
        recent.append({"id": str(number)}, f"Question {number}", "alice", keys)
    assert recent.find_ids("QUESTION 2", "alice") == ["2"]
    assert recent.find_ids("earlier", None) == ["3"]
    assert recent.find_ids("earlier", "bob") == []
    assert computed == ["QUESTION 2", "earlier", "earlier"]
    recent.delete(["3"])
    assert recent.find_ids("earlier", None) == []


def test_statistics_that_could_not_be_written_are_written_again_soon(monkeypatch):
    monkeypatch.setattr(snapshot_exchange, "WRITE_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(snapshot_exchange, "RETRY_SECONDS", 0.01)
    written = []

    async def execute(*statements):
        written.append(statements)
        if len(written) < 3:
            raise ApiError(503, "the decision log is unavailable.", "log_down")

    async def write():
        exchange = SnapshotExchange(lambda: "{}", SimpleNamespace(execute=execute))
        exchange.schedule_write()
        await asyncio.sleep(0.5)

    asyncio.run(write())
    assert len(written) == 3
