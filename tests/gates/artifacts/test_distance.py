"""How far a question lies from those a gate was fitted on: by states, or by the look of it where there are none."""

from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.signals.vectors import SURFACE_WIDTH, surface_features
from knowgate.errors import ArtifactError, ModelError
from knowgate.evaluation.evaluation_summary import evaluation_to_dict
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.gates import load_gate
from knowgate.gates.artifacts.drift import compute_distances, compute_far_share, fit_distance, format_far_warning
from knowgate.gates.artifacts.gate_folder import read_artifact, write_artifact
from knowgate.gates.hidden_state import ProbeGate
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.answer_json import decision_record
from knowgate.training.examples import load_examples
from knowgate.training.fusion import fit_fusion
from knowgate.training.gate import fit
from knowgate.training.gate_artifact import save_fitted
from knowgate.types import Gate, Question, Reading
from tests.support.hand_gate import write_gate
from tests.support.planted_run import LAYER, MODEL, WIDTH, planted_rows, write_run

RNG = np.random.default_rng(0)


def test_one_in_a_hundred_similar_questions_and_all_others_are_far():
    axes = RNG.standard_normal((5, 40))
    near = (RNG.standard_normal((3_000, 5)) @ axes + 0.1 * RNG.standard_normal((3_000, 40))).astype(np.float32)
    tensors = fit_distance(near[:600], near[600:1_000])
    assert (compute_distances(tensors, near[1_000:]) > 1).mean() == pytest.approx(0.01, abs=0.012)
    assert (compute_distances(tensors, near[1_000:] + 3 * RNG.standard_normal(40)) > 1).all()  # off the five axes
    assert (compute_distances(tensors, 20 * near[1_000:]) > 1).mean() > 0.9  # along them, but too far


def test_a_distance_equals_the_value_worked_out_by_hand():
    rows = np.array([[1.0, 0], [-1, 0], [0, 0.5], [0, -0.5]] * 2, dtype=np.float32)  # deviations 0.71 and 0.35
    tensors = fit_distance(rows, rows)
    assert compute_distances(tensors, np.array([[1.0, 0]], dtype=np.float32)) == pytest.approx([1.0], abs=1e-3)
    assert compute_distances(tensors, np.array([[3.0, 0]], dtype=np.float32)) == pytest.approx([3.0], abs=1e-2)
    assert compute_distances(tensors, np.array([[0, 1.5]], dtype=np.float32)) == pytest.approx([3.0], abs=1e-2)


def test_few_rows_and_numbers_that_never_change_still_give_a_distance():
    rows = np.zeros((3, 4), dtype=np.float32)
    assert np.isfinite(compute_distances(fit_distance(rows, rows), rows + 1)).all()


def test_a_warning_appears_only_if_more_questions_are_far_than_expected():
    assert format_far_warning("mine", 0.05, 100) == format_far_warning("mine", None, 100) == ""
    assert format_far_warning("mine", 0.06, 100).startswith(
        "6 of 100 questions are unlike those that gate 'mine' was trained on"
    )
    assert compute_far_share([0.2, 1.2, None]) == 0.5
    assert compute_far_share([None]) is None


def test_surface_features_of_a_question_are_those_counted_by_hand():
    plain, chosen, chinese = surface_features(
        [Question("Who is 42?"), Question("Which", choices=("x", "y")), Question("谁写了?", lang="zh")]
    )
    assert plain[0] == pytest.approx(np.log1p(10))
    assert plain[4:7].tolist() == pytest.approx([1.0, 0.0, 0.2])
    assert chosen[3] > 0 == plain[3]
    assert chinese[5] > 0.5
    assert len(plain) == SURFACE_WIDTH


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distance")
    run = write_run(folder / "run", *planted_rows(200))
    fit("probe", [run], out=folder / "probe", kind="linear")
    return folder


def states(shift, n=100):
    found = np.random.default_rng(1).standard_normal((n, WIDTH)).astype(np.float32) + shift
    return [Reading(hidden={LAYER: state}) for state in found]


def test_a_fitted_gate_generalizes_to_unseen_states(fitted):
    gate, asked = load_gate(str(fitted / "probe")), [Question("?")] * 100
    assert gate.artifact.manifest["distance"] == {"of": "state", "layer": LAYER}
    assert compute_far_share(gate.distances(asked, states(0))) < 0.1
    assert compute_far_share(gate.distances(asked, states(9))) == 1.0
    assert gate.distances([], []) == []


def test_a_gate_without_states_measures_surface_features(fitted, tmp_path):
    run = write_run(tmp_path / "run", planted_rows(200)[0])
    examples = load_examples([run], layers=())
    save_fitted(fit_fusion(examples, text=False), examples, tmp_path / "gate")
    gate = load_gate(str(tmp_path / "gate"))
    assert gate.artifact.manifest["distance"] == {"of": "look"}
    asked = [Question("question 0-5?"), Question("哪一个?" * 9), Question("", id="packed")]
    near, far = gate.distances(asked[:2], [Reading()] * 2)
    assert near < 1.001 < far
    assert gate.distances(asked[2:], [Reading()]) == [None]


def test_gates_of_older_versions_have_no_distance(tmp_path):
    gate = load_gate(str(write_gate(tmp_path / "old")))
    assert gate.distances([Question("?")], [Reading()]) == [None]
    assert load_gate("logprob").distances([Question("?")], [Reading()]) == [None]


def test_eval_counts_the_far_questions(fitted, tmp_path):
    rows, blocks = planted_rows(100, seed=3)
    other = write_run(tmp_path / "other", rows, {name: block + 9 for name, block in blocks.items()})
    near = write_run(tmp_path / "near", *planted_rows(100, seed=4))

    def shares(run):
        found = evaluate([str(fitted / "probe"), "logprob"], [run], resamples=0)
        return [gate["far"] for gate in evaluation_to_dict(found)["gates"]]

    assert shares(other) == [1.0, None]
    assert shares(near)[0] < 0.1


def test_a_decision_carries_its_distance(fitted):
    class Near(Gate):
        def score(self, questions, readings):
            return [0.2 for _ in questions]

        def distances(self, questions, readings):
            return [0.123456 for _ in questions]

    decision = AdaptiveRAG(MODEL, Near()).decide("question 0-5?")
    assert decision.distance == 0.123456
    assert decision_record(decision)["distance"] == 0.1235
    assert "distance" not in decision_record(AdaptiveRAG(MODEL, load_gate("never")).decide("who?"))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"edge": None}, "'distance.edge' is missing"),
        ({"edge": np.zeros(1, np.float32)}, "'distance.edge' contains numbers that are too large or too small"),
        ({"scale": np.ones(WIDTH + 1, np.float32)}, "'distance.scale' has the shape"),
        ({"other": np.ones(1, np.float32)}, "unknown tensor 'distance.other'"),
    ],
)
def test_a_gate_with_broken_distance_tensors_is_rejected(fitted, changed, said):
    artifact = read_artifact(fitted / "probe")
    tensors = {**artifact.tensors, **{f"distance.{name}": block for name, block in changed.items()}}
    kept = {name: block for name, block in tensors.items() if block is not None}
    with pytest.raises(ArtifactError, match=said):
        ProbeGate.from_artifact(replace(artifact, tensors=kept))


def test_a_distance_on_a_layer_that_is_not_read_is_rejected(fitted, tmp_path):
    artifact = read_artifact(fitted / "probe")
    source = {"of": "state", "layer": LAYER + 1}
    write_artifact(tmp_path / "gate", {**artifact.manifest, "distance": source}, artifact.tensors, "")
    with pytest.raises(ArtifactError, match=f"uses layer {LAYER + 1}, which is missing in `want.layers`"):
        load_gate(str(tmp_path / "gate"))


def test_states_of_another_width_are_rejected(fitted):
    gate = load_gate(str(fitted / "probe"))
    with pytest.raises(ArtifactError, match="Another LLM or embedding"):
        gate.distances([Question("?")], [Reading(hidden={LAYER: np.zeros(WIDTH + 1, np.float32)})])


@pytest.mark.parametrize(
    ("given", "said"),
    [([], "returned 0 distances for 1"), ([float("nan")], "returned the distance nan"), (["x"], "distance x")],
)
def test_distances_of_a_plugin_are_checked(given, said):
    class Odd(Gate):
        def score(self, questions, readings):
            return [0.2 for _ in questions]

        def distances(self, questions, readings):
            return given

    with pytest.raises(ModelError, match=said):
        AdaptiveRAG(MODEL, Odd()).decide("who?")
