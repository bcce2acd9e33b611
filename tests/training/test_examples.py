"""Label runs become training data: which rows, which target, which split; and what is refused."""

import re
from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.runs.rows import GradedAnswer
from knowgate.data.splits import SPLIT_SHARES, fingerprint_text, split_questions
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.training.examples import list_seen_keys, load_examples
from tests.support.planted_run import LAYER, planted_rows, write_run

TEXTS = [f"question number {i}?" for i in range(1000)]


def parts(split):
    return [getattr(split, name).tolist() for name in SPLIT_SHARES]


# --- splits ---------------------------------------------------------------------------------------


def test_parts_have_their_shares():
    sizes = split_questions(TEXTS, 0).sizes()
    assert all(abs(sizes[name] / len(TEXTS) - share) < 0.04 for name, share in SPLIT_SHARES.items())


def test_equal_questions_stay_together_however_they_are_written():
    again = [text.upper().replace("?", " ??") for text in TEXTS]
    where = {place: number for number, part in enumerate(parts(split_questions(TEXTS + again, 0))) for place in part}
    assert all(where[i] == where[i + len(TEXTS)] for i in range(len(TEXTS)))


def test_the_seed_decides_the_split():
    assert parts(split_questions(TEXTS, 1)) == parts(split_questions(TEXTS, 1))
    assert parts(split_questions(TEXTS, 1)) != parts(split_questions(TEXTS, 2))


# --- rows -----------------------------------------------------------------------------------------


def test_needed_is_what_the_model_got_wrong(tmp_path):
    rows, states = planted_rows(60)
    examples = load_examples([write_run(tmp_path / "run", rows, states)])
    assert examples.target == "known"
    assert examples.needed.tolist() == [not row.closed.correct for row in rows]


def test_states_of_several_runs_follow_their_rows(tmp_path):
    made = [planted_rows(40, seed=seed) for seed in (1, 2)]
    examples = load_examples([write_run(tmp_path / f"{i}", *part) for i, part in enumerate(made)])
    found = np.stack([reading.hidden[LAYER] for reading in examples.readings])
    assert np.array_equal(found, np.concatenate([states[f"before.{LAYER}"] for _, states in made]))
    assert [question.id for question in examples.questions] == [row.id for rows, _ in made for row in rows]


def test_failed_and_ungraded_rows_are_left_out(tmp_path):
    rows, states = planted_rows(60)
    rows[3] = replace(rows[3], error="out of memory")
    rows[5] = replace(rows[5], closed=GradedAnswer("no gold answer"))
    examples = load_examples([write_run(tmp_path / "run", rows, states)])
    assert [row.id for row in examples.rows] == [row.id for i, row in enumerate(rows) if i not in (3, 5)]
    assert np.array_equal(examples.readings[3].hidden[LAYER], states[f"before.{LAYER}"][4])


def test_a_run_without_a_graded_row_adds_nothing(tmp_path):
    rows, states = planted_rows(60)
    ungraded = [replace(row, closed=GradedAnswer("no gold answer")) for row in rows[:5]]
    nothing = write_run(tmp_path / "nothing", ungraded, {name: block[:5] for name, block in states.items()})
    assert len(load_examples([write_run(tmp_path / "run", rows, states), nothing]).rows) == 60


def test_benefit_is_the_target_only_where_nearly_every_row_has_an_open_book_answer(tmp_path):
    rows, _ = planted_rows(60)
    helped = [replace(row, benefit=int(i % 3 == 0)) for i, row in enumerate(rows)]
    examples = load_examples([write_run(tmp_path / "all", helped)])
    assert (examples.target, examples.needed.tolist()) == ("benefit", [i % 3 == 0 for i in range(60)])
    nearly = load_examples([write_run(tmp_path / "nearly", [rows[0], *helped[1:]])])
    assert (nearly.target, bool(nearly.needed[0])) == ("benefit", False)  # nothing was found for it: no help
    assert load_examples([write_run(tmp_path / "some", [*helped[:40], *rows[40:]])]).target == "known"


def test_test_questions_are_not_among_those_seen(tmp_path):
    examples = load_examples([write_run(tmp_path / "run", planted_rows(60)[0])])
    tested = {fingerprint_text(examples.questions[place].text) for place in examples.split.test}
    assert tested
    seen = list_seen_keys(examples.questions, examples.split)
    assert not tested & set(seen)
    assert len(seen) == 3 * (60 - len(tested))  # by text, loosely by text, and by id


def test_packed_runs_without_their_questions_are_refused(tmp_path):
    rows = [replace(row, question="") for row in planted_rows(60)[0]]
    with pytest.raises(BadInput, match="packed"):
        load_examples([write_run(tmp_path / "run", rows)])


# --- what is refused ------------------------------------------------------------------------------


def test_too_few_rows_are_refused_with_the_number_needed(tmp_path):
    with pytest.raises(
        BadInput, match=r"needs at least 40 graded questions, but the label runs \(recorded answers\) have 39"
    ):
        load_examples([write_run(tmp_path / "run", planted_rows(39)[0])])


def test_a_run_of_one_class_is_refused_with_both_counts(tmp_path):
    rows = [replace(row, closed=replace(row.closed, correct=True)) for row in planted_rows(60)[0]]
    with pytest.raises(BadInput, match=r"there are 0 questions that need retrieval and 60 questions that do not"):
        load_examples([write_run(tmp_path / "run", rows)])


def test_one_question_asked_over_and_over_is_refused(tmp_path):
    rows = [replace(row, question="always the same?") for row in planted_rows(60)[0]]
    with pytest.raises(BadInput, match="distinct questions"):
        load_examples([write_run(tmp_path / "run", rows)])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("model_fingerprint", "9", r"differ in their model fingerprint \(.*one: .*; .*two: 9\)\. Fit them separately"),
        (
            "prompts_fingerprint",
            "9",
            r"differ in their prompts fingerprint \(.*one: .*; .*two: 9\)\. Fit them separately",
        ),
        (
            "max_tokens",
            9,
            r"differ in their max tokens \(.*one: 8; .*two: 9\)\. Label all runs with the same number of tokens",
        ),
    ],
)
def test_runs_that_do_not_belong_together_are_refused_by_name(tmp_path, key, value, words):
    runs = [write_run(tmp_path / "one", planted_rows(60)[0]), write_run(tmp_path / "two", [], **{key: value})]
    with pytest.raises(BadSetting, match=words):
        load_examples(runs)


def test_a_run_named_twice_would_count_its_questions_twice(tmp_path):
    run = write_run(tmp_path / "run", planted_rows(60)[0])
    with pytest.raises(BadSetting, match="given twice"):
        load_examples([run, run])


def test_runs_of_one_folder_name_can_be_fitted_together(tmp_path):
    runs = [write_run(tmp_path / f"{seed}" / "run", planted_rows(40, seed=seed)[0]) for seed in (1, 2)]
    assert len(load_examples(runs).rows) == 80


def test_benefit_without_open_book_answers_is_refused_with_the_way_out(tmp_path):
    run = write_run(tmp_path / "run", planted_rows(60)[0])
    with pytest.raises(BadSetting, match=r"with `index`, or set target='known'"):
        load_examples([run], target="benefit")


def test_rows_that_lost_their_states_are_named(tmp_path):
    rows, states = planted_rows(60)
    run = write_run(tmp_path / "run", rows, states)
    lines = re.sub(r', "vector": \["vectors-[0-9a-f-]+.safetensors", 7\]', "", (run / "labels.jsonl").read_text())
    (run / "labels.jsonl").write_text(lines)
    with pytest.raises(
        ArtifactError, match=r"question '0-7' .* has no hidden states. Run .knowgate label. again with .layers."
    ):
        load_examples([run])


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="Make one: knowgate label"):
        load_examples([tmp_path])


def test_a_target_nobody_asked_for_is_named_where_fitting_fails(tmp_path):
    rows, states = planted_rows(60)
    known = [replace(row, closed=replace(row.closed, correct=True)) for row in rows]
    run = write_run(tmp_path / "run", known, states)
    with pytest.raises(BadInput, match=r"there are 0 questions that need retrieval and 60 .* at least 8 of each kind"):
        load_examples([run])
