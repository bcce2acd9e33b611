"""Models of a gate, an arbiter and a search are loaded before the first request, by using them once."""

from knowgate.errors import ModelError
from knowgate.gates import load_gate
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.builder import load_gate_models, load_search_models
from knowgate.types.protocols import Arbiter


class RecordingFilter:
    """A second look that records how many passages it has read."""

    def __init__(self):
        self.counts = []

    def are_useful(self, questions, passages):
        self.counts += [len(row) for row in passages]
        return [True for _ in questions]


class RecordingArbiter(Arbiter):
    """An arbiter that records the answers that it compares."""

    name = fingerprint = "recording"

    def __init__(self):
        self.answers = []

    def estimate(self, answers):
        self.answers += [(pair.closed.text, pair.open.text) for pair in answers]
        raise ModelError("the first request reports errors")


def test_the_second_look_is_used_once_before_the_first_search():
    second_look = RecordingFilter()
    load_search_models(AdaptiveRAG(FakeModel(), load_gate("never"), second_look=second_look))
    assert second_look.counts == [1]


def test_the_arbiter_is_used_once_before_the_first_answer():
    arbiter = RecordingArbiter()
    load_gate_models(AdaptiveRAG(FakeModel(), load_gate("never"), arbiter=arbiter))
    assert arbiter.answers == [("Paris", "Lyon")]
