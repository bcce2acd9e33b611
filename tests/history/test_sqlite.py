"""The log: adding, searching, forgetting, several processes."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack

import pytest

from knowgate.embedding import SentenceEmbedder
from knowgate.errors import ArtefactError, BadInput, BadSetting, KnowgateError
from knowgate.history.entries import Known, LogEntry, Outcome, Scope, Source
from knowgate.history.sqlite import SqliteHistory
from tests.support.hash_embedder import HashEmbedder
from tests.support.processes import child

SCOPE = Scope("model-a", "prompts-a")


@pytest.fixture
def log(tmp_path):
    return SqliteHistory(tmp_path / "log.db", HashEmbedder())


def entry(question, label=Known.KNOWN, scope=SCOPE, **values):
    return LogEntry(question, label, scope, **values)


def test_the_most_similar_question_comes_first(log):
    log.add([entry("capital of France"), entry("height of Everest"), entry("capital of Peru")])
    near = log.search(["What is the capital of Peru"], 2, SCOPE)[0]
    assert [n.question for n in near] == ["capital of Peru", "capital of France"]
    assert near[0].similarity > near[1].similarity


def test_the_question_itself_is_never_its_own_neighbour(log):
    log.add([entry("Who wrote Hamlet?"), entry("Who wrote Faust?")])
    assert [n.question for n in log.search(["who wrote hamlet"], 5, SCOPE)[0]] == ["Who wrote Faust?"]


def test_a_question_logged_again_by_the_same_source_replaces_its_label(log):
    log.add([entry("Who wrote Faust?", Known.UNKNOWN)])
    log.add([entry("who wrote faust", Known.KNOWN)])
    assert [e.label for e in log.entries(SCOPE)] == [Known.KNOWN]


def test_of_two_sources_the_more_trusted_one_counts(log):
    log.add([entry("Who wrote Faust?", Known.UNKNOWN, source=Source.AGREEMENT)])
    log.add([entry("Who wrote Faust?", Known.KNOWN, source=Source.HUMAN)])
    (near,) = log.search(["Who wrote it?"], 5, SCOPE)[0]
    assert (near.label, near.source, near.weight) == (Known.KNOWN, Source.HUMAN, 1.0)


def test_labels_of_another_model_prompt_or_tenant_are_not_mixed_in(log):
    others = [Scope("model-b", "prompts-a"), Scope("model-a", "prompts-b"), Scope("model-a", "prompts-a", "acme")]
    log.add([entry("Who wrote Faust?", scope=scope) for scope in others])
    assert log.search(["Who wrote it?"], 5, SCOPE) == [()]
    assert log.scopes() == dict.fromkeys(others, 1)


def test_what_has_expired_is_not_found_and_can_be_pruned(log):
    log.add([entry("old question", expires=time.time() - 1), entry("new question", expires=time.time() + 100_000)])
    assert [n.question for n in log.search(["question"], 5, SCOPE)[0]] == ["new question"]
    assert log.prune() == 1
    assert log.count(SCOPE) == 1


def test_pruning_for_a_scope_drops_labels_of_other_models(log):
    log.add([entry("a"), entry("b", scope=Scope("model-b", "prompts-a"))])
    assert log.prune(keep_scope=SCOPE) == 1
    assert list(log.scopes()) == [SCOPE]


def test_forgotten_questions_leave_the_table_the_index_and_the_file(log):
    log.add([entry("the secret of Bertha"), entry("the height of Everest")])
    log.search(["the"], 2, SCOPE)
    assert log.forget(contains="SECRET") == 1
    assert [n.question for n in log.search(["the secret"], 5, SCOPE)[0]] == ["the height of Everest"]
    log.close()
    assert b"Bertha" not in b"".join(path.read_bytes() for path in log.path.parent.iterdir())


def test_forgetting_by_id(log):
    log.add([entry("one"), entry("two")])
    first = min(e.id for e in log.entries())
    assert log.forget(ids=[first]) == 1
    assert [e.question for e in log.entries()] == ["two"]


def test_the_index_follows_rows_added_later(log):
    log.add([entry("alpha one")])
    log.search(["alpha"], 3, SCOPE)
    log.add([entry("alpha two")])
    assert len(log.search(["alpha"], 3, SCOPE)[0]) == 2


def test_an_outcome_and_a_weight_come_back(log):
    log.add([entry("alpha", outcome=Outcome.BETTER, weight=0.3)])
    (near,) = log.search(["alpha beta"], 1, SCOPE)[0]
    assert (near.outcome, near.weight) == (Outcome.BETTER, 0.3)


def test_fixed_random_examples_stay_the_same(log):
    log.add([entry(f"question {i}") for i in range(50)])
    first = log.sample(20, SCOPE)
    assert first == log.sample(20, SCOPE)
    assert len({n.question for n in first}) == 20
    assert log.sample(20, SCOPE, seed=1) != first


def test_fewer_entries_than_asked_give_all_of_them(log):
    log.add([entry("one"), entry("two")])
    assert len(log.search(["three"], 20, SCOPE)[0]) == 2
    assert len(log.sample(20, SCOPE)) == 2


def test_an_empty_log_gives_no_neighbours(log):
    assert log.search(["anything", "else"], 3, SCOPE) == [(), ()]


def test_a_question_of_ten_thousand_characters_is_kept_whole(log):
    long = "word " * 2000
    log.add([entry(long)])
    assert next(log.entries()).question == long


def test_empty_and_endless_questions_are_refused():
    with pytest.raises(BadInput, match="must not be empty"):
        entry("  ")
    with pytest.raises(BadInput, match="at most 20000"):
        entry("x" * 20_001)


@pytest.mark.parametrize("use", [lambda log: log.add([entry("two")]), lambda log: log.search(["two"], 1, SCOPE)])
def test_another_embedding_is_refused_with_what_to_type(log, use):
    log.add([entry("one")])
    other = SqliteHistory(log.path, HashEmbedder(fingerprint="other"))
    with pytest.raises(BadSetting, match=r"filled with another embedding .* history export --history .*log\.db > log"):
        use(other)


@pytest.fixture
def two_embedders(tmp_path, monkeypatch):
    """Folders that name embeddings; no weights are in them."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"name": "{name}"}}')
    monkeypatch.setattr(SentenceEmbedder, "embed", lambda self, texts: HashEmbedder().embed(texts))
    return str(tmp_path / "one"), str(tmp_path / "two")


def test_a_log_remembers_the_embedding_it_was_filled_with(tmp_path, two_embedders):
    SqliteHistory(tmp_path / "log.db", two_embedders[0]).add([entry("Who wrote Faust?")])
    again = SqliteHistory(tmp_path / "log.db")
    assert [n.question for n in again.search(["Who wrote it?"], 1, SCOPE)[0]] == ["Who wrote Faust?"]
    again.add([entry("Who wrote Emma?")])
    assert again.count(SCOPE) == 2


def test_a_log_asked_with_another_embedding_names_both(tmp_path, two_embedders):
    SqliteHistory(tmp_path / "log.db", two_embedders[0]).add([entry("Who wrote Faust?")])
    said = rf"\('{two_embedders[0]}'\) than '{two_embedders[1]}'\. Leave --embedder out .*--embedder {two_embedders[1]}"
    with pytest.raises(BadSetting, match=said):
        SqliteHistory(tmp_path / "log.db", two_embedders[1]).search(["Who?"], 1, SCOPE)


def test_a_folder_that_was_moved_is_the_same_embedding(tmp_path, two_embedders):
    SqliteHistory(tmp_path / "log.db", two_embedders[0]).add([entry("Who wrote Faust?")])
    moved = (tmp_path / "one").rename(tmp_path / "elsewhere")
    assert SqliteHistory(tmp_path / "log.db", str(moved)).search(["Who?"], 1, SCOPE)[0]


def test_neighbours_are_sought_deeper_where_many_fall_away(log):
    log.add([entry(f"alpha {i}", expires=time.time() - 1) for i in range(60)])
    log.add([entry(f"beta {i}") for i in range(3)])
    assert len(log.search(["alpha"], 3, SCOPE)[0]) == 3


def test_what_is_left_out_makes_room_for_others(log):
    log.add([entry(f"alpha {i}", Known.TIME_SENSITIVE) for i in range(40)])
    log.add([entry(f"beta {i}") for i in range(3)])
    for near in (
        *log.search(["alpha"], 3, SCOPE, (Known.TIME_SENSITIVE,)),
        log.sample(3, SCOPE, 0, (Known.TIME_SENSITIVE,)),
    ):
        assert [n.label for n in near] == [Known.KNOWN] * 3


def test_random_examples_hold_nothing_expired_and_no_question_twice(log):
    log.add([entry(f"old {i}", expires=time.time() - 1) for i in range(50)])
    log.add([entry(f"new {i}", source=source) for i in range(5) for source in (Source.GOLD, Source.JUDGE)])
    drawn = log.sample(20, SCOPE)
    assert sorted(n.question for n in drawn) == [f"new {i}" for i in range(5)]
    assert {n.source for n in drawn} == {Source.GOLD}


def test_expired_outcomes_teach_nothing(log):
    log.add([entry("old", outcome=Outcome.BETTER, expires=time.time() - 1), entry("new", outcome=Outcome.WORSE)])
    assert log.outcomes(SCOPE)[0] == [Outcome.WORSE]


def test_a_broken_file_is_refused_and_left_as_it_is(tmp_path):
    path = tmp_path / "log.db"
    path.write_bytes(b"this is no database, but somebody may want it back" * 50)
    before = path.read_bytes()
    with pytest.raises(ArtefactError, match="left as it is"):
        SqliteHistory(path, HashEmbedder()).add([entry("one")])
    assert path.read_bytes() == before


def test_a_log_of_another_version_is_refused(log):
    log.add([entry("one")])
    log._db.connection().execute("UPDATE meta SET value = '9' WHERE key = 'version'")
    log.close()
    with pytest.raises(ArtefactError, match="format 9"):
        list(SqliteHistory(log.path, HashEmbedder()).entries())


WRITER = """
import sys
from knowgate.history.entries import Known, LogEntry, Scope
from knowgate.history.sqlite import SqliteHistory
from tests.support.hash_embedder import HashEmbedder

log = SqliteHistory(sys.argv[1], HashEmbedder())
for i in range(0, 1000, 20):
    log.add([LogEntry(f"writer{sys.argv[2]} question{j}", Known.KNOWN, Scope("m", "p")) for j in range(i, i + 20)])
"""


def test_four_processes_writing_a_thousand_entries_each_lose_none(tmp_path):
    path = tmp_path / "log.db"
    reader = SqliteHistory(path, HashEmbedder())
    scope = Scope("m", "p")
    reader.count(scope)
    with ExitStack() as stack:
        commands = [[sys.executable, "-c", WRITER, str(path), str(n)] for n in range(4)]
        writers = [stack.enter_context(child(command)) for command in commands]
        while any(writer.poll() is None for writer in writers):
            reader.search(["writer1 question5"], 3, scope)  # the index follows while others write
            time.sleep(0.05)
        assert [writer.returncode for writer in writers] == [0] * 4
    assert reader.count(scope) == 4000
    followed = reader._follow(scope)
    assert len(followed) == 4000
    for name in ("writer0 question999", "writer3 question0"):
        hits = followed.nearest(HashEmbedder().embed([name]), 1)[0]
        assert hits[0][1] == pytest.approx(1.0, abs=1e-5)
        assert reader._by_id({hits[0][0]})[hits[0][0]].question == name


def test_a_full_disk_says_what_is_safe_and_what_to_do(log):
    log.add([entry("one")])
    log._db.connection().execute("PRAGMA max_page_count = 1")
    with pytest.raises(KnowgateError, match=r"database or disk is full. What was logged before is safe; make room"):
        log.add([entry(f"question {i} " + "x" * 3000) for i in range(50)])
    assert [one.question for one in log.entries()] == ["one"]
