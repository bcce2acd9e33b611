"""What a search would gain: two planted rules, one for the answer and one for documents, learnt by one judge."""

from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.splits import fingerprint_text
from knowgate.errors import BadSetting
from knowgate.gates import load_gate
from knowgate.gates.answer_judge import GainGate
from knowgate.gates.artifacts.gate_folder import SEEN_FILE
from knowgate.gates.judges import compute_gain_needs, encode_answers
from knowgate.gates.scoring import score_questions
from knowgate.stats.metrics import auroc
from knowgate.training.examples import Examples
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.gain import fit_gain
from knowgate.types import Signal
from tests.support.judge_data import LETTERS, plant_open_answers, planted, quick, score_reloaded
from tests.support.tiny_models import save_tiny_cross_encoder, save_word_llama

HOW = {"epochs": 6, "batch": 8, "learning_rate": 1e-2}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "x", *LETTERS, "?", "no", "idea", ";", "what", "would", "say"]


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick():
        yield


def both_ways(model, n) -> Examples:
    """An x in the answer: it is right. Questions full of p: documents are right."""
    examples = planted(model, n, by="draft")
    found = np.random.default_rng(1).random(n) < 0.5
    rows = plant_open_answers(examples.rows, found)
    helps = np.array([right and not row.closed.correct for row, right in zip(rows, found, strict=True)])
    return replace(examples, table=replace(examples.table, rows=rows), needed=helps, target="benefit")


def make(folder, examples, **options):
    fitted = fit_gain(examples, work=folder / "work", **{**HOW, **options})
    save_fitted(fitted, examples, folder / "gate")
    return folder / "gate"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_word_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def examples(model):
    return both_ways(model, 240)


@pytest.fixture(scope="module")
def few(model):
    """Enough where it does not matter how much a judge has learned."""
    return both_ways(model, 120)


@pytest.fixture(scope="module")
def spoken(examples, tmp_path_factory):
    return make(tmp_path_factory.mktemp("spoken"), examples)


def taken(examples, places):
    return [examples.questions[i] for i in places], [examples.readings[i] for i in places]


def test_it_predicts_what_documents_add_not_what_is_unknown(spoken, examples):
    test = examples.split.test.tolist()
    needs = np.array(score_questions(load_gate(str(spoken)), *taken(examples, test)))
    assert auroc(examples.needed[test], needs) > 0.9
    unknown = ~examples.table.closed_book_right[test]
    assert auroc(examples.table.retrieved_right[test][unknown], needs[unknown]) > 0.8


def test_an_encoder_reads_a_suffix_for_the_search_question(few, tmp_path):
    base = save_tiny_cross_encoder(tmp_path / "base", WORDS)
    gate = GainGate.load(str(make(tmp_path, few, base=f"encoder:{base}", epochs=1)))
    questions, _ = taken(few, [0])
    answer, search = (encode_answers(asked, gate.judge, questions, ["a b"], 8)[0].ids for asked in ("judge", "search"))
    assert search[: len(answer) - 1] == answer[:-1]
    assert len(search) > len(answer)
    assert 0 <= gate.score(*taken(few, [0]))[0] <= 1


def test_a_reloaded_gate_gives_the_same_scores(spoken, examples):
    test = examples.split.test.tolist()
    assert score_reloaded(spoken, examples, test) == score_questions(load_gate(str(spoken)), *taken(examples, test))


def test_its_threshold_limits_the_loss_and_it_reads_a_draft(spoken):
    gate = GainGate.load(str(spoken))
    assert (gate.needs, gate.request.draft_tokens) == ({Signal.DRAFT}, 64)
    assert any(note.startswith("its threshold saves the most searches") for note in gate.artifact.manifest["notes"])


def test_with_folds_all_questions_are_training_questions(few, tmp_path):
    gate = make(tmp_path, few, folds=2, epochs=1)
    seen = (gate / SEEN_FILE).read_text().split()
    assert all(fingerprint_text(question.text) in seen for question in few.questions)


def test_gain_needs_range_from_0_to_1():
    needs = compute_gain_needs(np.array([1.0, 0.5, 0.0]), np.array([0.0, 0.5, 1.0]))
    assert needs.tolist() == [0.0, 0.5, 1.0]


def test_invalid_options_are_rejected(examples, tmp_path):
    with pytest.raises(BadSetting, match="tokens=0 is not allowed"):
        fit_gain(examples, tokens=0, work=tmp_path)
    with pytest.raises(BadSetting, match="target='known' does not work with"):
        fit_gain(replace(examples, target="known"), work=tmp_path)
