"""`import knowgate as kg`: what is there, what it costs, and the whole story in one script."""

import importlib
import inspect
import json
import os
import runpy
import subprocess
import sys

import pytest

import knowgate as kg
from tests.support.invented import write_invented
from tools.structure import ROOT, SOURCE

TOUR = ROOT / "examples" / "library.py"
ASK = ("AdaptiveRAG", "load_model", "load_gate", "default_gate", "load_retriever", "build_index")
SERVE = ("PipelineOptions", "load_settings", "build_pipeline", "answer_record", "decision_record")
LEARN = ("label", "open_run", "fit", "calibrate", "evaluate", "write_report", "load_questions")
EXTEND = ("Gate", "Reading", "Signal", "SignalRequest", "Question", "Passage", "Answer", "Decision", "Completion")


def test_the_names_to_ask_to_learn_to_serve_and_to_extend_are_public():
    assert {*ASK, *SERVE, *LEARN, *EXTEND, "KnowgateError"} <= set(kg.__all__)


def test_no_public_name_is_hidden_by_a_module():
    assert not {path.stem for path in SOURCE.iterdir()} & set(kg.__all__)


def test_the_verbs_stay_functions_after_their_packages_are_loaded():
    for package in ("labels", "training", "gates", "evaluation", "papers"):
        importlib.import_module(f"knowgate.{package}")
    assert all(inspect.isfunction(getattr(kg, name)) for name in LEARN)


def test_every_verb_says_what_it_takes():
    assert all(inspect.getdoc(getattr(kg, name)) for name in LEARN)


def test_importing_it_does_not_even_load_numpy():
    code = "import sys, knowgate; print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ})
    assert done.stdout.strip() == "False"


# --- the tour -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toured(tmp_path_factory):
    """The script's own names, after it ran on the fake model."""
    folder = tmp_path_factory.mktemp("tour")
    made = write_invented(folder / "in")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(TOUR), made.model, made.data, str(made.docs), str(folder / "out")])
        names = runpy.run_path(str(TOUR))
    return {**names, "folder": folder / "out", "made": made}


def test_the_tour_is_fifteen_lines():
    body = TOUR.read_text(encoding="utf-8").split('"""', 2)[2]
    assert len([line for line in body.splitlines() if line.strip()]) <= 15


def test_the_tour_imports_nothing_else_of_ours():
    assert TOUR.read_text(encoding="utf-8").count("knowgate") == 1


def test_the_tour_learns_to_tell_what_the_model_knows(toured):
    measures = toured["evaluation"].gate("gate").measures
    assert measures["auroc"].value > 0.9
    assert measures["gain"].value > 0.1
    assert 0.25 < measures["rate"].value < 0.75


def test_the_tour_leaves_a_gate_with_the_threshold_it_chose(toured):
    assert kg.load_gate(str(toured["folder"] / "gate")).threshold == toured["calibration"].threshold


def test_the_tour_writes_a_report(toured):
    summary = json.loads((toured["folder"] / "report" / "summary.json").read_text())
    assert summary["questions"] == 30


def test_the_tour_asks(toured):
    known, unknown = toured["made"].questions[-2:]
    answers = toured["rag"].answer_many([known, unknown])
    assert [answer.text for answer in answers] == [known.answers[0], unknown.answers[0]]
    assert answers[1].decision.retrieve


def test_everything_the_tour_makes_shows_itself_in_a_notebook(toured):
    made = [toured[name] for name in ("gate", "calibration", "evaluation")] + [toured["runs"]["test"]]
    assert all(one._repr_html_().count("<table>") == 1 for one in made)
    assert all(len(repr(one).splitlines()) <= 12 for one in made)
