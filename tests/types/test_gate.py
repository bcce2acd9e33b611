"""What a gate is that says nothing of itself but its score."""

import doctest
from dataclasses import dataclass, replace

import pytest

import knowgate
from knowgate.types import Gate, Question, Reading, Signal, SignalRequest, gate

ASKED = [Question("a"), Question("b")]


class HalfGate(Gate):
    def score(self, questions, readings):
        return [0.5 for _ in questions]


def test_a_gate_needs_only_a_score_method():
    assert HalfGate().score(ASKED, [Reading()] * 2) == [0.5, 0.5]
    with pytest.raises(TypeError, match="score"):
        type("Empty", (Gate,), {})()


def test_gate_is_a_public_name():
    assert knowgate.Gate is Gate


def test_a_minimal_gate_has_empty_defaults():
    bare, readings = HalfGate(), [Reading()] * 2
    assert (bare.name, bare.needs, bare.request, bare.threshold, bare.note) == (
        "half",
        frozenset(),
        SignalRequest(),
        0.5,
        "",
    )
    assert bare.bind(None, "") is bare
    assert bare.find_neighbors(ASKED) == [(), ()]
    assert (bare.labels, bare.build_label_prompts(ASKED, readings), bare.recorded_signal) == ((), [], "")
    assert (bare.explain(ASKED, readings), bare.count_rounds(ASKED, readings)) == (["", ""], [1, 1])
    assert bare.passage_filter is None


@pytest.mark.parametrize(
    ("needs", "want"),
    [
        ({Signal.DRAFT}, SignalRequest(draft_tokens=32)),
        ({Signal.LOGPROBS}, SignalRequest(draft_tokens=32)),
        ({Signal.DRAFT, Signal.SAMPLES}, SignalRequest(draft_tokens=32, samples=10)),
        ({Signal.LABELS}, SignalRequest()),
        ({Signal.HIDDEN}, SignalRequest()),
    ],
)
def test_the_request_follows_from_the_needed_signals(needs, want):
    assert type("SomeGate", (HalfGate,), {"needs": frozenset(needs)})().request == want


def test_every_default_may_become_a_field():
    @dataclass(frozen=True)
    class FieldsGate(HalfGate):
        threshold: float
        name: str = "mine"
        note: str = ""

    made = FieldsGate(0.25)
    assert (made.threshold, made.name, made.note) == (0.25, "mine", "")
    assert replace(made, note="so").note == "so"


def test_a_required_field_does_not_inherit_the_default_property():
    @dataclass(frozen=True)
    class FieldsGate(HalfGate):
        threshold: float

    with pytest.raises(TypeError, match="threshold"):
        FieldsGate()


def test_every_default_may_become_a_property_or_a_plain_attribute():
    class OtherGate(HalfGate):
        name = "other"

        @property
        def threshold(self):
            return 0.1

    assert (OtherGate().name, OtherGate().threshold) == ("other", 0.1)


def test_its_example_runs():
    result = doctest.testmod(gate)
    assert (result.failed, result.attempted > 0) == (0, True)


def test_a_member_that_was_renamed_is_rejected_when_the_class_is_made():
    with pytest.raises(TypeError, match=r"OldGate\.want has no effect: it is now called `request`"):

        class OldGate(HalfGate):
            want = SignalRequest()
