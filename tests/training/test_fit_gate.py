"""The verb `fit`: what it takes, what it refuses, what it gives back."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest

from knowgate.data.runs.folder import RunFolder
from knowgate.errors import ArtifactError, BadSetting, MissingExtra, UnknownName
from knowgate.gates import FITTED_GATES
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE
from knowgate.gates.hidden_state import ProbeGate
from knowgate.training.fit_function import call_fit_function, check_fit_options, read_fit_options, read_requirements
from knowgate.training.gate import fit, list_fittable_gates, load_fit_function
from tests.support.hand_gate import write_rows
from tests.support.pairs_by_hand import pair_row, pair_run
from tests.support.planted_run import planted_rows, scored_elsewhere, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("labels") / "run", *planted_rows(200))


def test_it_gives_the_gate_as_it_is_loaded_from_its_folder(run, tmp_path):
    gate = fit("probe", run, out=tmp_path / "gate", kind="linear")
    assert isinstance(gate, ProbeGate)
    assert gate.artifact.path == tmp_path / "gate"
    assert gate.artifact.options["kind"] == "linear"
    assert len(scored_elsewhere(tmp_path / "gate", run)) == 200


@pytest.mark.parametrize("form", [str, Path, RunFolder, lambda run: [run], lambda run: (RunFolder(run),)])
def test_runs_are_given_as_path_or_folder_alone_or_several(run, tmp_path, form):
    made = fit("probe", form(run), out=str(tmp_path / "gate"), kind="linear").artifact.manifest
    assert made["data"] == [{"run": "run"}]


def test_threshold_target_and_command_reach_the_folder(run, tmp_path):
    gate = fit("probe", run, out=tmp_path / "gate", kind="linear", target="known", threshold=0.3, command="by hand")
    assert (gate.threshold, gate.artifact.manifest["target"]) == (0.3, "known")
    assert "by hand" in (tmp_path / "gate" / "README.md").read_text(encoding="utf-8")


def test_the_notes_of_a_fit_are_in_the_manifest(run, tmp_path):
    fit("fusion", run, out=tmp_path / "gate", cheap=True)
    notes = json.loads((tmp_path / "gate" / "gate.json").read_text(encoding="utf-8"))["notes"]
    assert notes[0].startswith("all signals: dev AUROC")


def test_few_rows_give_a_gate_that_always_retrieves_and_says_why(tmp_path):
    run = pair_run(tmp_path / "both", 60)
    made = fit("fusion", run, out=tmp_path / "gate", cheap=True, text=False).artifact.manifest
    told = "by default it always retrieves: on [0-9]+ questions that it did not learn from, no threshold is shown"
    assert any(re.search(told, note) for note in made["notes"])
    assert made["threshold"] == ALWAYS_RETRIEVE
    assert made["calibrated"] is True


def test_a_safe_threshold_says_what_it_saves_and_loses(tmp_path):
    rows = [pair_row(f"r{i}", 0.1 if i % 2 else 0.9, bool(i % 2), True) for i in range(600)]
    run = write_rows(tmp_path / "run", rows)
    made = fit("fusion", run, out=tmp_path / "gate", cheap=True, text=False).artifact.manifest
    told = "On [0-9]+ questions that the gate did not learn from, it saves [0-9]+% of the searches and loses 0.0 points"
    assert any(re.search(told, note) for note in made["notes"])
    assert 0 < made["threshold"] < 1


def test_without_open_book_answers_the_card_says_that_the_threshold_is_not_calibrated(run, tmp_path):
    made = fit("fusion", run, out=tmp_path / "gate", cheap=True, text=False).artifact.manifest
    assert made["threshold"] == 0.5
    assert made["calibrated"] is False
    assert "not calibrated" in (tmp_path / "gate" / "README.md").read_text(encoding="utf-8")


def test_a_larger_loss_spares_more_searches(tmp_path):
    run = pair_run(tmp_path / "both", 300)
    strict, lax = (
        fit("fusion", run, out=tmp_path / str(loss), max_loss=loss, cheap=True, text=False).threshold
        for loss in (0.0, 0.3)
    )
    assert strict < lax


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"target": "known", "max_loss": 0.02},
            r"but the label runs \(recorded answers\) have none",
        ),
        ({"threshold": 0.3, "max_loss": 0.02}, "mutually exclusive"),
        ({"max_loss": 1.5}, "max_loss=1.5 is not allowed"),
    ],
)
def test_a_largest_loss_where_it_makes_no_sense_is_refused(run, tmp_path, options, said):
    with pytest.raises(BadSetting, match=said):
        fit("fusion", run, out=tmp_path / "gate", cheap=True, **options)


def test_another_seed_splits_otherwise(run, tmp_path):
    first, second = (fit("probe", run, out=tmp_path / str(seed), kind="linear", seed=seed) for seed in (0, 1))
    seen = [(gate.artifact.path / "seen.txt").read_text(encoding="utf-8") for gate in (first, second)]
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("probe", {"cheap": True}, "fit probe: unknown option 'cheap'. Known: balanced, kind, layer, position."),
        ("adaptive", {"layer": "mid"}, "fit adaptive: unknown option 'layer'."),
        ("probe", {"kind": "deep"}, "fit probe: kind='deep' is not allowed: it must be 'mlp' or 'linear'."),
        ("probe", {"layer": 4}, "fit probe: layer=4 is not allowed: it must be a text."),
        ("ik", {"epochs": "two"}, "fit ik: epochs='two' is not allowed: it must be a whole number."),
        ("ik", {"epochs": True}, "fit ik: epochs=True is not allowed: it must be a whole number."),
        ("kbm", {"tau": "x"}, "fit kbm: tau='x' is not allowed: it must be a number."),
        ("fusion", {"cheap": 1}, "fit fusion: cheap=1 is not allowed: it must be true or false."),
        ("fusion", {"cheap": True, "early": True}, "mutually exclusive"),
        ("uar", {"criteria": "intent"}, "Write intent=jsonl:FILE"),
        ("uar", {"criteria": "intent= ,time=x"}, "Write intent=jsonl:FILE"),
        (
            "probe",
            {"target": "both"},
            "target='both' is not allowed: it must be 'known', 'benefit', 'gain' or 'agree'.",
        ),
        ("probe", {"threshold": 2.0}, "threshold=2.0 is not allowed: it must be at most 1."),
    ],
)
def test_what_cannot_be_used_is_a_sentence(run, tmp_path, name, options, said):
    with pytest.raises(BadSetting, match=re.escape(said)):
        fit(name, run, out=tmp_path / "gate", **options)
    assert not (tmp_path / "gate").exists()


def test_a_folder_with_other_things_in_it_is_left_alone(run, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(
        ArtifactError, match=r"exists and is not a fitted gate\. It was not overwritten\. Choose another `out`"
    ):
        fit("probe", run, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_gate_takes_the_place_of_an_earlier_one(run, tmp_path):
    fit("probe", run, out=tmp_path / "gate", kind="linear", seed=1)
    assert fit("probe", run, out=tmp_path / "gate", kind="linear").artifact.manifest["gate"] == "probe"


def test_no_runs_and_an_unknown_gate_are_refused(tmp_path):
    with pytest.raises(BadSetting, match="Set `labels`"):
        fit("probe", [], out=tmp_path)
    with pytest.raises(UnknownName, match=r"unknown fitted gate 'prob'. Did you mean 'probe'"):
        fit("prob", ["run"], out=tmp_path)


def test_without_scikit_learn_the_extra_is_named(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(MissingExtra, match=r"fitting probe needs the 'train' extra"):
        fit("probe", run, out=tmp_path / "gate", kind="linear")


# --- what fit functions say of themselves ---------------------------------------------------------


def test_every_fitted_gate_of_the_table_can_be_fitted():
    assert list_fittable_gates() == [name for name in FITTED_GATES if name != "constant"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("probe", ["layer", "position", "kind", "balanced"]),
        ("fusion", ["cheap", "early", "text"]),
        ("adaptive", []),
        ("uar", ["criteria", "model"]),
        ("ik", ["base", "epochs", "learning_rate", "full", "mode", "tokens", "rows"]),
        ("kbm", ["base", "epochs", "learning_rate", "full", "head", "tau"]),
    ],
)
def test_the_options_of_a_gate_are_the_keywords_of_its_fit_that_have_a_text(name, options):
    assert list(read_fit_options(load_fit_function(name)).model_fields) == options


def test_an_option_has_a_default_and_rejects_other_values():
    options = read_fit_options(load_fit_function("kbm"))()
    assert (options.head, options.tau, options.epochs) == ("mastery", None, 3)

    def one(examples, *, rounds: Annotated[Literal[1, 3], "How often."] = 1): ...

    assert read_fit_options(one)(rounds=3).rounds == 3
    with pytest.raises(BadSetting, match="fit one: rounds=2 is not allowed: it must be 1 or 3"):
        check_fit_options("one", one, {"rounds": 2})


@pytest.mark.parametrize(("name", "target"), [("ik", "known"), ("kbm", "known"), ("uar", "known"), ("probe", None)])
def test_a_fit_says_what_it_learns_unless_told_otherwise(name, target):
    assert read_requirements(load_fit_function(name)).target == target


def test_only_what_is_asked_for_is_handed_in():
    def one(examples, *, seed, rounds=1):
        return examples, seed, rounds

    result = call_fit_function(one, "rows", {"rounds": 2}, seed=3, work=Path("here"), watch=None)
    assert result == ("rows", 3, 2)
