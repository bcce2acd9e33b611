"""Rows that stay on disk: the same rows, columns, needs and figures as with all of them in memory."""

import gzip

import numpy as np
import pytest

from knowgate.data.runs import table as gathering
from knowgate.data.runs import table as trial
from knowgate.data.runs.columns import COLUMN_NAMES
from knowgate.data.runs.records import RecordedNeeds, write_needs
from knowgate.data.runs.storage import StoredRows
from knowgate.data.runs.table import load_label_table
from knowgate.errors import ArtifactError, BadSetting
from knowgate.evaluation import gate_evaluation
from knowgate.evaluation.evaluation_summary import evaluation_to_dict
from knowgate.evaluation.gate_comparison import compare_gates
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.recommendation import recommend, recommendation_to_dict
from knowgate.evaluation.report.report_folder import write_report
from knowgate.gates.offline_scoring import drop_seen_rows, score_gates
from tests.support.hand_gate import graded_row, varied_rows, write_gate, write_rows
from tests.support.planted_run import planted_rows
from tests.support.planted_run import write_run as planted_run

GATES = ["logprob:first", "logprob:mean", "always", "random"]


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of seven rows, and thirty rows that are too many."""
    for module in (gathering, trial):
        monkeypatch.setattr(module, "CHUNK_ROWS", 7)
    monkeypatch.setattr(trial, "MAX_ROWS_IN_MEMORY", 30)


@pytest.fixture
def runs(tmp_path, small_parts):
    """Two runs, the second with rows that cannot be used."""
    spoilt = [graded_row("lost", 0.5, None, None, error="no answer"), graded_row("open", 0.5, None, True)]
    first = write_rows(tmp_path / "first", varied_rows(40))
    rows = [*spoilt, *varied_rows(25, seed=1)]
    return [first, write_rows(tmp_path / "second", [graded_row("early", 0.3, True, None), *rows])]


def both_ways(runs):
    return load_label_table(runs), load_label_table(runs, max_in_memory=30)


def test_many_rows_stay_on_disk_and_few_do_not(runs):
    held, stored = both_ways(runs)
    assert held.is_in_memory
    assert not stored.is_in_memory
    assert load_label_table(runs, max_in_memory=len(held.rows)).is_in_memory


def test_rows_and_readings_equal_those_in_memory(runs):
    held, stored = both_ways(runs)
    assert list(stored.rows) == held.rows
    assert list(stored.readings) == held.readings
    assert list(stored.questions) == held.questions
    assert (stored.rows[-1], stored.rows[38:43]) == (held.rows[-1], held.rows[38:43])
    assert stored.left_out == held.left_out == {"failed": 1, "not graded": 1}
    with pytest.raises(IndexError):
        stored.rows[len(held.rows)]


@pytest.mark.parametrize("name", COLUMN_NAMES)
def test_every_column_equals_that_in_memory(runs, name):
    held, stored = both_ways(runs)
    assert getattr(stored, name).tolist() == getattr(held, name).tolist()


def test_columns_do_not_read_the_rows_again(runs):
    stored = load_label_table(runs, max_in_memory=30)
    for run in runs:
        (run / "labels.jsonl").unlink()
    assert stored.closed_book_right.any()
    with pytest.raises(FileNotFoundError):
        next(iter(stored.rows))


@pytest.mark.parametrize("chosen", [range(50), [60, 3, 41], []])
def test_a_subset_equals_that_in_memory(runs, chosen):
    held, stored = (one.subset(chosen) for one in both_ways(runs))
    assert isinstance(stored.rows, StoredRows) == (len(list(chosen)) > 30)
    assert list(stored.rows) == held.rows
    assert stored.closed_book_right.tolist() == held.closed_book_right.tolist()
    assert list(stored.readings) == held.readings


def test_an_evaluation_equals_that_in_memory(runs):
    gate = write_gate(runs[0].parent / "gate")
    found = []
    for one in both_ways(runs):
        evaluation = compare_gates(one, score_gates(one, [*GATES, str(gate)]), resamples=50)
        found.append((evaluation_to_dict(evaluation), recommendation_to_dict(recommend(evaluation))))
    assert found[0] == found[1]


def test_questions_seen_by_a_gate_are_left_out(runs):
    held, stored = both_ways(runs)
    gate = write_gate(runs[0].parent / "gate", [question.text for question in held.questions[:20]])
    one, other = (drop_seen_rows(each, [str(gate)]) for each in (held, stored))
    assert list(other.rows) == one.rows
    assert len(other.rows) < len(held.rows)
    assert one.left_out == other.left_out


def test_hidden_states_are_read_in_chunks(tmp_path, small_parts):
    run = planted_run(tmp_path / "run", *planted_rows(40))
    held, stored = load_label_table([run]), load_label_table([run], max_in_memory=30)
    for one, other in zip(held.readings, stored.readings, strict=True):
        assert {layer: list(state) for layer, state in one.hidden.items()} == {
            layer: list(state) for layer, state in other.hidden.items()
        }
    assert next(stored.chunks()).readings[3].hidden.keys() == held.readings[3].hidden.keys()


def test_compressed_rows_are_read_by_offset(runs):
    held = load_label_table(runs)
    for run in runs:
        (run / "labels.jsonl.gz").write_bytes(gzip.compress((run / "labels.jsonl").read_bytes()))
        (run / "labels.jsonl").unlink()
    stored = load_label_table(runs, max_in_memory=30)
    assert list(stored.rows) == held.rows
    assert stored.rows[5] == held.rows[5]


def test_a_row_that_was_changed_meanwhile_is_rejected(runs):
    stored = load_label_table(runs, max_in_memory=30)
    (runs[0] / "labels.jsonl").write_text("x" * 100_000, encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"labels\.jsonl at byte 0"):
        stored.rows[0]


# --- what gates said before -----------------------------------------------------------------------


def on_record(runs):
    """Two gates in both runs, one of them with raw scores, and one in the first alone."""
    rng = np.random.default_rng(0)
    for place, run in enumerate(runs):
        ids = [row.id for row in load_label_table([run]).rows]
        said, other, raw = (dict(zip(ids, rng.random(len(ids)).round(6).tolist(), strict=True)) for _ in range(3))
        plain = RecordedNeeds("plain", 0.4, said, "said before", 0.5 + place)
        fitted = RecordedNeeds("fitted", 0.6, other, raw=raw, far=0.25 * place)
        write_needs(run, [plain, fitted] if place else [plain, RecordedNeeds("once", 0.5, said), fitted])


def test_recorded_needs_equal_those_in_memory(runs):
    on_record(runs)
    held, stored = both_ways(runs)
    assert list(stored.recorded_needs) == list(held.recorded_needs) == ["plain", "fitted"]
    for gate in held.recorded_needs:
        one, other = score_gates(held, [gate])[0], score_gates(stored, [gate])[0]
        assert other.needs.tolist() == one.needs.tolist()
        assert (other.far, other.seconds, other.about, other.threshold) == (
            one.far,
            one.seconds,
            one.about,
            one.threshold,
        )
    assert score_gates(stored, ["fitted"])[0].raw.tolist() == score_gates(held, ["fitted"])[0].raw.tolist()


@pytest.mark.parametrize("n", [50, 5])
def test_recorded_needs_follow_a_subset(runs, n):
    on_record(runs)
    held, stored = (one.subset(range(60, 60 - n, -1)) for one in both_ways(runs))
    assert score_gates(stored, ["plain"])[0].needs.tolist() == score_gates(held, ["plain"])[0].needs.tolist()


def test_a_recorded_gate_that_lacks_questions_is_rejected(runs):
    rows = load_label_table([runs[0]]).rows
    for run in runs:
        write_needs(run, [RecordedNeeds("half", 0.5, {row.id: 0.5 for row in rows[:10]})])
    for one in both_ways(runs):
        missing = sum(key not in {row.id for row in rows[:10]} for key in one.ids.tolist())
        with pytest.raises(BadSetting, match=f"for {missing} of {len(one.rows)} questions"):
            score_gates(one, ["half"])


def test_evaluation_and_report_equal_those_in_memory(runs, tmp_path, monkeypatch):
    on_record(runs)
    found = []
    for name, held in (("memory", 1_000), ("disk", 30)):
        monkeypatch.setattr(gate_evaluation, "MAX_ROWS_IN_MEMORY", held)
        evaluation = evaluate([*GATES, "fitted"], runs, resamples=50, price_retrieval=None)
        assert evaluation.table.is_in_memory == (name == "memory")
        write_report(evaluation, tmp_path / name)
        files = sorted(path for path in (tmp_path / name).iterdir() if path.is_file())
        found.append({path.name: path.read_text(encoding="utf-8") for path in files})
    assert found[0] == found[1]
    assert {"report.html", "summary.json"} <= found[0].keys()
