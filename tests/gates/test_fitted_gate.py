from pathlib import Path

import pytest

from knowgate.core.validation import read_json
from knowgate.gates import load_gate
from knowgate.gates.fitted_gate import describe_retrieval_rule, has_judge
from tests.support.hand_gate import write_gate

OLD = Path(__file__).parents[1] / "fixtures" / "old"
GUARANTEE = read_json(OLD / "calibrated-loss" / "gate.json")["guarantee"]
METRICS = {"auroc": {"value": 0.712, "low": 0.6, "high": 0.81}}


def test_a_fitted_gate_prints_its_facts_and_not_its_weights(tmp_path):
    gate = load_gate(str(write_gate(tmp_path / "mine", target="benefit", metrics=METRICS, threshold=0.42)))
    expected = "mine: for fake, fitted on 'benefit', AUROC 0.712 [0.600, 0.810], retrieves when need is above 0.42"
    assert repr(gate) == f"<FusionGate {expected}>"


def test_its_summary_says_how_the_threshold_was_chosen(tmp_path):
    gate = load_gate(str(write_gate(tmp_path / "mine", guarantee=GUARANTEE, threshold=-1.0)))
    assert repr(gate).endswith("retrieves always (chosen by guarantee)>")


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("judge", {}, True),
        ("stack", {}, True),
        ("kbm-certainty", {}, True),
        ("ik", {"mode": "lora"}, True),
        ("ik", {"mode": "text"}, False),  # a linear classifier
        ("fusion", {}, False),
        ("constant", {}, False),
    ],
)
def test_gates_with_a_judge_are_told_by_their_folder(tmp_path, kind, options, expected):
    assert has_judge(str(write_gate(tmp_path / "mine", gate=kind, options=options))) is expected


@pytest.mark.parametrize(("name", "expected"), [("judge", True), ("judge (2)", True), ("logprob:min", False)])
def test_gates_with_a_judge_are_told_by_their_name(name, expected):
    assert has_judge(name) is expected


@pytest.mark.parametrize(("threshold", "rule"), [(-1.0, "always"), (0.0, "when need is above 0"), (1.0, "never")])
def test_the_retrieval_rule_is_described(threshold, rule):
    assert describe_retrieval_rule(threshold) == rule


def test_in_a_notebook_the_curve_of_its_folder_is_an_image(tmp_path):
    path = write_gate(tmp_path / "mine", metrics=METRICS, model={"name": "<b>llm</b>", "fingerprint": "f"})
    (path / "curve.svg").write_text("<svg><script>alert(1)</script></svg>")
    shown = load_gate(str(path))._repr_html_()
    assert "0.712 [0.600, 0.810]" in shown
    assert "&lt;b&gt;llm&lt;/b&gt;" in shown
    assert '<img alt="ROC curve' in shown
    assert "<script>" not in shown


def test_a_gate_without_a_curve_is_a_table_alone(tmp_path):
    assert "<img" not in load_gate(str(write_gate(tmp_path / "mine")))._repr_html_()
