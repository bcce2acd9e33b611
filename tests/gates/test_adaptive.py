"""The gate of three classes, and the rounds of retrieval the pipeline takes for the third."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from knowgate.errors import ArtifactError
from knowgate.gates.adaptive import AdaptiveGate, predict_complexity
from knowgate.gates.artifacts.gate_folder import Artifact
from knowgate.models.fake import FakeModel
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.retrieval.passages import merge_passages
from knowgate.types import DecisionNote, Gate, Passage, Question, Reading


class Axes:
    """easy, hop and deep are axes of their own."""

    fingerprint = "axes"

    def embed(self, texts):
        return np.array([[float(word in text) for word in ("easy", "hop", "deep")] for text in texts], np.float32)


def gate(embedder=None, seen=(1, 1, 1)):
    tensors = {
        "weight": np.log(2) * np.eye(3, dtype=np.float32),
        "bias": np.zeros(3, np.float32),
        "seen": np.array(seen, np.float32),
    }
    manifest = {"gate": "adaptive", "options": {"embedder": "minilm", "embedder_fingerprint": "axes"}, "needs": [],
                "want": {"layers": []}, "threshold": 0.5, "calibration": {"kind": "none"}}  # fmt: skip
    return AdaptiveGate(Artifact(Path("adaptive"), manifest, tensors), embedder=embedder or Axes())


ASKED = [Question("easy"), Question("hop"), Question("deep")]
READ = [Reading()] * 3


def test_need_is_one_minus_the_probability_of_no_retrieval():
    # softmax of (log 2, 0, 0) is (1/2, 1/4, 1/4)
    assert gate().score(ASKED, READ) == pytest.approx([0.5, 0.75, 0.75])


def test_several_rounds_are_taken_if_the_third_class_is_likelier():
    assert gate().count_rounds(ASKED, READ) == [1, 1, 3]


def test_a_class_that_was_never_seen_has_no_probability():
    found = predict_complexity(gate(seen=(1, 1, 0)).artifact.tensors, Axes().embed(["deep"]))
    assert found == pytest.approx(np.array([[0.5, 0.5, 0.0]]))


def test_another_embedding_model_is_rejected():
    other = Axes()
    other.fingerprint = "something else"
    with pytest.raises(ArtifactError, match="was fitted with the embedding model minilm"):
        gate(other).score(ASKED, READ)


# --- rounds ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundsGate(Gate):
    """Always retrieves, in so many rounds."""

    rounds: int

    def score(self, questions, readings):
        return [1.0 for _ in questions]

    def count_rounds(self, questions, readings):
        return [self.rounds for _ in questions]


class Chain:
    """Each answer leads to the next passage: the mother is Ada, Ada was born in Rome."""

    name = fingerprint = "chain"

    def __init__(self):
        self.asked = []

    def search(self, queries, k):
        self.asked.append(list(queries))
        return [self._one(query)[:k] for query in queries]

    def _one(self, query):
        first = Passage("mother", "His mother is Ada.", score=1.0)
        return [Passage("birth", "Ada was born in Rome.", score=2.0), first] if "Ada" in query else [first]


QUESTION = "Where was his mother born?"


class Reader(FakeModel):
    """Answers by the most telling passage it is shown."""

    def _answer(self, prompt):
        return "Rome" if "born in Rome" in prompt.text else "Ada" if "mother is Ada" in prompt.text else "Oslo"


def answered(rounds, **options):
    retriever = Chain()
    answer = AdaptiveRAG(Reader(), RoundsGate(rounds), retriever, **options).answer(QUESTION)
    return answer, retriever.asked


def test_one_round_answers_from_the_first_passages():
    answer, asked = answered(1)
    assert (answer.text, asked) == ("Ada", [[QUESTION]])


def test_the_next_round_searches_with_question_and_answer():
    answer, asked = answered(3)
    assert asked[:2] == [[QUESTION], [f"{QUESTION} Ada"]]
    assert answer.text == "Rome"
    assert [passage.id for passage in answer.passages] == ["birth", "mother"]
    assert answer.decision.reason.endswith("3 rounds of retrieval")
    assert answer.decision.notes == (DecisionNote.RETRIEVED_AGAIN, DecisionNote.RETRIEVED_AGAIN)


def test_it_stops_when_nothing_new_is_found():
    answer, asked = answered(3, k=1)  # the better passage fills the only place, then stays
    assert answer.text == "Rome"
    assert len(asked) == 3  # "... Rome" finds only the first passage again, which does not come back in
    assert [passage.id for passage in answer.passages] == ["birth"]


def test_it_stops_when_the_answer_repeats():
    class Stubborn(FakeModel):
        def _answer(self, prompt):
            return "Ada"

    retriever = Chain()
    answer = AdaptiveRAG(Stubborn(), RoundsGate(3), retriever).answer(QUESTION)
    assert len(retriever.asked) == 2
    assert answer.decision.reason.endswith("2 rounds of retrieval")


def test_rounds_are_bounded_whatever_a_gate_says():
    class Endless(Chain):
        def _one(self, query):
            return [Passage(f"p{len(self.asked)}", f"text {len(self.asked)}", score=float(len(self.asked)))]

    class Changing(FakeModel):
        def _answer(self, prompt):
            return next((f"answer {n}" for n in range(9) if f"text {n}" in prompt.text), "none")

    retriever = Endless()
    AdaptiveRAG(Changing(), RoundsGate(50), retriever, k=1).answer(QUESTION)
    assert len(retriever.asked) == 3


def test_a_skipped_question_takes_no_rounds():
    retriever = Chain()
    answer = AdaptiveRAG(Reader(), RoundsGate(3), retriever, threshold=1.0).answer(QUESTION)
    assert (answer.text, retriever.asked) == ("Oslo", [])


def test_merging_keeps_each_passage_once_with_its_better_score():
    old = [Passage("a", "a", score=1.0), Passage("b", "b", score=3.0), Passage("c", "c")]
    new = [Passage("a", "a", score=5.0), Passage("d", "d", score=2.0)]
    assert [(p.id, p.score) for p in merge_passages(old, new)] == [("a", 5.0), ("b", 3.0), ("d", 2.0), ("c", None)]
