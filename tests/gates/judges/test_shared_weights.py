"""A judge whose base is the answering LLM lives in its weights: one copy, its adapter on for judging alone."""

import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from knowgate.gates import load_gate
from knowgate.models import load_model
from knowgate.training.gate_artifact import save_fitted
from knowgate.training.judges.answer_judge import AnswerTask, make_answer_training, train_answer_judge
from knowgate.training.judges.ensemble import plan_ensemble
from knowgate.types import Prompt, SignalRequest
from tests.support.judge_data import PROMPTS, planted, quick
from tests.support.tiny_models import save_word_llama

HOW = make_answer_training(1, 8, 1e-2)
ASKED = [Prompt("x a b c?"), Prompt("a b c d e?")]


@dataclass(frozen=True)
class Made:
    model: Path
    gate: Path
    examples: object


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with quick():
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("judge")
    base = save_word_llama(folder / "model")
    examples = planted(base, 60, by="draft", fingerprint=load_model(f"hf:{base}").fingerprint)
    fitted = train_answer_judge(
        AnswerTask("judge", 32), examples, plan_ensemble(examples.split, HOW, seeds=2), work=folder / "work"
    )
    save_fitted(fitted, examples, folder / "gate")
    return Made(base, folder / "gate", examples)


@pytest.fixture
def llm(made):
    return load_model(f"hf:{made.model}")


def bound(made, llm):
    return load_gate(str(made.gate)).bind(llm, PROMPTS)


def rows(made, n=12):
    return made.examples.questions[:n], made.examples.readings[:n]


def addresses(model):
    return {value.data_ptr() for name, value in model.named_parameters() if "lora_" not in name}


def measured(reading):
    return [token.logprob for token in reading.draft.tokens]


def said(model):
    return [one[0].text for one in model.generate(ASKED, max_tokens=6)]


def test_it_scores_like_a_judge_with_its_own_weights(made, llm):
    alone = load_gate(str(made.gate))
    assert bound(made, llm).raw_scores(*rows(made)) == pytest.approx(alone.raw_scores(*rows(made)), abs=1e-7)


def test_there_is_one_copy_of_the_weights(made, llm):
    before = addresses(llm.loaded.model)
    judge = bound(made, llm).judge
    judged = {address for member in judge.members for address in addresses(member.model.loaded.model)}
    assert judged == before == addresses(llm.loaded.model)


def test_a_judge_does_not_share_other_weights(made, tmp_path):
    other = load_model(f"hf:{save_word_llama(tmp_path / 'other', seed=1)}")
    judge = load_gate(str(made.gate), plug_in=True).bind(other, PROMPTS).judge
    assert not addresses(judge.model.loaded.model) & addresses(other.loaded.model)


def test_the_llm_answers_as_before_after_judging(made, llm):
    want = SignalRequest(draft_tokens=6, layers=(1, 2))
    before = load_model(f"hf:{made.model}").read(ASKED, want)
    gate = bound(made, llm)
    for _ in range(2):
        gate.score(*rows(made))
        after = llm.read(ASKED, want)
        assert [one.draft.text for one in after] == [one.draft.text for one in before]
        for now, then in zip(after, before, strict=True):
            assert now.hidden[2] == pytest.approx(then.hidden[2], abs=1e-6)
            assert measured(now) == pytest.approx(measured(then), abs=1e-5)


def test_a_failing_judge_leaves_the_adapter_inactive(made, llm):
    before = said(load_model(f"hf:{made.model}"))
    member = bound(made, llm).judge.members[0]
    with pytest.raises(RuntimeError, match="in the middle"), member.activate():
        raise RuntimeError("in the middle")
    assert said(llm) == before


def test_a_draft_in_another_thread_waits_until_the_adapter_is_inactive(made, llm):
    before = said(load_model(f"hf:{made.model}"))
    member, found = bound(made, llm).judge.members[0], []
    drafting = threading.Thread(target=lambda: found.append(said(llm)))
    with member.activate():
        drafting.start()
        drafting.join(timeout=0.3)
        assert drafting.is_alive()
    drafting.join()
    assert found == [before]


def test_a_stream_is_unaffected_by_judging_between_two_pieces(made, llm):
    whole = "".join(load_model(f"hf:{made.model}").stream(ASKED[0], max_tokens=8))
    gate, pieces = bound(made, llm), llm.stream(ASKED[0], max_tokens=8)
    heard = [next(pieces)]
    for piece in pieces:
        gate.score(*rows(made, 2))
        heard.append(piece)
    assert "".join(heard) == whole


def test_prefix_caches_of_adapters_are_separate(made, llm):
    gate = bound(made, llm)
    gate.score(*rows(made))
    assert all(member.model.prefix_cache is not llm.prefix_cache for member in gate.judge.members)
    assert not llm.prefix_cache.entries
