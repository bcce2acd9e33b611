"""The stack: judges score rows that they did not see, and their margin is one more signal of the fusion."""

from dataclasses import replace

import numpy as np
import pytest

from knowgate.data.splits import Split
from knowgate.errors import BadSetting
from knowgate.gates import load_fitted_gate
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.stats.metrics import auroc
from knowgate.training.examples import load_examples
from knowgate.training.fusion import fit_fusion
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.ensemble import FittedJudge, plan_ensemble
from knowgate.training.judges.ik import fit_ik_text
from knowgate.training.judges.training_options import JudgeTrainingOptions
from knowgate.training.stack import stack_judges
from tests.support.hash_embedder import HashEmbedder
from tests.support.planted_run import planted_rows, write_run


@pytest.fixture(scope="module")
def examples(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("labels") / "run", *planted_rows(400, token=True))
    return load_examples([run], target="known")


@pytest.fixture(scope="module")
def judge(examples):
    """A text classifier of question and draft in place of a fine-tuned judge."""
    return fit_ik_text(examples, tokens=8, embedder=HashEmbedder())


class CountingJudge:
    """Each member votes its own number."""

    def __init__(self):
        self.scored = 0

    def predict_member(self, number, prompts):
        self.scored += len(prompts)
        return np.full(len(prompts), float(number))


def test_rows_that_teach_are_scored_by_one_judge_and_all_others_by_every_judge():
    texts = [f"question {i}" for i in range(200)]
    split = Split(*np.split(np.arange(200), [120, 140, 170]))
    rows = np.concatenate([split.train, split.dev])
    members = plan_ensemble(split, JudgeTrainingOptions(), folds=4, texts=texts, rows=rows)
    unseen = [sum(index not in member.seen for member in members) for index in range(200)]
    assert unseen == [1] * 140 + [4] * 60
    judge = CountingJudge()
    fitted = FittedJudge(judge, members, {}, [], {})
    prompts = [LabelPromptTokens([index], [0]) for index in range(200)]
    known = fitted.predict_known(prompts, range(200))
    own = [next(number for number, member in enumerate(members) if index not in member.seen) for index in range(140)]
    assert known[:140].tolist() == own  # the one judge that did not learn from the row
    assert known[140:] == pytest.approx(1.5)
    assert judge.scored == 140 + 4 * 60  # a judge scores no row that it learned from


def test_each_row_is_scored_once():
    split = Split(*np.split(np.arange(200), [120, 140, 170]))
    judge = CountingJudge()
    fitted = FittedJudge(judge, plan_ensemble(split, JudgeTrainingOptions()), {}, [], {})
    prompts = [LabelPromptTokens([index], [0]) for index in range(200)]
    first = fitted.predict_known(prompts[:150], range(150))
    again = fitted.predict_known(prompts[100:], range(100, 200))
    assert judge.scored == 200
    assert again[:50].tolist() == first[100:].tolist()
    other = LabelPromptTokens([0, 1], [1])  # another prompt of the same row
    assert fitted.predict_known([other], [0]).shape == (1,)
    assert judge.scored == 201


def test_a_judge_that_knows_more_improves_the_fusion(examples):
    rng = np.random.default_rng(0)
    margin = examples.needed * 2.0 - 1 + rng.standard_normal(len(examples.needed))
    test = examples.split.test
    weak = replace(examples, table=replace(examples.table, readings=[replace(r, hidden={}) for r in examples.readings]))
    alone = fit_fusion(weak, cheap=True, text=False)
    stacked = fit_fusion(weak, cheap=True, text=False, judge_margins={"judge-0": margin})
    scores = [auroc(examples.needed[test], fitted.raw(test.tolist())) for fitted in (alone, stacked)]
    assert scores[1] > scores[0] + 0.03


def test_the_loaded_stack_scores_like_the_fitted_one(examples, judge, tmp_path, monkeypatch):
    stack = stack_judges(examples, [judge], cheap=True, work=tmp_path / "work")
    save_fitted(stack, examples, tmp_path / "gate")
    gate = load_fitted_gate(str(tmp_path / "gate"))
    monkeypatch.setattr("knowgate.gates.fitted_gate.SentenceEmbedder", lambda name: HashEmbedder())
    rows = examples.split.test[:10].tolist()
    questions, readings = ([part[i] for i in rows] for part in (examples.questions, examples.readings))
    assert gate.raw(questions, readings) == pytest.approx(stack.raw(rows), abs=1e-4)
    assert (gate.name, gate.request.draft_tokens) == ("stack", 8)


def test_a_stack_has_at_most_four_judges(examples, judge, tmp_path):
    with pytest.raises(BadSetting, match="1 to 4"):
        stack_judges(examples, [judge] * 5, work=tmp_path)
