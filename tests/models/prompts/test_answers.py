import pytest

from knowgate.errors import BadSetting
from knowgate.models.fake import FakeModel
from knowgate.models.prompts.answers import AnswerPrompts, build_fitting_prompts, fit_passages, format_passages
from knowgate.models.prompts.templates import TemplateSet
from knowgate.types import Passage, Question

PROMPTS = AnswerPrompts()
EN = Question("who wrote Hamlet")
ZH = Question("谁写了哈姆雷特")
CHOICE = Question("Which?", choices=("x", "y"))
CHOICE_ZH = Question("哪个对?", choices=("甲", "乙"))
SHAKESPEARE = [Passage("p", "He wrote it.", "Shakespeare")]

# Zhang et al. (KBM), Figures 9-12, with the question and the passages put in.
FIGURE_9_EN = (
    "Given the following question, give the concise sentence/phrase/noun/entity as answer:\n"
    "question: who wrote Hamlet\n"
    "answer: "
)
FIGURE_9_ZH = "给定以下问题,给出最简洁的短语/名词/实体作为答案:\n问题: 谁写了哈姆雷特\n答案: "
FIGURE_10_EN = (
    "Here's some background information: Shakespeare\nHe wrote it.\n"
    "Given the following question, give the concise sentence/phrase/noun/entity as answer:\n"
    "question: who wrote Hamlet\n"
    "answer: "
)
FIGURE_10_ZH = (
    "这里有一些背景资料: Shakespeare\nHe wrote it.\n"
    "现在给定以下问题,给出最简洁的短语/名词/实体作为答案:\n"
    "问题: 谁写了哈姆雷特\n"
    "答案:"
)
FIGURE_11_EN = (
    "Given the following multiple choice questions, only output the options corresponding to the correct answers "
    "(e.g A/B/C/D...), and do not output other content:\n"
    "question: Which?\nA. x\nB. y\n"
    "answer: "
)
FIGURE_11_ZH = "给定以下多项选择题, 仅输出正确答案所在的选项(A/B/C/D/E):\n问题: 哪个对?\nA. 甲\nB. 乙\n答案: "


@pytest.mark.parametrize(
    ("question", "expected"),
    [(EN, FIGURE_9_EN), (ZH, FIGURE_9_ZH), (CHOICE, FIGURE_11_EN), (CHOICE_ZH, FIGURE_11_ZH)],
)
def test_the_closed_prompt_is_that_of_the_paper(question, expected):
    assert PROMPTS.closed(question).text == expected


@pytest.mark.parametrize(
    ("question", "expected"),
    [
        (EN, FIGURE_10_EN),
        (ZH, FIGURE_10_ZH),
        (CHOICE, "Here's some background information: Shakespeare\nHe wrote it.\n" + FIGURE_11_EN),
        (CHOICE_ZH, "这里有一些背景资料: Shakespeare\nHe wrote it.\n" + FIGURE_11_ZH),
    ],
)
def test_the_open_prompt_is_that_of_the_paper(question, expected):
    assert PROMPTS.open(question, SHAKESPEARE).text == expected


def test_a_prompt_is_a_user_turn():
    assert not PROMPTS.closed(EN).raw


def test_a_forced_language_is_used_for_every_question():
    assert AnswerPrompts(lang="zh").closed(EN).text == FIGURE_9_ZH.replace("谁写了哈姆雷特", "who wrote Hamlet")


def test_the_language_of_a_question_takes_precedence_over_its_script():
    assert PROMPTS.language(Question("NBA?", lang="zh")) == "zh"


def test_a_language_without_templates_falls_back_to_the_script():
    assert PROMPTS.closed(Question("who wrote Hamlet", lang="fr")).text == FIGURE_9_EN


def test_forcing_an_unknown_language_is_refused():
    with pytest.raises(BadSetting, match=r"unknown language 'fr'\. Known: en, zh"):
        AnswerPrompts(lang="fr")


def test_the_fingerprint_tells_templates_and_forced_languages_apart():
    mine = TemplateSet("mine", {"en": {"closed": "{query}"}})
    prompts = [PROMPTS, AnswerPrompts(lang="en"), AnswerPrompts(lang="zh"), AnswerPrompts(mine)]
    assert len({each.fingerprint for each in prompts}) == 4
    assert AnswerPrompts().fingerprint == PROMPTS.fingerprint


def test_braces_in_a_question_and_its_passages_are_left_alone():
    prompt = PROMPTS.open(Question("what is {x}?"), [Passage("p", "{query} and {}")])
    assert "question: what is {x}?" in prompt.text
    assert "{query} and {}" in prompt.text


def test_passages_follow_each_other_with_their_titles_unnumbered():
    passages = [Passage("1", "Text one.", "One"), Passage("2", "Text two.")]
    assert format_passages(passages) == "One\nText one.\n\nText two."


def test_a_title_that_begins_the_text_is_not_repeated():
    assert format_passages([Passage("1", "# One\nText one.", "One")]) == "One\nText one."


def test_open_book_prompts_have_a_fingerprint_of_their_own():
    def reworded(key):
        templates = {lang: dict(texts) for lang, texts in PROMPTS.templates.templates.items()}
        templates["zh"][key] += " "
        return AnswerPrompts(TemplateSet("own", templates)).open_book_fingerprint

    assert reworded("choice_open") != PROMPTS.open_book_fingerprint
    assert reworded("choice_closed") == PROMPTS.open_book_fingerprint
    assert AnswerPrompts(lang="zh").open_book_fingerprint != PROMPTS.open_book_fingerprint


class Small(FakeModel):
    """A model with a context window of 300 characters."""

    def fits(self, prompts, max_tokens):
        return [len(prompt.text) < 300 for prompt in prompts]


def test_a_batch_gets_the_same_passages_as_single_questions():
    found = [SHAKESPEARE, [], [Passage("p", "word " * 30), Passage("q", "word " * 20)]]
    alone = [fit_passages(Small(), PROMPTS, EN, passages, 8) for passages in found]
    together = build_fitting_prompts(Small(), PROMPTS, [EN] * 3, found, 8)
    assert [item.passages for item in together] == alone
    assert [item.prompt for item in together] == [PROMPTS.open(EN, kept) for kept in alone]
    assert [len(kept) for kept in alone] == [1, 0, 1]
