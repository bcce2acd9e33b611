"""KBM: planted mastery and certainty, both heads, the second look, and its labels by hand."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from knowgate.data.runs.rows import GradedAnswer
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.gates import load_gate
from knowgate.gates.judges import causal_judge
from knowgate.gates.kbm import render_kbm_prompt
from knowgate.gates.scoring import score_questions
from knowgate.models import load_model
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.models.prompts.questions import build_kbm_prompt
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.builder import load_second_look
from knowgate.stats.metrics import auroc
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.kbm import choose_threshold, fit_kbm, make_kbm_labels
from knowgate.types import Passage, Question, Reading
from tests.support.judge_data import QUICK, planted, quick, score_reloaded
from tests.support.tiny_models import save_word_llama

TAUS = {"mastery": 0.8, "certainty": 0.5}


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick():
        yield


@dataclass(frozen=True)
class Made:
    folder: Path
    examples: object
    fitted: object

    def gate(self, head="mastery"):
        return load_gate(str(self.folder / head))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Both heads from one training: the second fit finds it finished."""
    folder = tmp_path_factory.mktemp("kbm")
    examples = planted(save_word_llama(folder / "model"), 160)
    seen = []
    for head in ("certainty", "mastery"):
        fitted = fit_kbm(examples, head=head, tau=0.8, training=QUICK, work=folder / "work", watch=seen.append)
        save_fitted(fitted, examples, folder / head)
    assert sum(step.is_milestone for step in seen) == QUICK.epochs
    return Made(folder, examples, fitted)


@pytest.mark.parametrize("head", ["mastery", "certainty"])
def test_each_head_learns_the_planted_rule(made, head):
    test = made.examples.split.test.tolist()
    gate = made.gate(head)
    assert gate.name == f"kbm:{head}"
    needs = score_questions(gate, [made.examples.questions[i] for i in test], [made.examples.readings[i] for i in test])
    assert auroc(made.examples.needed[test], np.array(needs)) > 0.95


def test_a_reloaded_gate_gives_the_same_scores(made):
    test = made.examples.split.test.tolist()
    questions, readings = [made.examples.questions[i] for i in test], [made.examples.readings[i] for i in test]
    here = made.gate().score(questions, readings)
    assert score_reloaded(made.folder / "mastery", made.examples, test) == here


def test_the_passage_filter_keeps_helpful_passages(made):
    good, bad = [Passage("1", "x x x")], [Passage("2", "a b c")]
    questions = [Question("901 a c e b d?"), Question("902 a c e b d?"), Question("903 f g h i j?")]
    paper = load_gate(f"{made.folder / 'mastery'},verdict=own")
    assert paper.are_useful(questions, [good, bad, []]) == [True, False, False]
    assert made.gate().are_useful(questions[:1], [good]) == [True]
    assert made.gate().are_useful(questions, [[], [], []]) == [False, False, False]


def test_passages_are_dropped_only_if_the_judge_expects_less_with_them(made, monkeypatch):
    """Confidences by hand: with passages .3, .3, .6; without .1, .4, .7. None but the last is sufficient."""
    from knowgate.gates import kbm

    def confidence(judge, head, prompts):
        values = {"901": (0.3, 0.1), "902": (0.3, 0.4), "903": (0.6, 0.7)}
        return np.array(
            [pair["some words" not in text] for text in prompts for key, pair in values.items() if key in text]
        )

    monkeypatch.setattr(kbm, "compute_kbm_confidence", confidence)
    questions, shown = [Question(f"90{i} a c e b d?") for i in (1, 2, 3)], [[Passage("1", "some words")]] * 3
    assert made.gate().are_useful(questions, shown) == [True, False, False]
    paper = load_gate(f"{made.folder / 'mastery'},verdict=own")
    assert paper.are_useful(questions, shown) == [False, False, True]


def test_the_own_verdict_is_the_raw_label_of_the_judge(made):
    test = made.examples.split.test.tolist()
    gate = load_gate(f"{made.folder / 'mastery'},verdict=own")
    needs = gate.score([made.examples.questions[i] for i in test], [made.examples.readings[i] for i in test])
    assert ((np.array(needs) > gate.threshold) == made.examples.needed[test]).mean() > 0.9
    assert any("is predicted right for" in note and "majority" in note for note in made.fitted.notes)


def test_needs_have_as_many_values_as_raw_scores(made):
    test = made.examples.split.test.tolist()
    both = made.gate().score_with_raw([made.examples.questions[i] for i in test], [Reading() for _ in test])
    assert len(set(both.needs)) == len(set(both.raw)) > 1


def test_a_judge_trained_without_passages_cannot_filter_them(made, tmp_path):
    bare = [replace(row, open=None, passages=()) for row in made.examples.rows]
    examples = replace(made.examples, table=replace(made.examples.table, rows=bare))
    fitted = fit_kbm(examples, tau=0.8, training=replace(QUICK, epochs=1), work=tmp_path / "work")
    assert any("open_samples=30" in note for note in fitted.notes)
    save_fitted(fitted, examples, tmp_path / "bare")
    with pytest.raises(BadSetting, match=r"was trained without passages.*fit gate 'kbm' again"):
        load_second_look(str(tmp_path / "bare"), load_model("fake"), AnswerPrompts())
    with pytest.raises(BadSetting, match="was trained without passages"):
        load_gate(str(tmp_path / "bare")).are_useful([Question("a?")], [[Passage("1", "x")]])


def test_an_older_judge_without_the_passage_count_may_filter(made):
    artifact = made.gate().artifact
    options = {key: value for key, value in artifact.options.items() if key != "passage_lessons"}
    old = replace(made.gate(), artifact=replace(artifact, manifest={**artifact.manifest, "options": options}))
    assert old.passage_filter is old


def test_the_pipeline_answers_closed_book_if_the_filter_drops_the_passages(made):
    from knowgate.gates.baselines import AlwaysGate
    from knowgate.models.fake import FakeModel

    @dataclass(frozen=True)
    class One:
        text: str
        name = fingerprint = "one"

        def search(self, queries, k):
            return [[Passage("1", self.text)] for _ in queries]

    def passages(text):
        rag = AdaptiveRAG(FakeModel(), AlwaysGate(), One(text), second_look=made.gate())
        return rag.answer("901 a c e b d?").passages

    assert [passage.text for passage in passages("x x x")] == ["x x x"]
    assert passages("a b c") == ()


def test_gates_from_the_same_files_share_one_judge(made):
    assert made.gate().judge is made.gate().judge


def test_passages_are_cut_from_the_end_until_the_prompt_fits(made):
    judge, question = made.gate().judge, Question("1 a?")
    passages = [Passage("1", "a b"), Passage("2", "c " * 50)]
    assert render_kbm_prompt(judge, question, passages, 90) == build_kbm_prompt(question, passages[:1])
    bare = render_kbm_prompt(judge, question, passages[1:], 5)
    assert bare == build_kbm_prompt(question)
    assert "Reference: None" in bare


def test_only_the_start_of_a_long_question_is_read(made, monkeypatch):
    gate, long_question = made.gate(), Question("1 a " * 5_000)
    monkeypatch.setattr(causal_judge, "MAX_QUESTION_TOKENS", 20)
    shortened = gate.judge.shorten(long_question)
    assert long_question.text.startswith(shortened.text)
    assert 15 <= len(gate.judge.model.tokenize(shortened.text)) <= 20
    assert render_kbm_prompt(gate.judge, long_question) == build_kbm_prompt(shortened)
    assert gate.judge.shorten(Question("1 a?")) == Question("1 a?")


def test_a_pickle_in_place_of_the_adapter_is_not_loaded(made, tmp_path):
    out = tmp_path / "gate"
    save_fitted(made.fitted, made.examples, out)
    (out / "adapter" / "adapter_model.safetensors").rename(out / "adapter" / "adapter_model.bin")
    with pytest.raises(ArtifactError, match=r"adapter_model.bin' may be a pickle file"):
        load_gate(str(out)).score([Question("a?")], made.examples.readings[:1])


# --- labels ---------------------------------------------------------------------------------------


def test_an_indicator_at_tau_is_true_and_below_it_false():
    assert make_kbm_labels(GradedAnswer("a", mastery=0.8, certainty=0.49), TAUS) == (True, False)
    assert make_kbm_labels(GradedAnswer("a", mastery=0.79, certainty=0.5), TAUS) == (False, True)


def test_tau_is_where_skipping_answers_most_dev_questions_right(made):
    def row(row, mastery):
        closed, opened = (
            GradedAnswer("a", correct=mastery >= 0.6, mastery=mastery),
            GradedAnswer("b", correct=mastery < 0.6),
        )
        return replace(row, closed=closed, open=opened)

    examples = made.examples
    rows = [row(item, 0.6 + i % 3 / 10) for i, item in enumerate(examples.rows)]
    every = replace(examples.split, dev=np.arange(30))
    assert choose_threshold(replace(examples, table=replace(examples.table, rows=rows), split=every), "mastery") == 0.6


def test_tau_may_be_as_low_as_a_tenth(made):
    """Whatever is mastered at all is answered right closed-book and wrong with passages."""
    rows = [
        replace(
            row,
            closed=GradedAnswer("a", correct=i % 2 == 0, mastery=0.1 if i % 2 == 0 else 0.0),
            open=GradedAnswer("b", correct=i % 2 == 1),
        )
        for i, row in enumerate(made.examples.rows)
    ]
    assert choose_threshold(replace(made.examples, table=replace(made.examples.table, rows=rows)), "mastery") == 0.1


def test_tau_is_the_papers_where_there_are_no_open_book_answers(made):
    rows = [replace(row, open=None) for row in made.examples.rows]
    assert choose_threshold(replace(made.examples, table=replace(made.examples.table, rows=rows)), "mastery") == 0.8


def test_rows_without_samples_are_rejected_with_the_command_that_adds_them(made, tmp_path):
    rows = [replace(row, closed=replace(row.closed, mastery=None)) for row in made.examples.rows]
    with pytest.raises(BadInput, match="Label with samples=30"):
        fit_kbm(replace(made.examples, table=replace(made.examples.table, rows=rows)), work=tmp_path)


@pytest.mark.parametrize("wrong", [{"head": "pride"}, {"tau": 0.0}, {"tau": 1.5}])
def test_an_invalid_head_or_tau_is_rejected(made, tmp_path, wrong):
    with pytest.raises(BadSetting, match="is not allowed"):
        fit_kbm(made.examples, work=tmp_path, **wrong)
