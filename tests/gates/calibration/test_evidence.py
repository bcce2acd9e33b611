"""A threshold in a fitted gate: what is written, what is kept, and where its guarantee holds."""

import pytest

from knowgate.errors import ArtifactError
from knowgate.gates import load_gate
from knowgate.gates.artifacts.gate_folder import ALWAYS_RETRIEVE, CARD_FILE, GATE_MANIFEST, read_artifact
from knowgate.gates.calibration.deployment import Deployment, describe_guarantee
from knowgate.gates.calibration.evidence import (
    CALIBRATION_KEYS_FILE,
    replace_card_section,
    save_threshold,
    summarize_threshold,
)
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.types import Passage
from tests.support.hand_gate import MODEL, write_gate

COUNTS = {"n": 200, "rate": 0.8, "accuracy": 0.5, "right_always": 102, "right_never": 40, "loss": 0.01, "harmed": 1}
EVIDENCE = {
    "epsilon": 0.02,
    "delta": 0.05,
    "n": 200,
    "harmed": 1,
    "p_value": 0.03,
    "chosen_on": COUNTS,
    "held_out": None,
    "model": {"name": "fake", "fingerprint": "f"},
    "prompts": "p",
    "retriever": {"name": "bm25", "fingerprint": "index-1"},
    "k": 3,
    "grader": "contains",
    "runs": ["run"],
    "created": "2026-01-01",
}


def saved(tmp_path, threshold=0.31, kind="guarantee", out=None, **changes):
    artifact = read_artifact(write_gate(tmp_path / "gate"))
    save_threshold(artifact, threshold, kind, {**EVIDENCE, **changes}, ["b", "a", "a"], out or artifact.path)
    return out or artifact.path


class Index:
    """A retriever that finds one passage."""

    name = "bm25"

    def __init__(self, fingerprint):
        self.fingerprint = fingerprint

    def search(self, queries, k):
        return [[Passage("p", "words", score=1.0)] for _ in queries]


class Ranker:
    """A reranker that finds all passages as good."""

    name = "aligned"

    def __init__(self, fingerprint):
        self.fingerprint = fingerprint

    def score(self, questions, passages):
        return [[0.0 for _ in found] for found in passages]


# --- writing --------------------------------------------------------------------------------------


def test_the_gate_takes_its_new_threshold_and_evidence(tmp_path):
    gate = load_gate(str(saved(tmp_path)))
    assert gate.threshold == 0.31
    assert gate.artifact.manifest["guarantee"]["epsilon"] == 0.02


def test_other_files_are_kept(tmp_path):
    folder = saved(tmp_path)
    assert (folder / "adapter" / "extra.txt").read_bytes() == b"kept"
    assert (folder / CALIBRATION_KEYS_FILE).read_text() == "a\nb\n"


def test_a_copy_leaves_the_gate_as_it_was(tmp_path):
    folder = saved(tmp_path, out=tmp_path / "deep" / "copy")
    assert load_gate(str(folder)).threshold == 0.31
    assert (folder / "adapter" / "extra.txt").read_bytes() == b"kept"
    assert load_gate(str(tmp_path / "gate")).threshold == 0.5


def test_a_later_threshold_replaces_the_earlier_evidence(tmp_path):
    folder = saved(tmp_path)
    save_threshold(read_artifact(folder), 0.5, "budget", {**EVIDENCE, "wanted": 0.5}, [], folder)
    manifest = read_artifact(folder).manifest
    assert "guarantee" not in manifest
    assert manifest["budget"]["wanted"] == 0.5
    assert (folder / CARD_FILE).read_text().count("## Threshold") == 1


def test_a_folder_of_something_else_is_not_overwritten(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    with pytest.raises(ArtifactError, match=r"not a fitted gate\. It was not overwritten\. Choose another `out`"):
        saved(tmp_path, out=tmp_path / "mine")
    assert (tmp_path / "mine" / "file").read_text() == "x"


def test_editing_the_threshold_by_hand_is_noticed(tmp_path):
    file = saved(tmp_path) / GATE_MANIFEST
    file.write_text(file.read_text().replace('"threshold": 0.31', '"threshold": 0.9'))
    with pytest.raises(ArtifactError, match="edited by hand"):
        read_artifact(file.parent)


# --- words ----------------------------------------------------------------------------------------


def test_the_card_says_what_is_proven_and_for_what(tmp_path):
    card = (saved(tmp_path) / CARD_FILE).read_text()
    assert "Threshold 0.31 loses at most 2 % of the answers against always retrieving, with 95 % confidence" in card
    assert "bm25 (index-1), 3 at a time, graded" in card
    assert "| chosen on | 200 | 80.0% | 50.0% | 51.0% | 20.0% | +1.0% | 1 |" in card
    assert "## Notes" in card


def test_a_section_in_the_middle_of_a_card_is_replaced():
    card = "# Card\n\n## Threshold\n\nold\n\n## After\n\ntext\n"
    assert replace_card_section(card, "## Threshold\n\nnew") == "# Card\n\n## After\n\ntext\n\n## Threshold\n\nnew\n"


def test_an_impossible_target_says_to_always_retrieve():
    assert summarize_threshold(ALWAYS_RETRIEVE, "guarantee", EVIDENCE).endswith(
        "with 95 % confidence: always retrieve."
    )


# --- where it holds -------------------------------------------------------------------------------


def used(folder, index="index-1", **options):
    return AdaptiveRAG(MODEL, load_gate(str(folder)), Index(index) if index else None, **options).guarantee


def test_the_guarantee_is_described_where_it_holds(tmp_path):
    said = used(saved(tmp_path))
    assert said.startswith("Threshold 0.31 loses at most 2 %")
    assert "does not hold" not in said


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"index": "index-2"}, r"passages of another index \(bm25\)"),
        ({"k": 5}, "proven for 3 passages, not for 5"),
        ({"threshold": 0.4}, "the threshold used is 0.4"),
        ({"second_look": object()}, "without a second look"),
        ({"reranker": Ranker("r1")}, "without reranking"),
    ],
)
def test_violated_conditions_are_named(tmp_path, options, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(used(saved(tmp_path), **options))


def test_sentences_contain_no_fingerprints(tmp_path):
    made = {"name": "bm25", "fingerprint": "0123456789abcdef" * 4}
    sentence = used(saved(tmp_path, retriever=made), index="fedcba9876543210" * 4)
    assert sentence.endswith("This does not hold here: it was proven for passages of another index (bm25).")


def test_an_index_that_was_not_recorded_is_not_another_one(tmp_path):
    folder = saved(tmp_path, retriever={"name": "recorded", "fingerprint": None}, k=None)
    assert "does not hold" not in used(folder, index="any")


@pytest.mark.parametrize(
    ("candidates", "options", "reason"),
    [
        (20, {}, r"chosen by the reranker aligned, but none is used here"),
        (20, {"reranker": Ranker("r2")}, r"chosen by the reranker aligned, not by this one"),
        (5, {"reranker": Ranker("r1")}, "chosen from 5 candidates, not 20"),
        (20, {"reranker": Ranker("r1"), "rerank_margin": 0.1}, "that were always reranked"),
    ],
)
def test_a_guarantee_for_reranked_passages_is_bound_to_the_reranker(tmp_path, candidates, options, reason):
    proven = {"name": "aligned", "fingerprint": "r1", "candidates": candidates}
    with pytest.raises(AssertionError, match=f"does not hold here: it was proven for passages {reason}"):
        raise AssertionError(used(saved(tmp_path, reranker=proven), **options))


def test_the_guarantee_holds_for_the_same_reranker(tmp_path):
    folder = saved(tmp_path, reranker={"name": "aligned", "fingerprint": "r1", "candidates": 20})
    assert "does not hold" not in used(folder, reranker=Ranker("r1"))
    assert "bm25 (index-1), chosen by the reranker aligned (r1), 3 at a time" in (folder / CARD_FILE).read_text()


def test_a_run_with_an_index_and_no_k_used_three_passages(tmp_path):
    folder = saved(tmp_path, k=None)
    assert "proven for 3 passages, not for 1" in used(folder, k=1)
    assert "does not hold" not in used(folder, k=3)


@pytest.mark.parametrize(
    ("proven", "options", "reason"),
    [
        ({"max_tokens": 32}, {"max_tokens": 64}, "answers of up to 32 tokens, not 64"),
        ({"open_prompts": "told otherwise"}, {}, r"other prompts with passages"),
    ],
)
def test_longer_answers_and_other_passage_prompts_void_the_guarantee(tmp_path, proven, options, reason):
    with pytest.raises(AssertionError, match=f"does not hold here: it was proven for {reason}"):
        raise AssertionError(used(saved(tmp_path, **proven), **options))


def test_a_guarantee_without_answer_length_ignores_the_length(tmp_path):
    assert "does not hold" not in used(saved(tmp_path), max_tokens=64)


def test_the_guarantee_holds_for_the_same_length_and_prompts(tmp_path):
    folder = saved(tmp_path, max_tokens=32, open_prompts=AnswerPrompts().open_book_fingerprint)
    assert "does not hold" not in used(folder)


def test_a_stricter_threshold_keeps_the_guarantee(tmp_path):
    assert "does not hold" not in used(saved(tmp_path), threshold=0.2)


def test_without_a_retriever_the_guarantee_holds(tmp_path):
    assert "does not hold" not in used(saved(tmp_path), index=None)


def test_a_gate_without_a_guarantee_describes_none(tmp_path):
    assert used(write_gate(tmp_path / "plain")) == ""
    assert describe_guarantee(load_gate("logprob"), Deployment()) == ""


def test_a_gate_set_to_always_retrieve_does_so_and_says_why(tmp_path):
    rag = AdaptiveRAG(MODEL, load_gate(str(saved(tmp_path, threshold=ALWAYS_RETRIEVE))), Index("index-1"))
    decision = rag.decide("who?")
    assert decision.retrieve
    assert "this gate is set to retrieve for every question" in decision.reason


def test_a_budget_is_described_in_one_sentence():
    said = summarize_threshold(0.9, "budget", {"wanted": 0.5, "chosen_on": {"n": 10, "retrieved": 0, "rate": 0.0}})
    assert said == "For a retrieval rate of 50 %: threshold 0.9."
