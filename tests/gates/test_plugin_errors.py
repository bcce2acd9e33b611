"""Gates of other packages that raise errors of their own."""

import pytest

from knowgate.errors import KnowgateError, ModelError
from knowgate.gates import load_gate
from knowgate.gates.scoring import score_questions, wrap_plugin_errors
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Gate, Question, Reading


class Stumbling(Gate):
    """Raises in the method it is told to."""

    name = "stumbling"

    def __init__(self, where):
        self.where = where

    def score(self, questions, readings):
        self.stumble("score")
        return [0.5 for _ in questions]

    def explain(self, questions, readings):
        self.stumble("explain")
        return ["" for _ in questions]

    def find_neighbors(self, questions):
        self.stumble("find_neighbors")
        return super().find_neighbors(questions)

    def bind(self, model, prompts):
        self.stumble("bind")
        return self

    def stumble(self, here):
        if here == self.where:
            raise ZeroDivisionError("of all\nthings")


@pytest.mark.parametrize("where", ["score", "explain", "find_neighbors", "bind"])
def test_errors_of_a_plugin_name_the_plugin(where):
    with pytest.raises(ModelError) as caught:
        AdaptiveRAG(model=FakeModel(), gate=Stumbling(where)).decide("who?")
    assert str(caught.value) == (
        "gate 'stumbling' (tests.gates.test_plugin_errors.Stumbling) failed: ZeroDivisionError: of all. "
        "This gate is a plugin, not part of knowgate. Report the error to the plugin's author."
    )


def test_an_error_of_our_own_gates_is_not_attributed_to_a_plugin():
    with pytest.raises(ZeroDivisionError), wrap_plugin_errors(load_gate("never")):
        raise ZeroDivisionError


def test_a_gates_own_explanation_is_kept():
    with pytest.raises(KnowgateError, match=r"^mine$"), wrap_plugin_errors(Stumbling("")):
        raise KnowgateError("mine")


def test_needs_that_are_text_are_rejected():
    gate = Stumbling("")
    gate.score = lambda questions, readings: ["high"]
    with pytest.raises(ModelError, match="did not return a list of numbers"):
        score_questions(gate, [Question("who?")], [Reading()])
