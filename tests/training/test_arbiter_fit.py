"""Fitting the features arbiter: what it learns, what its folder holds, what is refused."""

import json
from dataclasses import replace

import pytest

from knowgate.data.runs.records import read_beliefs
from knowgate.data.runs.table import load_label_table
from knowgate.errors import ArtifactError, BadInput, BadSetting, UnknownName, UnsupportedSignal
from knowgate.gates.arbiters import load_arbiter, offline_arbitration
from knowgate.gates.arbiters.fitted_arbiter import ARBITER_FORMAT
from knowgate.gates.arbiters.offline_arbitration import arbitrate
from knowgate.gates.artifacts.gate_folder import read_artifact
from knowgate.models.fake import FakeModel
from knowgate.training.arbiter import fit_arbiter
from tests.support.hand_gate import PROMPTS, write_rows
from tests.support.pairs_by_hand import Prefers, both, pair_row, pair_rows, pair_run


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    place = tmp_path_factory.mktemp("arbiter")
    return fit_arbiter(pair_run(place / "run", 400), out=place / "arbiter", command="knowgate fit arbiter")


def refused(tmp_path, rows, **options):
    with pytest.raises((BadInput, BadSetting)) as caught:
        fit_arbiter(write_rows(tmp_path / "run", rows), out=tmp_path / "out", **options)
    return str(caught.value)


def test_it_learns_that_sure_answers_are_right(fitted):
    measured = fitted.artifact.manifest["metrics"]
    assert measured["auroc_open"]["value"] == pytest.approx(1.0)
    assert measured["accuracy"]["value"] > measured["always"]["value"] + 0.1


def test_its_folder_says_what_it_is_bound_to(fitted):
    made = fitted.artifact.manifest
    assert (made["arbiter"], made["needs"], made["wants_passages"]) == ("features", ["logprobs"], True)
    assert made["model"]["fingerprint"] == FakeModel().fingerprint
    assert sum(made["split"].values()) == 400
    card = (fitted.artifact.path / "README.md").read_text()
    assert "accuracy of the chosen answer" in card
    assert "knowgate fit arbiter" in card


def test_a_changed_file_is_noticed(fitted, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(fitted.artifact.path, copy)
    (copy / "weights.safetensors").write_bytes(b"other")
    with pytest.raises(ArtifactError, match="changed or damaged"):
        load_arbiter(str(copy))


def test_an_edited_manifest_is_noticed(fitted, tmp_path):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(fitted.artifact.path, copy)
    made = json.loads((copy / "arbiter.json").read_text())
    (copy / "arbiter.json").write_text(json.dumps({**made, "prompts": "others"}))
    with pytest.raises(ArtifactError, match="edited by hand"):
        read_artifact(copy, ARBITER_FORMAT)


def test_a_folder_without_arbiter_is_named(tmp_path):
    with pytest.raises(ArtifactError, match="knowgate fit arbiter"):
        read_artifact(tmp_path, ARBITER_FORMAT)


def test_another_llm_is_refused_unless_as_plug_in(fitted):
    other = FakeModel({"x": "y"})
    with pytest.raises(ArtifactError, match="plug_in=True"):
        fitted.bind(other, PROMPTS)
    plugged = replace(fitted, plug_in=True).bind(other, PROMPTS)
    assert "plug-in, fitted on fake" in plugged.note


def test_answers_without_log_probabilities_are_refused(fitted):
    with pytest.raises(UnsupportedSignal, match="log-probabilities"):
        fitted.estimate([both("Paris", "Rome")])


def test_the_choices_are_on_record_and_read_from_there(fitted, tmp_path):
    run = pair_run(tmp_path / "test", 60, seed=7)
    trial = load_label_table([run])
    first = arbitrate(trial, str(fitted.artifact.path))
    assert first.right.mean() > trial.retrieved_right.mean()
    assert [one.arbiter for one in read_beliefs(run)] == ["arbiter"]
    again = arbitrate(trial, "arbiter")  # by its name alone
    assert (again.from_memory == first.from_memory).all()
    assert again.fingerprint == first.fingerprint


def test_questions_it_was_fitted_on_are_refused(fitted):
    run = fitted.artifact.path.parent / "run"
    with pytest.raises(BadSetting, match="was fitted on"):
        arbitrate(load_label_table([run]), str(fitted.artifact.path))


def test_rows_without_texts_are_refused_where_nothing_is_on_record(fitted, tmp_path):
    bare = [replace(row, question="") for row in pair_rows(20, seed=9)]
    trial = load_label_table([write_rows(tmp_path / "bare", bare)])
    with pytest.raises(BadSetting, match="packed without texts"):
        arbitrate(trial, str(fitted.artifact.path))


# --- bad input ------------------------------------------------------------------------------------


def test_rows_answered_one_way_only(tmp_path):
    rows = [replace(row, open=None, benefit=None) for row in pair_rows(60)]
    assert "has an answer with passages. An arbiter chooses" in refused(tmp_path, rows)


def test_rows_of_which_some_are_answered_one_way_are_left_out_and_counted(tmp_path):
    rows = [replace(row, open=None, benefit=None) if i < 20 else row for i, row in enumerate(pair_rows(220))]
    made = fit_arbiter(write_rows(tmp_path / "run", rows), out=tmp_path / "out").artifact.manifest
    assert "20 rows were left out: not opened" in made["notes"]
    assert sum(made["split"].values()) == 200


def test_empty_answers(tmp_path):
    rows = [replace(row, open=replace(row.open, text=" ")) for row in pair_rows(60)]
    assert "the open-book answers. Every answer is empty" in refused(tmp_path, rows)


def test_an_llm_that_always_abstains(tmp_path):
    rows = [replace(row, open=replace(row.open, text="Not mentioned.")) for row in pair_rows(60)]
    assert "the open-book answers. Every answer declines to answer ('Not mentioned.')" in refused(tmp_path, rows)


@pytest.mark.parametrize(("right", "counts"), [(True, (60, 0)), (False, (0, 60))])
def test_answers_that_are_all_right_or_all_wrong(tmp_path, right, counts):
    rows = [pair_row(str(i), 0.5, i % 2 == 0, right) for i in range(60)]
    assert "there are {} right open-book answers and {} wrong".format(*counts) in refused(tmp_path, rows)


def test_answers_that_never_differ(tmp_path):
    rows = [pair_row(str(i), 0.5, i % 2 == 0, i % 2 == 0, texts=("the same", "The same.")) for i in range(60)]
    assert "Only 0 of 60 questions" in refused(tmp_path, rows)


def test_runs_that_are_packed(tmp_path):
    assert "which removes all texts" in refused(tmp_path, [replace(row, question="") for row in pair_rows(60)])


def test_a_mode_that_is_none(tmp_path):
    with pytest.raises(UnknownName, match="features"):
        fit_arbiter(pair_run(tmp_path / "run"), out=tmp_path / "out", mode="magic")


def test_an_option_of_another_mode_is_refused(tmp_path):
    with pytest.raises(BadSetting, match=r"fit arbiter \(mode=features\): unknown option 'base'"):
        fit_arbiter(pair_run(tmp_path / "run"), out=tmp_path / "out", mode="features", base="smollm")


# --- on record ------------------------------------------------------------------------------------


class Tires(Prefers):
    """Is interrupted after the first batch."""

    def estimate(self, answers):
        if self.asked:
            raise KeyboardInterrupt
        return super().estimate(answers)


def test_what_was_arbitrated_before_an_interrupt_is_not_arbitrated_again(tmp_path, monkeypatch):
    monkeypatch.setattr(offline_arbitration, "BATCH_SIZE", 32)
    run, asked, told = pair_run(tmp_path / "run", 80), [], []
    with pytest.raises(KeyboardInterrupt):
        arbitrate(load_label_table([run]), Tires("memory", asked))
    assert len(asked) == 32
    arbitrate(
        load_label_table([run]), Prefers("memory", asked), on_progress=lambda done, total: told.append((done, total))
    )
    assert len(asked) == len(set(asked)) == 80
    assert told == [(32, 48), (48, 48)]


def test_rules_that_were_changed_are_asked_anew(tmp_path):
    run = pair_run(tmp_path / "run", 20)
    arbitrate(load_label_table([run]), "rules")
    line = json.loads((run / "beliefs.jsonl").read_text())
    (run / "beliefs.jsonl").write_text(json.dumps({**line, "fingerprint": "of earlier ones"}) + "\n")
    assert arbitrate(load_label_table([run]), "rules").fingerprint == line["fingerprint"]
