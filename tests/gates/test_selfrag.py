import numpy as np
import pytest
import torch

from knowgate.errors import BadSetting
from knowgate.gates.prompt import NO_RETRIEVAL_TOKEN, RETRIEVAL_TOKEN, SelfragGate
from knowgate.gates.scoring import bind_gate, read_questions, score_questions
from knowgate.models.hf.model import HFModel
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Question, Reading
from tests.support.tiny_models import save_tiny_llama

QUESTIONS = [Question("Who wrote it?"), Question("What is the name of the tower?")]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return HFModel(str(save_tiny_llama(tmp_path_factory.mktemp("selfrag"), more=(NO_RETRIEVAL_TOKEN, RETRIEVAL_TOKEN))))


def test_need_is_the_share_of_the_retrieval_token():
    logits = np.log(np.array([[0.1, 0.3]], dtype=np.float32))  # [No Retrieval], [Retrieval]
    assert SelfragGate().score(QUESTIONS[:1], [Reading(labels={"selfrag": logits})]) == pytest.approx([0.75])


def test_need_equals_a_direct_forward_pass(model):
    gate = bind_gate(SelfragGate(), model, AnswerPrompts())
    needs = score_questions(gate, QUESTIONS, read_questions(model, [gate], QUESTIONS, AnswerPrompts()))
    for question, need in zip(QUESTIONS, needs, strict=True):
        text = f"### Instruction:\n{question.text}\n\n### Response:\n"
        ids = model.tokenize(text)
        logits = model.loaded.model(input_ids=torch.tensor([ids])).logits[0, -1].detach()
        pair = torch.softmax(
            logits[model.loaded.tokenizer.convert_tokens_to_ids([NO_RETRIEVAL_TOKEN, RETRIEVAL_TOKEN])], dim=0
        )
        assert need == pytest.approx(float(pair[1]), abs=1e-5)


def test_a_model_without_the_two_tokens_is_rejected(tmp_path):
    plain = HFModel(str(save_tiny_llama(tmp_path)))
    with pytest.raises(BadSetting, match=r"needs an LLM with the tokens \[No Retrieval\] and \[Retrieval\]"):
        bind_gate(SelfragGate(), plain, AnswerPrompts())


def test_a_model_with_one_retrieval_token_is_rejected_with_the_missing_one(tmp_path):
    half = HFModel(str(save_tiny_llama(tmp_path, more=(RETRIEVAL_TOKEN,))))
    with pytest.raises(BadSetting, match=r"\[No Retrieval\] is not a single token"):
        bind_gate(SelfragGate(), half, AnswerPrompts())
