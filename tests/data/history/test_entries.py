"""What every store of logged questions must do: adding, searching, forgetting, several processes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from knowgate.data.history import open_history, sqlite_store
from knowgate.data.history.entries import (
    HistoryScope,
    KnowledgeLabel,
    LabelSource,
    LogEntry,
    RetrievalOutcome,
    question_key,
)
from knowgate.errors import BadInput, BadSetting
from knowgate.retrieval.embeddings import SentenceEmbedder
from tests.support.hash_embedder import HashEmbedder
from tests.support.postgres_server import postgres_server
from tests.support.processes import child

SCOPE = HistoryScope("model-a", "prompts-a")


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request, tmp_path):
    """Where a log can be made."""
    return str(tmp_path / "log.db") if request.param == "sqlite" else postgres_server().address()


@pytest.fixture
def log(place):
    return open_history(place, HashEmbedder())


def entry(question, label=KnowledgeLabel.KNOWN, scope=SCOPE, **values):
    return LogEntry(question, label, scope, **values)


def test_the_most_similar_question_comes_first(log):
    log.add([entry("capital of France"), entry("height of Everest"), entry("capital of Peru")])
    near = log.search(["What is the capital of Peru"], 2, SCOPE)[0]
    assert [n.question for n in near] == ["capital of Peru", "capital of France"]
    assert near[0].similarity > near[1].similarity


def test_a_question_is_never_its_own_neighbor(log):
    log.add([entry("Who wrote Hamlet?"), entry("Who wrote Faust?")])
    assert [n.question for n in log.search(["who wrote hamlet"], 5, SCOPE)[0]] == ["Who wrote Faust?"]


def test_a_question_logged_again_by_the_same_source_replaces_its_label(log):
    log.add([entry("Who wrote Faust?", KnowledgeLabel.UNKNOWN)])
    log.add([entry("who wrote faust", KnowledgeLabel.KNOWN)])
    assert [e.label for e in log.entries(SCOPE)] == [KnowledgeLabel.KNOWN]


def test_the_more_trusted_of_two_sources_counts(log):
    log.add([entry("Who wrote Faust?", KnowledgeLabel.UNKNOWN, source=LabelSource.AGREEMENT)])
    log.add([entry("Who wrote Faust?", KnowledgeLabel.KNOWN, source=LabelSource.HUMAN)])
    (near,) = log.search(["Who wrote it?"], 5, SCOPE)[0]
    assert (near.label, near.source, near.weight) == (KnowledgeLabel.KNOWN, LabelSource.HUMAN, 1.0)


def test_labels_of_another_model_prompt_or_tenant_are_not_mixed_in(log):
    others = [
        HistoryScope("model-b", "prompts-a"),
        HistoryScope("model-a", "prompts-b"),
        HistoryScope("model-a", "prompts-a", "acme"),
    ]
    log.add([entry("Who wrote Faust?", scope=scope) for scope in others])
    assert log.search(["Who wrote it?"], 5, SCOPE) == [()]
    assert log.scopes() == dict.fromkeys(others, 1)


def test_expired_entries_are_not_found_and_can_be_pruned(log):
    log.add([entry("old question", expires=time.time() - 1), entry("new question", expires=time.time() + 100_000)])
    assert [n.question for n in log.search(["question"], 5, SCOPE)[0]] == ["new question"]
    assert log.prune() == 1
    assert log.count(SCOPE) == 1


def test_pruning_for_a_scope_drops_labels_of_other_models(log):
    log.add([entry("a"), entry("b", scope=HistoryScope("model-b", "prompts-a"))])
    assert log.prune(keep_scope=SCOPE) == 1
    assert list(log.scopes()) == [SCOPE]


def test_an_entry_is_deleted_by_id(log):
    log.add([entry("one"), entry("two")])
    first = min(e.id for e in log.entries())
    assert log.forget(ids=[first]) == 1
    assert [e.question for e in log.entries()] == ["two"]


def test_the_index_includes_rows_added_later(log):
    log.add([entry("alpha one")])
    log.search(["alpha"], 3, SCOPE)
    log.add([entry("alpha two")])
    assert len(log.search(["alpha"], 3, SCOPE)[0]) == 2


def test_outcome_and_weight_are_stored(log):
    log.add([entry("alpha", outcome=RetrievalOutcome.BETTER, weight=0.3)])
    (near,) = log.search(["alpha beta"], 1, SCOPE)[0]
    assert (near.outcome, near.weight) == (RetrievalOutcome.BETTER, 0.3)


def test_a_sample_is_always_the_same(log):
    log.add([entry(f"question {i}") for i in range(50)])
    first = log.sample(20, SCOPE)
    assert first == log.sample(20, SCOPE)
    assert len({n.question for n in first}) == 20


def test_a_log_with_fewer_than_k_entries_returns_all(log):
    log.add([entry("one"), entry("two")])
    assert len(log.search(["three"], 20, SCOPE)[0]) == 2
    assert len(log.sample(20, SCOPE)) == 2


def test_an_empty_log_has_no_neighbors(log):
    assert log.search(["anything", "else"], 3, SCOPE) == [(), ()]


def test_a_question_of_ten_thousand_characters_is_kept_whole(log):
    long = "word " * 2000
    log.add([entry(long)])
    assert next(log.entries()).question == long


def test_empty_and_too_long_questions_are_rejected():
    with pytest.raises(BadInput, match="cannot be added to the history log"):
        entry("  ")
    with pytest.raises(BadInput, match="at most 20000"):
        entry("x" * 20_001)


@pytest.mark.parametrize("use", [lambda log: log.add([entry("two")]), lambda log: log.search(["two"], 1, SCOPE)])
def test_another_embedding_is_rejected_with_advice(place, log, use):
    log.add([entry("one")])
    other = open_history(place, HashEmbedder(fingerprint="other"))
    with pytest.raises(BadSetting, match=r"vectors of another embedding model .* knowgate history copy .* NEW.db"):
        use(other)


@pytest.fixture
def two_embedders(tmp_path, monkeypatch):
    """Folders that name embeddings; no weights are in them."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"name": "{name}"}}')
    monkeypatch.setattr(SentenceEmbedder, "embed", lambda self, texts: HashEmbedder().embed(texts))
    return str(tmp_path / "one"), str(tmp_path / "two")


def test_a_log_remembers_the_embedding_it_was_filled_with(place, two_embedders):
    open_history(place, two_embedders[0]).add([entry("Who wrote Faust?")])
    again = open_history(place)
    assert [n.question for n in again.search(["Who wrote it?"], 1, SCOPE)[0]] == ["Who wrote Faust?"]
    again.add([entry("Who wrote Emma?")])
    assert again.count(SCOPE) == 2


def test_the_error_names_both_embeddings(place, two_embedders):
    open_history(place, two_embedders[0]).add([entry("Who wrote Faust?")])
    said = (
        rf"\('{two_embedders[0]}'\)\. They cannot be compared with those of '{two_embedders[1]}'\. Leave `embedder` out"
    )
    with pytest.raises(BadSetting, match=said):
        open_history(place, two_embedders[1]).search(["Who?"], 1, SCOPE)


def test_a_folder_that_was_moved_is_the_same_embedding(place, tmp_path, two_embedders):
    open_history(place, two_embedders[0]).add([entry("Who wrote Faust?")])
    moved = (tmp_path / "one").rename(tmp_path / "elsewhere")
    assert open_history(place, str(moved)).search(["Who?"], 1, SCOPE)[0]


def test_search_goes_deeper_if_many_candidates_are_filtered_out(log):
    log.add([entry(f"alpha {i}", expires=time.time() - 1) for i in range(60)])
    log.add([entry(f"beta {i}") for i in range(3)])
    assert len(log.search(["alpha"], 3, SCOPE)[0]) == 3


def test_the_depth_of_a_search_is_limited(tmp_path, monkeypatch):
    monkeypatch.setattr(sqlite_store, "MAX_DEPTH", 20)
    log = open_history(str(tmp_path / "h.db"), HashEmbedder(16))
    log.add([entry(f"alpha {i}", expires=time.time() - 1) for i in range(60)])
    log.add([entry(f"beta {i}") for i in range(3)])
    assert log.search(["alpha"], 3, SCOPE) == [()]


def test_excluded_labels_make_room_for_others(log):
    log.add([entry(f"alpha {i}", KnowledgeLabel.TIME_SENSITIVE) for i in range(40)])
    log.add([entry(f"beta {i}") for i in range(3)])
    for near in (
        *log.search(["alpha"], 3, SCOPE, (KnowledgeLabel.TIME_SENSITIVE,)),
        log.sample(3, SCOPE, (KnowledgeLabel.TIME_SENSITIVE,)),
    ):
        assert [n.label for n in near] == [KnowledgeLabel.KNOWN] * 3


def test_a_sample_has_no_expired_entry_and_no_duplicate(log):
    log.add([entry(f"old {i}", expires=time.time() - 1) for i in range(50)])
    log.add([entry(f"new {i}", source=source) for i in range(5) for source in (LabelSource.GOLD, LabelSource.JUDGE)])
    drawn = log.sample(20, SCOPE)
    assert sorted(n.question for n in drawn) == [f"new {i}" for i in range(5)]
    assert {n.source for n in drawn} == {LabelSource.GOLD}


def test_expired_outcomes_are_not_returned(log):
    log.add(
        [
            entry("old", outcome=RetrievalOutcome.BETTER, expires=time.time() - 1),
            entry("new", outcome=RetrievalOutcome.WORSE),
        ]
    )
    assert log.outcomes(SCOPE)[0] == [RetrievalOutcome.WORSE]


def test_forgotten_questions_are_not_found(log):
    log.add([entry("the secret of Bertha"), entry("the height of Everest")])
    log.search(["the"], 2, SCOPE)
    assert log.forget(contains="SECRET") == 1
    assert [n.question for n in log.search(["the secret"], 5, SCOPE)[0]] == ["the height of Everest"]


def test_a_question_is_forgotten_in_every_scope_and_however_it_is_written(log):
    log.add(
        [
            entry("Who wrote Faust?"),
            entry("who wrote faust", scope=HistoryScope("n", "q", "acme")),
            entry("Who wrote Emma?"),
        ]
    )
    assert log.forget(ids=log.find_ids(question_key("Who wrote FAUST"))) == 2
    assert log.find_ids(question_key("Who wrote FAUST")) == []
    assert [e.question for e in log.entries()] == ["Who wrote Emma?"]


def test_entries_are_newest_first_and_limited(log):
    log.add([entry(f"question {i}") for i in range(5)])
    assert [e.question for e in log.entries(limit=2)] == ["question 4", "question 3"]
    assert len(list(log.entries())) == 5


def test_batches_yield_all_entries_with_vectors(log):
    log.add([entry(f"question {i}") for i in range(5)])
    batches = list(log.batches(2))
    assert [len(entries) for entries, _ in batches] == [2, 2, 1]
    for entries, vectors in batches:
        assert vectors == pytest.approx(HashEmbedder().embed([e.question for e in entries]), abs=1e-6)


def test_a_question_with_odd_characters_is_logged_and_found(log):
    log.add([entry("who is \0 nobody"), entry("半 ☃ 𝔘 question")])
    assert len(log.search(["\0 ☃"], 5, SCOPE)[0]) == 2
    assert "半 ☃ 𝔘 question" in [e.question for e in log.entries()]


WRITER = """
import sys
from knowgate.data.history import open_history
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
from tests.support.hash_embedder import HashEmbedder

log = open_history(sys.argv[1], HashEmbedder())
print("ready", flush=True)
sys.stdin.readline()
for i in range(0, int(sys.argv[3]), 10):
    names = [f"writer{sys.argv[2]} question{j}" for j in range(i, i + 10)]
    log.add([LogEntry(name, KnowledgeLabel.KNOWN, HistoryScope("m", "p")) for name in names])
"""


def start_together(stack, commands):
    """Start processes that write once all of them are ready."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writers = [stack.enter_context(child(command, **pipes)) for command in commands]
    assert [writer.stdout.readline() for writer in writers] == [b"ready\n"] * len(writers)
    for writer in writers:
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    return writers


def test_four_processes_writing_at_once_lose_no_entry(place):
    reader, scope, each = open_history(place, HashEmbedder()), HistoryScope("m", "p"), 150
    with ExitStack() as stack:
        commands = [[sys.executable, "-c", WRITER, place, str(n), str(each)] for n in range(4)]
        writers = start_together(stack, commands)
        while any(writer.poll() is None for writer in writers):
            reader.search(["writer1 question5"], 3, scope)  # while others write
            time.sleep(0.05)
        assert [writer.returncode for writer in writers] == [0] * 4
    assert reader.count(scope) == 4 * each
    for name in (f"writer0 question{each - 1}", "writer3 question0"):
        (near,) = reader.search([f"{name} again"], 1, scope)[0]
        assert near.question == name


CROSSING = """
import sys
from knowgate.data.history import open_history
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
from tests.support.hash_embedder import HashEmbedder

log = open_history(sys.argv[1], HashEmbedder())
order = range(40) if sys.argv[2] == "up" else range(39, -1, -1)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    log.add([LogEntry(f"question{j}", KnowledgeLabel.KNOWN, HistoryScope("m", "p")) for j in order])
"""


def test_writers_in_opposite_orders_do_not_deadlock(place):
    with ExitStack() as stack:
        commands = [[sys.executable, "-c", CROSSING, place, order] for order in ("up", "down")]
        writers = start_together(stack, commands)
        assert [writer.wait() for writer in writers] == [0, 0]
    assert open_history(place, HashEmbedder()).count(HistoryScope("m", "p")) == 40


ENDLESS = """
import itertools, sys
from knowgate.data.history import open_history
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LogEntry
from tests.support.hash_embedder import HashEmbedder

log = open_history(sys.argv[1], HashEmbedder())
for i in itertools.count():
    names = [f"{sys.argv[2]} question{i} part{j}" for j in range(3)]
    log.add([LogEntry(name, KnowledgeLabel.KNOWN, HistoryScope("m", "p")) for name in names])
    print(i, flush=True)  # acknowledged
"""


def acknowledged_until(place, kill, count=10):
    """Two processes write until there is enough; then comes a sudden end. What each of them acknowledged."""
    with ExitStack() as stack:
        command = [sys.executable, "-c", ENDLESS, place]
        writers = {
            name: stack.enter_context(child([*command, name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            for name in ("one", "two")
        }
        said = {name: [int(writer.stdout.readline()) for _ in range(count)] for name, writer in writers.items()}
        kill(list(writers.values()))
        for name, writer in writers.items():
            said[name] += [int(line) for line in writer.stdout.read().split()]
    return said


def check_entries(place, said):
    kept = {one.question for one in open_history(place, HashEmbedder()).entries()}
    for name, numbers in said.items():
        assert numbers == list(range(len(numbers)))
        assert {f"{name} question{i} part{j}" for i in numbers for j in range(3)} <= kept
    assert len(kept) % 3 == 0  # what was not acknowledged is there as a whole or not at all


def test_no_acknowledged_entry_is_lost_when_writers_are_killed(place):
    said = acknowledged_until(place, lambda writers: [writer.send_signal(signal.SIGKILL) for writer in writers])
    check_entries(place, said)
