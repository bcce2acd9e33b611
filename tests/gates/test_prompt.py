import math

import numpy as np
import pytest

from knowgate.errors import BadSetting, ModelError
from knowgate.gates.prompt import PromptGate
from knowgate.gates.scoring import score_questions
from knowgate.types import Question, Reading

ASKED = [Question("Who?")]


def need(known, unknown):
    rows = np.array([[known, unknown]], dtype=np.float32)
    return score_questions(PromptGate(), ASKED, [Reading(labels={"prompt": rows})])[0]


@pytest.mark.parametrize(
    ("known", "unknown", "expected"),
    [
        (1.0, 1.0, 0.5),
        (math.log(3), 0.0, 0.25),  # odds of 3 to 1 that it knows
        (0.0, math.log(3), 0.75),
        (-5.0, -5.0 + math.log(4), 0.8),  # only the difference counts
        (1000.0, -1000.0, 0.0),
        (-1000.0, 1000.0, 1.0),
        (-math.inf, 0.0, 1.0),
        (0.0, -math.inf, 0.0),
    ],
)
def test_need_is_the_probability_of_the_unknown_label(known, unknown, expected):
    assert need(known, unknown) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("known", "unknown"), [(math.nan, 0.0), (-math.inf, -math.inf)])
def test_nan_logits_are_an_error_not_a_score(known, unknown):
    with pytest.raises(ModelError, match="gate 'prompt' returned the score nan") as error:
        need(known, unknown)
    assert (
        error.value.brief == "gate 'prompt' returned the score nan, which is not from 0 to 1"
    )  # for logs: no question


def test_the_label_is_read_at_the_last_position():
    rows = np.array([[9.0, 0.0], [0.0, math.log(3)]], dtype=np.float32)
    assert PromptGate().score(ASKED, [Reading(labels={"prompt": rows})])[0] == pytest.approx(0.75)


def test_a_recorded_logit_difference_replaces_the_logits():
    reading = Reading(signals={"self_assessment": math.log(3)})
    assert PromptGate().score(ASKED, [reading]) == pytest.approx([0.25])


def test_only_the_default_labels_are_recorded():
    assert (PromptGate().recorded_signal, PromptGate("yes/no").recorded_signal) == ("self_assessment", "")


def test_the_prompt_contains_the_question_and_both_labels():
    (prompt,) = PromptGate("yes/no").build_label_prompts([Question("Who is {x}?")], [Reading()])
    assert not prompt.raw
    assert "Question: Who is {x}?" in prompt.parts[0]
    assert "output 'yes'" in prompt.parts[0]
    assert "output 'no'" in prompt.parts[0]


@pytest.mark.parametrize("question", [Question("谁写了哈姆雷特?"), Question("NBA?", lang="zh")])
def test_a_chinese_question_is_asked_in_chinese(question):
    assert (
        PromptGate().build_label_prompts([question], [Reading()])[0].parts[0].startswith("你是一名正在接受测试的学生")
    )


def test_a_language_without_templates_is_asked_in_english():
    assert (
        PromptGate()
        .build_label_prompts([Question("Qui?", lang="fr")], [Reading()])[0]
        .parts[0]
        .startswith("You are a student")
    )


@pytest.mark.parametrize("words", ["yes", "/no", "yes/", ""])
def test_words_that_are_not_two_are_rejected(words):
    with pytest.raises(BadSetting, match="two words, for known and unknown"):
        PromptGate(words)
