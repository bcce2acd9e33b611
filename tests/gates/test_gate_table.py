"""Loading by spec, the check against a backend, the check of scores, the printed table."""

import math
from dataclasses import dataclass

import pytest

from knowgate.errors import BadSetting, ModelError, UnknownName, UnsupportedSignal
from knowgate.gates import FITTED_GATES, GATES, default_gate, load_gate
from knowgate.gates.baselines import RandomGate
from knowgate.gates.logprob import LogprobGate
from knowgate.gates.scoring import check_model_signals, score_questions
from knowgate.models.fake import FakeModel
from knowgate.types import Gate, Question, Reading, Signal
from tools.docs.gate_sections import render_gate_table


@dataclass(frozen=True)
class SayingGate(Gate):
    """Gives the needs it was told."""

    told: tuple[float, ...]

    def score(self, questions, readings):
        return list(self.told)


def test_a_spec_loads_the_gate_with_its_options():
    assert load_gate("logprob") == LogprobGate()
    assert load_gate("logprob:mean,draft_tokens=4") == LogprobGate("mean", draft_tokens=4)
    assert load_gate("random:rate=0.3,seed=1") == RandomGate(rate=0.3, seed=1)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("logprobs", UnknownName, "unknown gate 'logprobs'. Did you mean 'logprob'?"),
        ("", UnknownName, "unknown gate ''"),
        ("logprob:median", BadSetting, "gate 'logprob': option 'statistic' is 'median'. Use one of: first, mean, min"),
        ("random:rate=2", BadSetting, "rate is 2.0"),
        ("random:speed=2", BadSetting, "unknown option 'speed'. Known options: rate, seed"),
        ("never:x", BadSetting, "Known options: none"),
        ("always:x", BadSetting, "option 'unless' is 'x'. Use one of: nothing, rules"),
        ("flare:theta=low", BadSetting, "option 'theta' must be a number, not 'low'"),
    ],
)
def test_a_wrong_spec_is_rejected_with_what_is_allowed(spec, error, message):
    with pytest.raises(error, match=message.replace("?", r"\?")):
        load_gate(spec)


def test_a_gate_without_its_signals_is_rejected_with_gates_that_work():
    model = FakeModel(name="plain", offers=frozenset({Signal.DRAFT}))
    with pytest.raises(UnsupportedSignal) as caught:
        check_model_signals(load_gate("logprob"), model)
    assert str(caught.value) == (
        "gate 'logprob' needs logprobs, which plain does not provide. "
        "Use a gate that works with it: always, never, random, skr."
    )


def test_the_gates_that_work_are_found_by_what_they_need():
    model = FakeModel(offers=frozenset({Signal.DRAFT, Signal.LOGPROBS}))
    with pytest.raises(
        UnsupportedSignal, match=r"Use a gate that works with it: always, never, random, logprob, flare, skr\.$"
    ):
        check_model_signals(load_gate("prompt"), model)


def test_a_backend_with_all_signals_accepts_every_gate():
    for name in GATES:
        check_model_signals(load_gate(name), FakeModel())


def test_scores_in_range_are_given_back():
    assert score_questions(SayingGate((0, 0.5, 1)), [Question("a")] * 3, [Reading()] * 3) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("need", [math.nan, math.inf, -0.001, 1.001])
def test_a_score_outside_0_to_1_is_an_error_that_names_the_question(need):
    with pytest.raises(ModelError, match=r"gate 'saying' returned .* for 'Why so'"):
        score_questions(SayingGate((0.5, need)), [Question("fine"), Question("Why so")], [Reading()] * 2)


def test_the_markdown_table_has_a_row_for_each_gate_in_order():
    lines = render_gate_table().splitlines()
    assert lines[:2] == [
        "| gate | retrieves when | needs | extra cost | reference |",
        "| --- | --- | --- | --- | --- |",
    ]
    assert [line.split("`")[1] for line in lines[2:]] == [*GATES, *FITTED_GATES]
    assert "| `never` | never | - | nothing | - |" in lines


# --- the default ----------------------------------------------------------------------------------


def test_a_model_with_log_probabilities_gets_the_log_probability_gate_by_default():
    assert default_gate(FakeModel()).name == "logprob"


def test_a_model_that_returns_only_text_retrieves_always_except_for_what_rules_skip():
    gate = default_gate(FakeModel(offers=frozenset({Signal.DRAFT, Signal.SAMPLES})))
    assert (gate.name, gate.obeys_rules) == ("always", True)
