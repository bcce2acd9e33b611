"""IK: a planted rule learnt from the draft, by the fine-tuned judge and by the head over embeddings."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from knowgate.data.signals.vectors import truncate_words
from knowgate.errors import ArtifactError, BadSetting, UnsupportedSignal
from knowgate.gates import load_gate
from knowgate.gates.answer_judge import IkGate
from knowgate.gates.artifacts.gate_folder import read_artifact
from knowgate.gates.scoring import score_questions
from knowgate.models.fake import FakeModel
from knowgate.stats.metrics import auroc
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.ik import IKOptions, fit_ik, fit_ik_text, limit_training_rows
from knowgate.types import Question, Reading, Signal, Token
from tests.support.judge_data import PROMPTS, QUICK, planted, quick, score_reloaded
from tests.support.tiny_models import save_word_llama


@dataclass(frozen=True)
class LetterEmbedder:
    """How often each letter stands in a text."""

    fingerprint: str = "letters"

    def embed(self, texts):
        return np.array([[text.count(letter) for letter in "abcdefghijklmnopx?"] for text in texts], np.float32)


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick():
        yield


@dataclass(frozen=True)
class Made:
    out: Path
    examples: object
    fitted: object


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ik")
    examples = planted(save_word_llama(folder / "model"), 240, by="draft")
    fitted = fit_ik(examples, tokens=32, training=replace(QUICK, epochs=4), work=folder / "work")
    save_fitted(fitted, examples, folder / "gate")
    return Made(folder / "gate", examples, fitted)


def taken(examples, places):
    return [examples.questions[i] for i in places], [examples.readings[i] for i in places]


def test_the_judge_learns_a_rule_planted_in_the_draft(made):
    test = made.examples.split.test.tolist()
    needs = score_questions(load_gate(str(made.out)), *taken(made.examples, test))
    assert auroc(made.examples.needed[test], np.array(needs)) > 0.95


def test_a_reloaded_gate_gives_the_same_scores(made):
    test = made.examples.split.test.tolist()
    here = score_questions(load_gate(str(made.out)), *taken(made.examples, test))
    assert score_reloaded(made.out, made.examples, test) == here


def test_it_asks_for_as_many_draft_tokens_as_it_was_fitted_with(made):
    gate = load_gate(str(made.out))
    assert gate.needs == {Signal.DRAFT}
    assert gate.request.draft_tokens == 32
    with pytest.raises(UnsupportedSignal, match=r"needs a draft .*, but there is none"):
        gate.score([Question("a?")], [Reading()])


def test_another_llm_is_rejected_unless_as_a_plug_in(made):
    other = FakeModel(name="other")
    with pytest.raises(ArtifactError, match="was fitted on hf:"):
        load_gate(str(made.out)).bind(other, PROMPTS)
    assert load_gate(str(made.out), plug_in=True).bind(other, PROMPTS).note.startswith("plug-in, fitted on hf:")


def test_a_changed_adapter_or_a_pickle_beside_it_is_not_loaded(made, tmp_path):
    out = tmp_path / "gate"
    save_fitted(made.fitted, made.examples, out)
    questions, readings = taken(made.examples, [0])
    (out / "adapter" / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ArtifactError, match=r"adapter_model.bin' may be a pickle file"):
        load_gate(str(out)).score(questions, readings)
    (out / "adapter" / "adapter_model.bin").unlink()
    with (out / "adapter" / "adapter_config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(ArtifactError, match="changed or damaged"):
        load_gate(str(out)).score(questions, readings)


def test_a_base_with_other_weights_is_rejected(made, tmp_path):
    artifact = read_artifact(made.out)
    other = {**artifact.options, "base_fingerprint": "another"}
    gate = IkGate(replace(artifact, manifest={**artifact.manifest, "options": other}))
    with pytest.raises(ArtifactError, match=r"the weights of hf:.* have changed since the judge"):
        gate.score(*taken(made.examples, [0]))


# --- text -----------------------------------------------------------------------------------------


def test_the_text_variant_learns_from_recorded_answers_alone(tmp_path):
    examples = planted(Path("nowhere"), 300, by="draft")
    fitted = fit_ik_text(examples, embedder=LetterEmbedder())
    save_fitted(fitted, examples, tmp_path / "gate")
    gate = IkGate(read_artifact(tmp_path / "gate"), embedder=LetterEmbedder())
    test = examples.split.test.tolist()
    needs = gate.score(*taken(examples, test))
    assert auroc(examples.needed[test], np.array(needs)) > 0.95
    assert gate.needs == {Signal.DRAFT}
    assert gate.raw(*taken(examples, test)) == pytest.approx(fitted.raw(test), abs=0)


def test_the_text_variant_rejects_another_embedding_model(tmp_path):
    examples = planted(Path("nowhere"), 300, by="draft")
    save_fitted(fit_ik_text(examples, embedder=LetterEmbedder()), examples, tmp_path / "gate")
    gate = IkGate(read_artifact(tmp_path / "gate"), embedder=LetterEmbedder("others"))
    with pytest.raises(ArtifactError, match="fitted with the embedding model"):
        gate.score(*taken(examples, [0]))


@pytest.mark.parametrize(
    ("text", "n", "expected"), [("ab c, d", 3, "ab c,"), ("北京大学", 2, "北京"), ("a", 9, "a"), ("a", 0, "")]
)
def test_pieces_are_words_and_signs(text, n, expected):
    assert truncate_words(text, n) == expected


@pytest.mark.parametrize("tokens", [0, 5, 16])
def test_any_number_of_draft_tokens_can_be_read(tmp_path, tokens):
    examples = planted(Path("nowhere"), 120, by="draft")
    save_fitted(fit_ik_text(examples, tokens=tokens, embedder=LetterEmbedder()), examples, tmp_path / "gate")
    gate = load_gate(str(tmp_path / "gate"))
    assert gate.request.draft_tokens == tokens
    assert gate.needs == ({Signal.DRAFT} if tokens else frozenset())


def test_more_tokens_than_were_drafted_or_less_than_none_are_rejected():
    examples = planted(Path("nowhere"), 60)
    with pytest.raises(BadSetting, match="tokens=-1 is not allowed"):
        IKOptions(tokens=-1)
    short = replace(examples, table=replace(examples.table, settings={**examples.settings, "max_tokens": 32}))
    with pytest.raises(BadSetting, match=r"at most 32 tokens\. Use tokens=32\. Or label again .* max_tokens=64"):
        fit_ik_text(short, tokens=64, embedder=LetterEmbedder())


def test_drafts_shorter_than_t_are_noted():
    examples = planted(Path("nowhere"), 120, by="draft")
    rows = [replace(row, closed=replace(row.closed, tokens=(Token("a", -1.0),) * 3)) for row in examples.rows]
    spoken = replace(examples, table=replace(examples.table, rows=rows))
    fitted = fit_ik_text(spoken, tokens=32, embedder=LetterEmbedder())
    assert "half of the drafts have at most 3 tokens" in fitted.notes[0]
    assert fit_ik_text(spoken, tokens=3, embedder=LetterEmbedder()).notes == []


def test_fewer_training_rows_leave_the_other_splits_alone():
    examples = planted(Path("nowhere"), 240)
    small = limit_training_rows(examples, 50, seed=0)
    assert len(small.split.train) == 50
    assert set(small.split.train) <= set(examples.split.train)
    assert small.split.test.tolist() == examples.split.test.tolist()
    assert limit_training_rows(examples, 10_000, seed=0) is examples
    with pytest.raises(BadSetting, match="rows=3 is too small"):
        limit_training_rows(examples, 3, seed=0)
