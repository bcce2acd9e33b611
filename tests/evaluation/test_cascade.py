"""Gates with an arbiter behind them, on recorded rows: what the table shows, and where its figures come from."""

from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.runs.table import load_label_table
from knowgate.errors import BadSetting
from knowgate.evaluation.evaluation_summary import evaluation_to_dict
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.report.evaluation_tables import COLUMN_DEFINITIONS, build_evaluation_tables
from knowgate.evaluation.traffic_log import parse_event, read_label_run_traffic
from tests.support.hand_gate import write_rows
from tests.support.pairs_by_hand import Prefers, pair_row, pair_rows, pair_run

# need, from memory right, with passages right; the arbiter takes what holds 'pick'
ROWS = [
    pair_row("a", 0.1, True, False, texts=("pick a", "other a")),
    pair_row("b", 0.2, False, True, texts=("pick b", "other b")),
    pair_row("c", 0.8, True, False, texts=("pick c", "other c")),
    pair_row("d", 0.9, False, True, texts=("memory d", "pick d")),
    pair_row("e", 0.7, True, True, texts=("the same", "the same")),
]


@pytest.fixture
def evaluated(tmp_path):
    return evaluate("logprob:first", write_rows(tmp_path / "run", ROWS), arbiter=Prefers("pick"), resamples=50)


def test_always_with_the_arbiter_is_the_arbiter_alone(evaluated):
    always = evaluated.cascade.results[0]
    assert (always.gate, always.rate, always.alone) == ("always", 1.0, pytest.approx(3 / 5))
    assert always.accuracy.value == pytest.approx(4 / 5)  # a and c gained, b harmed
    assert (always.gained, always.harmed) == (pytest.approx(2 / 5), pytest.approx(1 / 5))
    assert evaluated.cascade.from_memory == pytest.approx(3 / 5)


def test_a_gate_skips_questions_and_the_arbiter_decides_the_others(evaluated):
    line = evaluated.cascade.results[1]
    assert line.against_always.value == pytest.approx(line.accuracy.value - 3 / 5)
    assert line.change.value == pytest.approx(line.accuracy.value - line.alone)


def test_the_cascade_is_in_the_table_and_the_json(evaluated):
    text_table = next(one for one in build_evaluation_tables(evaluated) if one.title.startswith("Cascade"))
    assert text_table.title == "Cascade: the arbiter prefers chooses after retrieval"
    assert set(text_table.columns) - {"gate"} <= set(COLUMN_DEFINITIONS)
    record = evaluation_to_dict(evaluated)["cascade"]
    assert record["fingerprint"] == "prefers-pick"


def test_without_an_arbiter_there_is_no_cascade(tmp_path):
    plain = evaluate("logprob:first", write_rows(tmp_path / "run", ROWS), resamples=10)
    assert plain.cascade is None
    assert "cascade" not in evaluation_to_dict(plain)


def test_stored_beliefs_are_enough_for_rows_without_texts(tmp_path):
    run = pair_run(tmp_path / "run", 60)
    first = evaluate("logprob:first", run, arbiter=Prefers("memory"), resamples=10).cascade
    bare = [
        replace(row, question="", closed=replace(row.closed, text=""), open=replace(row.open, text=""))
        for row in pair_rows(60)
    ]
    packed = write_rows(tmp_path / "packed", bare)
    (packed / "beliefs.jsonl").write_bytes((run / "beliefs.jsonl").read_bytes())
    again = evaluate("logprob:first", packed, arbiter="prefers", resamples=10).cascade
    assert again == first


def test_an_arbiter_needs_open_book_answers(tmp_path):
    run = write_rows(tmp_path / "run", [replace(row, open=None, benefit=None) for row in pair_rows(60)])
    with pytest.raises(BadSetting, match="has no answers with passages"):
        evaluate("logprob:first", run, arbiter="rules")


# --- replay ---------------------------------------------------------------------------------------


def test_a_label_run_is_replayed_with_its_arbiter(tmp_path):
    run = write_rows(tmp_path / "run", [row for row in ROWS if row.id != "e"])
    alone = [event.loses_answer for event in read_label_run_traffic(run, "logprob:first").events]
    assert alone == [False, True, False, True]
    assert load_label_table([run]).rows[1].id == "b"
    (run / "beliefs.jsonl").write_text(
        '{"arbiter": "picky", "fingerprint": "f", "closed": {"a": 1, "b": 1, "c": 1, "d": 0}, '
        '"open": {"a": 0, "b": 0, "c": 0, "d": 1}}\n'
    )
    chosen = [event.loses_answer for event in read_label_run_traffic(run, "logprob:first", "picky").events]
    assert chosen == [False, False, False, True]  # b is wrong either way


def test_a_logged_answer_that_was_the_draft_loses_nothing_by_skipping():
    line = {
        "question": "q?",
        "answer": "Paris",
        "retrieve": True,
        "need": 0.9,
        "draft": "Paris",
        "passages": [{"id": "p", "title": "", "text": "nothing"}],
        "choice": {"given": "draft", "arbiter": "rules", "reason": "r", "open_answer": "not mentioned"},
    }
    assert parse_event(line).loses_answer is False
    assert parse_event({**line, "answer": "Rome"}).loses_answer is True


def test_the_arbiter_is_asked_once_for_all_gates(tmp_path):
    asked: list[str] = []
    run = pair_run(tmp_path / "run", 50)
    evaluate(["logprob:first", "logprob:min"], run, arbiter=Prefers("memory", asked), resamples=10)
    evaluate("logprob:first", run, arbiter=Prefers("memory", asked), resamples=10)
    assert len(asked) == 50
    assert np.unique(asked).size == 50
