"""The log that grows with use: agreement labels, written beside the answering."""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from knowgate.data.history import entries
from knowgate.data.history.entries import HistoryScope, KnowledgeLabel, LabelSource, LogEntry, question_key
from knowgate.data.history.sqlite_store import SqliteHistory
from knowgate.errors import BadSetting, RejectionError
from knowgate.gates import load_gate
from knowgate.models.fair_executor import CLIENT
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.traffic_log import TrafficLog, label_by_agreement
from knowgate.types import Answer, Completion, Decision, Passage, Question
from tests.pipeline.test_adaptive_rag import Searching
from tests.support.counting import CountingModel
from tests.support.hash_embedder import HashEmbedder
from tests.support.processes import until

TABLE = {
    "capital of France": {"closed": "Paris", "logprob": math.log(0.9)},  # skipped
    "badge colour of Anna": {"closed": "red", "open": "green", "logprob": math.log(0.2)},  # retrieved, differs
    "colour of soup": {"closed": "It varies.", "open": "it varies", "logprob": math.log(0.2)},  # retrieved, agrees
}
QUESTIONS = [f"What is the {part}?" for part in TABLE]


PASSAGES = [Passage("badge", "The badge of Anna is green."), Passage("soup", "What soup? it varies")]


def answer(draft, text, passages=tuple(PASSAGES), **question):
    done = None if draft is None else Completion(draft, n_tokens=2, finished=True)
    decision = Decision(True, 0.9, 0.5, "g", "")
    return Answer(Question("Who?", **question), text, decision, tuple(passages), draft=done)


@pytest.mark.parametrize(
    ("given", "label"),
    [
        (answer("The Beatles.", "beatles"), KnowledgeLabel.KNOWN),
        (answer("The Beatles", "The Kinks"), KnowledgeLabel.UNKNOWN),
        (answer("(B) two", "B", choices=("one", "two")), KnowledgeLabel.KNOWN),
        (answer("Paris", "Paris", passages=()), None),  # skipped, or nothing was found: one answer only
        (answer(None, "Paris"), None),
        (answer("", ""), None),
    ],
)
def test_two_answers_agree_by_what_the_grader_compares(given, label):
    assert label_by_agreement(given, 32) == label


@pytest.mark.parametrize(("limit", "label"), [(2, KnowledgeLabel.KNOWN), (32, None)])
def test_a_draft_that_was_cut_short_of_the_answers_length_says_nothing(limit, label):
    cut = answer("It varies", "It varies")
    cut = Answer(cut.question, cut.text, cut.decision, cut.passages, draft=Completion("It varies", None, False, 2))
    assert label_by_agreement(cut, limit) == label


@pytest.fixture
def store(tmp_path):
    return SqliteHistory(tmp_path / "log.db", HashEmbedder())


def build(log, gate="logprob:min", model=None):
    return AdaptiveRAG(model or FakeModel(TABLE), load_gate(gate), Searching(PASSAGES), log=log)


def test_retrieved_questions_are_logged_and_skipped_ones_are_not(store):
    log = TrafficLog(store)
    rag = build(log)
    rag.answer_many(QUESTIONS)
    log.close()
    found = {entry.question: entry for entry in store.entries()}
    assert {text: entry.label for text, entry in found.items()} == {
        QUESTIONS[1]: KnowledgeLabel.UNKNOWN,
        QUESTIONS[2]: KnowledgeLabel.KNOWN,
    }
    assert {entry.source for entry in found.values()} == {LabelSource.AGREEMENT}
    assert {entry.scope.model for entry in found.values()} == {rag.model.fingerprint}
    assert (log.n_questions, log.n_labeled) == (3, 2)


def test_an_answer_that_is_streamed_is_logged_too(store):
    log = TrafficLog(store)
    list(build(log).answer_stream(QUESTIONS[1]))
    log.close()
    assert [entry.question for entry in store.entries()] == [QUESTIONS[1]]


def test_a_gate_without_a_draft_labels_only_where_drafts_are_asked_for(store):
    for drafts, count in ((False, 0), (True, 3)):
        log = TrafficLog(store, drafts=drafts)
        build(log, "always").answer_many(QUESTIONS)
        log.close()
        assert len(list(store.entries())) == count


def test_logging_asks_the_model_nothing_more(store):
    plain, logged = CountingModel(FakeModel(TABLE)), CountingModel(FakeModel(TABLE))
    log = TrafficLog(store)
    assert [a.text for a in build(None, model=plain).answer_many(QUESTIONS)] == [
        a.text for a in build(log, model=logged).answer_many(QUESTIONS)
    ]
    log.close()
    assert plain.calls == logged.calls


class Slow(HashEmbedder):
    """Embeds when it may."""

    def __init__(self):
        super().__init__()
        self.may = threading.Event()

    def embed(self, texts):
        assert self.may.wait(60)
        return super().embed(texts)


def test_an_answer_does_not_wait_for_its_label(tmp_path):
    slow = Slow()
    log = TrafficLog(SqliteHistory(tmp_path / "log.db", slow))
    assert build(log).answer(QUESTIONS[1]).text == "green"
    assert not list(log.store.entries())
    slow.may.set()
    log.close()
    assert len(list(log.store.entries())) == 1


def test_many_threads_log_every_question_once(store):
    log = TrafficLog(store)
    table = {f"number {i:03d}": {"closed": "red", "open": "green", "logprob": -3.0} for i in range(100)}
    rag = build(log, model=FakeModel(table))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: rag.answer(f"badge colour of number {i:03d}?"), range(100)))
    log.close()
    assert len({entry.question for entry in store.entries()}) == log.n_labeled == 100


def test_a_log_that_was_closed_can_be_written_again(store):
    log = TrafficLog(store)
    rag = build(log)
    for question in QUESTIONS[1:]:
        rag.answer(question)
        log.close()
    assert len(list(store.entries())) == 2


def test_what_cannot_be_logged_is_said_and_the_answer_is_given(store, caplog):
    store.add([])
    with store._database.transaction() as db:
        db.execute("INSERT INTO meta VALUES ('embedder', 'of somebody else')")
    log = TrafficLog(store)
    assert build(log).answer(QUESTIONS[1]).text == "green"
    log.close()
    assert "Questions could not be logged: the log" in caplog.text


def test_an_agreement_never_outranks_a_person(store):
    log = TrafficLog(store)
    rag = build(log)
    rag.answer(QUESTIONS[1])
    log.close()
    (logged,) = store.entries()
    store.add([type(logged)(logged.question, KnowledgeLabel.KNOWN, logged.scope, LabelSource.HUMAN)])
    (near,) = store.search(["What is it?"], 5, logged.scope)[0]
    assert (near.label, near.source) == (KnowledgeLabel.KNOWN, LabelSource.HUMAN)


def test_drafts_without_a_log_are_refused(tmp_path):
    from knowgate.pipeline.builder import build_pipeline
    from knowgate.pipeline.settings import load_settings

    (tmp_path / "a.txt").write_text("something to find")
    with pytest.raises(BadSetting, match="`log_drafts` has no effect without a log"):
        build_pipeline(load_settings(model="fake", gate="always", docs=tmp_path, log_drafts=True))


def test_flush_waits_for_the_one_thread_that_writes(tmp_path):
    store, gate = SqliteHistory(tmp_path / "log.db", HashEmbedder()), threading.Event()
    add, threads = store.add, set()
    store.add = lambda *args: (gate.wait(20), threads.add(threading.get_ident()), add(*args))[2]
    log, scope = TrafficLog(store), HistoryScope("m", "p")
    entries = [LogEntry(f"Who is {i}?", KnowledgeLabel.KNOWN, scope, LabelSource.HUMAN) for i in range(2)]
    futures = [log.log_entries([entry]) for entry in entries]
    assert not any(future.done() for future in futures)
    gate.set()
    log.flush()
    assert all(future.done() for future in futures)
    assert (store.count(scope), len(threads), log.problem) == (2, 1, "")
    log.close()


def log_question(log, client, question):
    token = CLIENT.set(client)
    try:
        return log.log_entries([LogEntry(question, KnowledgeLabel.KNOWN, HistoryScope("m", "p"), LabelSource.HUMAN)])
    finally:
        CLIENT.reset(token)


def test_clients_take_turns_and_lose_only_their_own_labels(tmp_path, monkeypatch):
    store, gate, written = SqliteHistory(tmp_path / "log.db", HashEmbedder()), threading.Event(), []
    store.add = lambda entries, _: (gate.wait(20), written.extend(entry.question for entry in entries))
    log = TrafficLog(store)
    monkeypatch.setattr("knowgate.pipeline.traffic_log.MAX_WAITING", 3)
    logged = [log_question(log, client, f"{client} {i}?") for client in ("eve", "alice") for i in range(3)]
    assert log_question(log, "eve", "one too many for a client?").result(20) is False
    assert log.problem.startswith("1 label")
    assert not any(future.done() for future in logged)
    gate.set()
    log.flush()
    assert written == ["eve 0?", "alice 0?", "eve 1?", "alice 1?", "eve 2?", "alice 2?"]
    log.close()


def test_a_deletion_does_not_wait_for_the_embedding_model(tmp_path):
    store, gate, embedding = SqliteHistory(tmp_path / "log.db", HashEmbedder()), threading.Event(), threading.Event()
    embed = store.embed
    store.embed = lambda questions: (embedding.set(), gate.wait(20), embed(questions))[2]
    log = TrafficLog(store)
    logged = [log_question(log, "eve", question) for question in ("Being embedded?", "Waiting?", "Kept?")]
    assert embedding.wait(20)
    assert log.is_waiting(question_key("waiting"))
    assert [log.drop_waiting(question_key(question)) for question in ("waiting", "being embedded", "waiting")] == [
        1,
        1,
        0,
    ]
    assert not log.is_waiting(question_key("waiting"))
    gate.set()
    assert [future.result(20) for future in logged] == [False, False, True]
    assert [entry.question for entry in store.entries()] == ["Kept?"]
    assert not log.is_waiting(question_key("kept"))
    log.close()


def test_a_slow_embedding_model_does_not_stop_a_server_from_ending(tmp_path, caplog):
    store, gate, embedding = SqliteHistory(tmp_path / "log.db", HashEmbedder()), threading.Event(), threading.Event()
    embed = store.embed
    store.embed = lambda questions: (embedding.set(), gate.wait(20), embed(questions))[2]
    log = TrafficLog(store)
    logged = [log_question(log, "eve", f"Question {i}?") for i in range(3)]
    assert embedding.wait(20)
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(log.close, 0.0)
        until(lambda: log._deadline < float("inf"))
        gate.set()
        closing.result(20)
    assert [future.result(20) for future in logged] == [True, False, False]
    assert (log.n_lost, caplog.text.count("could not be logged")) == (2, 1)
    assert log_question(log, "eve", "After that?").result(20)
    log.close()


def test_nobody_waits_while_a_deletion_reads_long_questions(tmp_path, monkeypatch):
    store, gate = SqliteHistory(tmp_path / "log.db", HashEmbedder()), threading.Event()
    embed = store.embed
    store.embed = lambda questions: (gate.wait(20), embed(questions))[1]
    log, was_locked = TrafficLog(store), []
    monkeypatch.setattr(entries, "question_key", lambda text: was_locked.append(log._lock.locked()) or text)
    logged = [log_question(log, "eve", f"Question {i}?") for i in range(3)]
    assert log.drop_waiting("Question 1?") == 1
    assert was_locked == [False] * 3
    gate.set()
    assert [future.result(20) for future in logged] == [True, False, True]
    log.close()


def test_an_error_of_the_embedding_server_is_logged_without_the_question(tmp_path, caplog):
    store = SqliteHistory(tmp_path / "log.db", HashEmbedder())

    def refuse(questions):
        raise RejectionError(f"the server answered 400: bad text '{questions[0]}'.", brief="the server answered 400")

    store.embed = refuse
    log = TrafficLog(store)
    assert not log_question(log, "eve", "Has Anna the flu?").result(20)
    assert "the server answered 400" in caplog.text
    assert "Anna" not in caplog.text
    log.close()


def test_entries_that_cannot_be_written_are_counted(tmp_path):
    store = SqliteHistory(tmp_path / "log.db", HashEmbedder())
    store.add = lambda entries: 1 / 0
    log = TrafficLog(store)
    entry = LogEntry("Who?", KnowledgeLabel.KNOWN, HistoryScope("m", "p"), LabelSource.HUMAN)
    assert not log.log_entries([entry]).result(20)
    assert log.problem == "1 labels could not be written to the history"
    log.close()
