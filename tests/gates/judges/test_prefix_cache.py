"""What all prompts of a judge begin with is run once, in batches and one by one."""

import pytest
from transformers import AutoTokenizer

from knowgate.gates.judges.causal_judge import CausalJudge, load_judge_base
from knowgate.models.prompts.questions import build_correctness_prompt
from knowgate.models.tokenization import LabelPromptTokens
from knowgate.types import Question
from tests.support.tiny_models import save_word_llama

SYSTEM = "Is the proposed answer correct? Answer Yes or No. " * 3
QUESTIONS = [Question("x a b c?"), Question("d e?"), Question("f g h i j k?")]


@pytest.fixture
def judge(tmp_path):
    folder = save_word_llama(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = f"{SYSTEM}{tokenizer.chat_template}"
    tokenizer.save_pretrained(folder)
    return CausalJudge(load_judge_base(f"hf:{folder}"), ("Yes", "No"))


@pytest.fixture
def fed(judge):
    """Tokens that the model was given, a number for each pass."""
    counts = []
    embed = judge.model.loaded.model.get_input_embeddings()
    embed.register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
    return counts


def cuts(judge):
    return [judge.encode(build_correctness_prompt(question, "x")) for question in QUESTIONS]


def test_the_shared_prefix_is_the_text_before_the_question(judge):
    assert judge.shared_prefix == judge.model.tokenize(f"{SYSTEM}<user>")


def test_a_batch_computes_a_shared_prefix_once(judge, fed):
    asked = cuts(judge)
    judge.predict_known(asked)
    shared = len(judge.shared_prefix) + 2  # 'Question', ':'
    assert fed == [shared, len(asked) * (max(len(cut.ids) for cut in asked) - shared)]


def test_single_questions_share_the_prefix(judge, fed):
    asked = cuts(judge)
    for cut in asked:
        judge.predict_known([cut])
    opening = len(judge.shared_prefix)
    assert fed == [opening, *(len(cut.ids) - opening for cut in asked)]


def test_sharing_changes_no_score(judge):
    asked = cuts(judge)
    alone = [float(judge.predict_known([LabelPromptTokens(cut.ids, cut.positions)])[0]) for cut in asked]
    assert judge.predict_known(asked).tolist() == pytest.approx(alone, abs=1e-6)
    assert [float(judge.predict_known([cut])[0]) for cut in asked] == pytest.approx(alone, abs=1e-6)
