import pytest

from knowgate.data.runs.rows import list_slices
from knowgate.evaluation.boundary import measure_boundary, read_run_reports
from knowgate.evaluation.report.boundary_tables import build_run_slice_tables
from tests.support.runs_by_hand import row, side, write_run


def parts(rows, dimension):
    return {part.value: part for part in measure_boundary(rows).slices if part.dimension == dimension}


def test_a_slice_has_its_own_numbers():
    rows = [
        row("a", side(True, 0.8, 0.6), side(False), meta={"dataset": "nq"}),
        row("b", side(False, 0.4, 0.2), side(False), meta={"dataset": "nq"}),
        row("c", side(False, 0.0, 0.0), side(True), meta={"dataset": "webqa"}),
    ]
    nq = parts(rows, "data set")["nq"]
    assert (nq.n, nq.closed.value, nq.open.value, nq.benefit) == (2, 0.5, 0.0, -0.5)
    assert (nq.mastery, nq.certainty) == (pytest.approx(0.6), pytest.approx(0.4))


def test_closed_and_open_book_of_a_slice_are_of_the_same_questions():
    rows = [row("a", side(False), side(True)), row("b", side(True))]
    zh = parts([*rows, row("c", side(True), lang="zh")], "language")
    assert (zh["en"].closed.value, zh["en"].open.value) == (0.0, 1.0)
    assert zh["zh"].closed.value == 1.0


def test_questions_without_a_value_form_their_own_slice():
    by_value = parts([row("a", side(), meta={"fact_type": "fast"}), row("b", side())], "freshness")
    assert {name: part.n for name, part in by_value.items()} == {"fast": 1, "(not given)": 1}


@pytest.mark.parametrize(
    ("meta", "hops"),
    [
        ({"num_hops": "multi-hop"}, "multi-hop"),
        ({"hops": 5}, "5"),
        ({"dataset": "hotpotqa", "type": "bridge"}, "bridge"),
        ({"dataset": "temporalqa", "type": ["Implicit"]}, None),
    ],
)
def test_hops_are_read_from_the_metadata_of_the_data_set(meta, hops):
    assert list_slices(row("a", meta=meta)).get("hops") == hops


def test_terciles_of_answer_frequency():
    rows = [row(str(count), side(), answer_frequency=count) for count in (0, 1, 2, 5, 9, 30)]
    by_value = parts(rows, "answer frequency")
    assert {name: part.n for name, part in by_value.items()} == {"rare": 2, "middle": 2, "frequent": 2}


def test_equal_frequencies_stay_together_even_if_a_tercile_is_empty():
    rows = [row(str(i), side(), answer_frequency=count) for i, count in enumerate((0, 0, 0, 0, 7, 8))]
    by_value = parts(rows, "answer frequency")
    assert {name: part.n for name, part in by_value.items()} == {"rare": 4, "middle": 0, "frequent": 2}


def test_choice_and_open_questions_are_separate_slices():
    by_value = parts([row("a", side(), choices=("x", "y")), row("b", side())], "form")
    assert set(by_value) == {"multiple choice", "open question"}


def test_a_dimension_with_one_value_has_no_table(tmp_path):
    run = write_run(tmp_path / "r", [row("a", side()), row("b", side(), lang="zh")])
    assert [sheet.title for sheet in build_run_slice_tables(read_run_reports([run]))] == ["By language"]


def test_a_slice_another_run_has_is_shown_as_empty(tmp_path):
    both = write_run(tmp_path / "both", [row("a", side()), row("b", side(), lang="zh")])
    english = write_run(tmp_path / "english", [row("a", side())])
    (sheet,) = build_run_slice_tables(read_run_reports([both, english]))
    assert [line[:5] for line in sheet.rows] == [
        ("en", "both", "1", "0", "100.0 %"),
        ("", "english", "1", "0", "100.0 %"),
        ("zh", "both", "1", "0", "100.0 %"),
        ("", "english", "0", "empty"),
    ]
