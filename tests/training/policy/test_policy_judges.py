"""Fine-tuned judges of a policy: trained once per fold, and used together without a further training."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from knowgate.gates import load_fitted_gate
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.ensemble import plan_ensemble
from knowgate.training.policy import candidates
from knowgate.training.policy.evidence import Evidence, PolicyOptions, assign_policy_folds
from tests.support.judge_data import plant_open_answers, planted, quick
from tests.support.tiny_models import save_word_llama

TRAINING = {"epochs": 1, "batch": 8, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return str(save_word_llama(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def evidence(base):
    """Closed-book answers with an x are right. Documents answer questions that are full of p."""
    table = planted(base, 120, by="draft").table
    found = np.random.default_rng(1).random(120) < 0.7
    rows = plant_open_answers(table.rows, found)
    table = replace(table, rows=rows)
    return Evidence(table, True, assign_policy_folds([question.text for question in table.questions], 0), 0)


@pytest.fixture(scope="module")
def fitter(evidence, base, tmp_path_factory):
    """Fits judges alone, and stacks of them."""
    work = tmp_path_factory.mktemp("work")
    with pytest.MonkeyPatch.context() as patch, quick():
        patch.setattr(candidates, "DEFAULT_GATES", ())
        patch.setattr(candidates, "LOGPROB_FEATURES", ())
        patch.setattr(candidates, "make_judge_options", lambda spec: {"base": spec, **TRAINING})
        yield candidates.CandidateFitter(evidence, f"hf:{base}", work, lambda progress: None)


def test_judges_learn_from_all_rows_to_choose_on_but_one_fold_and_from_no_held_out_row(fitter, evidence, monkeypatch):
    plans = []
    monkeypatch.setattr(candidates, "plan_ensemble", lambda *a, **b: plans.append(plan_ensemble(*a, **b)) or plans[-1])
    assert set(fitter.judges) == {"known", "gain"}
    (members,) = plans
    unseen = np.array([sum(row not in member.seen for member in members) for row in range(len(evidence.table))])
    assert (unseen[evidence.fit_rows] == 1).all()
    assert (unseen[evidence.held_out] == 4).all()


def test_the_chosen_gate_uses_the_judges_of_all_folds_without_a_further_training(
    fitter, evidence, tmp_path, monkeypatch
):
    assert {gate.name for gate in fitter.gates} == {"judge", "judge (gain)", "stack (known)", "stack (gain)"}
    monkeypatch.setattr(candidates, "train_gain_judge", lambda *arguments: pytest.fail("trained again"))
    rows = evidence.held_out[:5].tolist()
    questions, readings = ([part[row] for row in rows] for part in (evidence.table.questions, evidence.table.readings))
    for name, target in (("judge", "known"), ("judge (gain)", "gain")):
        result, examples = fitter.fit_gate(name)
        save_fitted(result, examples, tmp_path / target)
        gate = load_fitted_gate(str(tmp_path / target))
        assert gate.raw(questions, readings) == pytest.approx(fitter.judges[target].raw(rows), abs=1e-4)
        assert np.std(fitter.judges[target].raw(evidence.held_out.tolist())) > 0.05


def test_small_encoders_learn_only_what_is_known(evidence):
    recipes = candidates.list_gate_recipes(evidence, "small")
    assert "judge" in {recipe.name for recipe in recipes}
    assert "judge (gain)" not in {recipe.name for recipe in recipes}


class Rows(list):
    """Rows of an LLM behind an API."""

    @property
    def settings(self):
        return {"model": "openai:my-llm"}


@pytest.mark.parametrize(
    ("n", "signals", "base", "has_gpu", "expected"),
    [
        (2_000, {}, None, False, "small"),  # recorded texts, few enough for a CPU
        (2_001, {}, None, False, None),
        (2_001, {}, "small", False, "small"),
        (2_001, {}, None, True, "small"),
        (200, {"has_logprobs": True}, None, False, None),  # better signals than texts are at hand
        (200, {"has_states": True}, None, False, None),
        (200, {}, "none", False, None),
        (200, {}, "none", True, None),
    ],
)
def test_small_judges_are_tried_unasked_where_rows_are_texts_and_few(n, signals, base, has_gpu, expected):
    rows = SimpleNamespace(table=Rows(range(n)), **{"has_logprobs": False, "has_states": False, **signals})
    assert candidates.choose_base(rows, PolicyOptions(base=base), has_gpu) == expected


def test_a_local_llm_is_its_own_judge_on_a_gpu(evidence, base):
    assert candidates.choose_base(evidence, PolicyOptions(), True) == evidence.table.settings["model"]
