"""What all adapters are tried with: a model that knows one thing, a gate, two documents."""

import os

import pytest

# nothing a test does is told to anybody
for name, value in {
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}.items():
    os.environ.setdefault(name, value)

from knowgate.gates import load_gate
from knowgate.gates.rules.rule_set import load_rules
from knowgate.integrations.decider import Decider
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Passage, Signal

KNOWN = "Who wrote Hamlet?"
UNKNOWN = "Who runs the canteen of Balaland?"
PASSAGE = Passage("canteen", "Mira runs the canteen of Balaland.", "Canteen", 2.0)
TABLE = {
    KNOWN: {"closed": "William Shakespeare", "logprob": -0.01, "known": True},
    UNKNOWN: {"closed": "Nobody", "open": "Mira", "logprob": -3.0, "known": False},
}


class OnePassage:
    """Finds the one passage, whatever is asked; remembers what was."""

    name = "one"
    fingerprint = "one"

    def __init__(self):
        self.asked = []

    def search(self, queries, k):
        self.asked += queries
        return [[PASSAGE][:k] for _ in queries]


@pytest.fixture
def retriever():
    return OnePassage()


@pytest.fixture
def rag(retriever):
    return AdaptiveRAG(FakeModel(TABLE), load_gate("logprob:mean"), retriever, rules=load_rules(None))


@pytest.fixture
def decider(rag):
    return Decider(rag)


@pytest.fixture
def broken():
    """A decider whose gate cannot be read: the model gives no log-probabilities."""
    model = FakeModel(TABLE, offers=frozenset({Signal.DRAFT}))
    return lambda fall_open: Decider(AdaptiveRAG(model, load_gate("logprob:mean")), fall_open)
