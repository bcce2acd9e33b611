"""What a passage does to the LLM: records by hand, resuming, and the half pass against full ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from knowgate.data.preferences import PAIRS_FILE, PreferenceFolder, select_passages, to_cbdr_record
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.artifacts.gate_folder import Artifact
from knowgate.gates.hidden_state import ProbeGate
from knowgate.labels.grading import StringGrader
from knowgate.labels.local_runner import LocalRunner
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.training.passage_effects import (
    BenefitSource,
    ConfidenceSource,
    LikelihoodSource,
    PassageEffects,
    PreferenceLabeler,
)
from knowgate.training.preference_run import run_preferences
from knowgate.types import Passage, Question, Reading, SignalRequest

ONE_BY_ONE = LocalRunner(first=1, largest=1)


@dataclass
class Table:
    """A confidence by table: passage text -> value; a bare question has 0.5. `stop_at`: fail at that question."""

    values: dict[str, float]
    stop_at: int | None = None
    name = "confidence"
    model = FakeModel()
    prompts = AnswerPrompts()
    seen: list[str] = field(default_factory=list)

    def measure(self, questions: Sequence[Question], passages: Sequence[Sequence[Passage]]) -> list[PassageEffects]:
        if self.stop_at is not None and len(self.seen) >= self.stop_at:
            raise KeyboardInterrupt
        self.seen += [question.id for question in questions]
        return [
            PassageEffects(0.5, [self.values[one.text] for one in found], [None] * len(found)) for found in passages
        ]


def asked(name: str, *texts: str) -> Question:
    contexts = tuple(Passage(f"{name}{place}", text, "T", 9.0 - place) for place, text in enumerate(texts))
    return Question(f"what is {name}?", name, ("gold",), contexts=contexts)


VALUES = {"up": 0.9, "down": 0.1, "bit": 0.51, "same": 0.5, "low": 0.3, "high": 0.8}


def test_preferences_equal_a_record_computed_by_hand():
    question = asked("q", "down", "up", "same", "bit", "Up!", "low")
    row = PreferenceLabeler(Table({**VALUES, "Up!": 0.0}), top=2, split="train").label([question])[0]
    assert [found.text for found in row.candidates] == ["down", "up", "same", "bit", "low"]
    assert [found.shift for found in row.candidates] == pytest.approx([-0.4, 0.4, 0.0, 0.01, -0.2])
    assert (row.base, row.positives, row.negatives) == (0.5, (1, 3), (0, 4))
    assert (row.duplicates, row.cut, row.pool, row.is_kept) == (1, 0, (0, 1, 3, 4), True)
    record = to_cbdr_record(row)
    assert (record["query"], record["pos"], record["neg"]) == ("what is q?", ["T\nup", "T\nbit"], ["T\ndown", "T\nlow"])
    assert record["pos_scores"] + record["neg_scores"] == pytest.approx([0.4, 0.01, -0.4, -0.2])
    assert record["pos_id"] + record["neg_id"] == ["q1", "q3", "q0", "q5"]


def test_graded_passages_are_selected_by_their_grades():
    chosen = select_passages([0.0, 1.0, 1.0, 0.0], [False, True, True, False], top=1)
    assert (chosen.positives, chosen.negatives) == ((1,), (0,))
    known = select_passages([0.0, -1.0], [True, False])  # a known question rises with none
    assert (known.positives, known.negatives) == ((0,), (1,))


def test_shifts_within_rounding_error_are_ignored():
    chosen = select_passages([2e-8, -2e-8, 1e-3, -1e-3], [None] * 4)
    assert (chosen.positives, chosen.negatives) == ((2,), (3,))


QUESTIONS = [
    asked("a", "up", "down"),
    asked("b", "up", "high"),
    asked("c"),
    asked("d", "low", "high", "same"),
    asked("e", "bit", "low", "bit"),
]


def test_the_progress_counts_left_out_questions(tmp_path: Path):
    folder = PreferenceFolder(tmp_path / "pref")
    counts = run_preferences(folder, QUESTIONS, PreferenceLabeler(Table(VALUES)), data="d", runner=ONE_BY_ONE)
    assert (counts.done, counts.kept, counts.one_sided, counts.bare, counts.failed) == (5, 3, 1, 1, 0)
    assert counts.duplicates == 1
    assert len((tmp_path / "pref" / PAIRS_FILE).read_text().splitlines()) == 3
    assert folder.manifest()["totals"]["kept"] == 3


def test_an_interrupted_run_continues_to_the_same_records(tmp_path: Path):
    whole, broken = PreferenceFolder(tmp_path / "whole"), PreferenceFolder(tmp_path / "broken")
    run_preferences(whole, QUESTIONS, PreferenceLabeler(Table(VALUES)), data="d", runner=ONE_BY_ONE)
    with pytest.raises(KeyboardInterrupt):
        run_preferences(broken, QUESTIONS, PreferenceLabeler(Table(VALUES, stop_at=2)), data="d", runner=ONE_BY_ONE)
    assert len(list(broken.rows())) == 2
    rest = Table(VALUES)
    run_preferences(broken, QUESTIONS, PreferenceLabeler(rest), data="d", runner=ONE_BY_ONE)
    assert rest.seen == ["c", "d", "e"]
    for name in (PreferenceFolder.rows_name, PAIRS_FILE):
        assert (broken.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_run_does_not_continue_with_other_settings(tmp_path: Path):
    folder = PreferenceFolder(tmp_path / "pref")
    run_preferences(folder, QUESTIONS, PreferenceLabeler(Table(VALUES)), data="d")
    with pytest.raises(BadSetting, match="candidates was 20, now 3"):
        run_preferences(folder, QUESTIONS, PreferenceLabeler(Table(VALUES), candidates=3), data="d")


def test_a_run_without_usable_questions_is_an_error(tmp_path: Path):
    questions = [asked("a", "down", "low"), asked("b", "same")]
    with pytest.raises(BadInput, match="Of 2 questions, 2 have only one kind"):
        run_preferences(PreferenceFolder(tmp_path / "pref"), questions, PreferenceLabeler(Table(VALUES)), data="d")


def test_missing_candidates_are_reported_after_the_first_batch(tmp_path: Path):
    with pytest.raises(BadInput, match="no passage was found for any of the first 2 questions"):
        run_preferences(
            PreferenceFolder(tmp_path / "pref"), [asked("a"), asked("b")], PreferenceLabeler(Table(VALUES)), data="d"
        )


def test_benefit_follows_the_grades():
    model = FakeModel({"what is q?": {"closed": "no idea", "open": "gold", "when": "the key"}})
    row = PreferenceLabeler(BenefitSource(model, StringGrader()), split="test").label(
        [asked("q", "the key", "some noise")]
    )[0]
    assert [(found.shift, found.correct) for found in row.candidates] == [(1.0, True), (0.0, False)]
    assert (row.positives, row.negatives) == ((0,), (1,))


def test_a_question_without_gold_answer_is_a_row_with_an_error():
    bare = Question("what?", "x", contexts=(Passage("1", "text"),))
    rows = PreferenceLabeler(BenefitSource(FakeModel(), StringGrader()), split="test").label([bare, asked("q", "text")])
    assert "Add a gold answer to every question" in (rows[0].error or "")
    assert rows[1].error is None


# --- a real model ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("torch")
    from knowgate.models import load_model
    from tests.support.tiny_models import save_tiny_llama

    return load_model(f"hf:{save_tiny_llama(tmp_path_factory.mktemp('models') / 'tiny')}")


def probe(layer: int, width: int = 64, position: str = "pre") -> ProbeGate:
    """One random linear layer with two outputs, as `fit probe --kind linear` writes it."""
    from knowgate.training.classifiers import fit_linear

    rng = np.random.default_rng(0)
    states = rng.standard_normal((40, width)).astype(np.float32)
    tensors = fit_linear(states, states[:, 0] > 0, 1.0)
    manifest = {
        "gate": "probe", "needs": ["hidden"], "want": {"layers": [layer]}, "threshold": 0.5,
        "options": {"layer": layer, "position": position}, "checksum": "c",
    }  # fmt: skip
    return ProbeGate(Artifact(Path("probe"), manifest, tensors))


PASSAGES = ("The sky is blue.", "A much longer passage about a river, a road and 17 birds in a tree.", "red")


def test_a_shift_is_the_difference_of_two_separate_reads(llama):
    gate, prompts = probe(1), AnswerPrompts()
    questions = [asked("q", *PASSAGES), asked("rather long question", "red")]
    rows = PreferenceLabeler(ConfidenceSource(llama, gate, prompts), split="train").label(questions)

    def confidence(prompt) -> float:
        reading = llama.read([prompt], SignalRequest(layers=(1,), draft_tokens=1))
        return 1 - float(gate.raw([Question("x")], reading)[0])

    for question, row in zip(questions, rows, strict=True):
        bare = confidence(prompts.closed(question))
        apart = [confidence(prompts.open(question, [passage])) - bare for passage in question.contexts]
        assert row.base == pytest.approx(bare, abs=1e-5)
        assert [found.shift for found in row.candidates] == pytest.approx(apart, abs=1e-5)
        assert max(map(abs, apart)) > 1e-3


def test_the_partial_pass_gives_the_state_of_the_full_pass(llama):
    prompts = [AnswerPrompts().open(asked("q"), [Passage("1", text)]) for text in PASSAGES]
    half: list[Reading] = llama.read(prompts, SignalRequest(layers=(1,), resumable=False))
    full: list[Reading] = llama.read(prompts, SignalRequest(layers=(1, 2), draft_tokens=2))
    for short, long in zip(half, full, strict=True):
        np.testing.assert_allclose(short.hidden[1], long.hidden[1], atol=1e-5)
        assert short.resume is None


def test_the_pass_stops_at_the_probes_layer(llama):
    upper = llama.loaded.model.model.layers[1]
    calls = []
    handle = upper.register_forward_hook(lambda *_: calls.append(1))
    try:
        PreferenceLabeler(ConfidenceSource(llama, probe(1)), split="train").label([asked("q", *PASSAGES)])
    finally:
        handle.remove()
    assert calls == []


def test_a_passage_beyond_the_context_window_is_truncated_and_counted(llama):
    rows = PreferenceLabeler(ConfidenceSource(llama, probe(1)), split="train").label(
        [asked("q", "red", "many words " * 200)]
    )
    assert (rows[0].error, rows[0].cut) == (None, 1)
    assert len(rows[0].candidates[1].text) < 500


def test_likelihood_is_the_mean_log_probability_of_the_gold_answer(llama):
    import torch

    question = asked("q", "red")
    row = PreferenceLabeler(LikelihoodSource(llama), split="train").label([question])[0]

    def mean(prompt) -> float:
        found = llama.answer_logprobs([prompt], ["gold"])
        return float(torch.tensor(found).mean())

    prompts = AnswerPrompts()
    apart = mean(prompts.open(question, question.contexts)) - mean(prompts.closed(question))
    assert row.candidates[0].shift == pytest.approx(apart, abs=1e-5)


def test_a_probe_that_reads_after_the_draft_is_rejected():
    with pytest.raises(BadSetting, match="Fit a probe with position='pre'"):
        ConfidenceSource(FakeModel(), probe(1, position="post"))


def test_a_probe_with_another_target_is_rejected():
    gate = probe(1)
    helped = replace(gate, artifact=replace(gate.artifact, manifest={**gate.artifact.manifest, "target": "benefit"}))
    with pytest.raises(BadSetting, match=r"'benefit'.*Fit a probe with target='known'"):
        ConfidenceSource(FakeModel(), helped)
