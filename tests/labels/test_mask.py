"""Gold answers are replaced by MASK in passages: whatever the grader would accept."""

import os
from itertools import islice

import pytest

from knowgate.core.text import tokenize
from knowgate.data.questions import load_questions
from knowgate.labels.mask import contains_answer, is_mask, mask_passages, mentions_mask
from knowgate.models.prompts.answers import format_passages
from knowgate.types import Passage
from tests.support.params import also_slow

SETS = ("nq_ctx", "triviaqa_ctx", "squad_ctx", "webqa_zh_ctx")
SETS_OF_LONG_PASSAGES = ("hotpotqa_ctx", "cmrc2018_ctx", "temporalqa_ctx")
CHECKED = 150  # questions of each set


def masked(text, golds, title=""):
    return mask_passages([Passage("p", text, title)], golds)[0]


def test_every_alias_is_replaced_in_any_case():
    assert masked("Boxing, or PUGILISM; a boxing match.", ["Boxing", "pugilism"]).text == "MASK, or MASK; a MASK match."


def test_the_longest_alias_is_replaced_first():
    assert masked("New York City is large.", ["New York", "New York City"]).text == "MASK is large."


def test_parts_of_words_are_not_masked():
    assert masked("A party of artists likes art.", ["art"]).text == "A party of artists likes MASK."


def test_an_answer_across_lines_is_masked():
    assert masked("the New\nYork area", ["New York"]).text == "the MASK area"


def test_titles_are_masked_too():
    assert masked("He lived there.", ["Paris"], title="Paris").title == "MASK"


def test_chinese_answers_are_replaced_without_word_boundaries():
    assert masked("郑州是河南省省会", ["河南"]).text == "郑州是MASK省省会"


def test_a_latin_answer_between_chinese_characters_is_a_whole_word():
    assert masked("他在NBA打球", ["NBA"]).text == "他在MASK打球"


def test_accented_letters_are_part_of_the_word():
    assert masked("Café and Caf", ["Caf"]).text == "Café and MASK"


def test_without_gold_answers_nothing_changes():
    assert masked("as it is", ["", "  "]).text == "as it is"


@pytest.mark.parametrize(
    ("text", "gold", "expected"),
    [
        ("Spider-Man came.", "spider man", "MASK came."),
        ("It has 2,846 rooms.", "2846", "It has MASK rooms."),
        ("in the 20th century", "20th Century", "in the MASK"),
        ("Who is it?", "The Who", "MASK is it?"),
        ("He won (the) U.S. Open", "US Open; U S Open", "He won (the) U.S. Open"),
        ("He won the U.S. Open", "u s open", "He won the MASK"),
        ("3.5 is not 5", "5", "3.5 is not MASK"),
        ("缺乏维生素a会引起夜盲症", "维生素A", "缺乏MASK会引起夜盲症"),
        ("水温23~28℃", "23~28℃", "MASK"),
    ],
)
def test_everything_that_the_grader_accepts_is_masked(text, gold, expected):
    assert masked(text, [gold]).text == expected


def test_an_answer_across_title_and_text_is_masked():
    shown = masked("Texas is a film.", ["Paris, Texas"], title="Paris")
    assert (shown.title, shown.text) == ("MASK", "MASK is a film.")


def test_an_answer_across_two_passages_is_masked():
    texts = [Passage("1", "It ends with New"), Passage("2", "York begins.")]
    assert [passage.text for passage in mask_passages(texts, ["New York"])] == ["It ends with MASK", "MASK begins."]


def test_a_gold_answer_that_is_the_word_mask_is_kept():
    assert masked("The Mask is a film.", ["The Mask"]).text == "The Mask is a film."


@pytest.mark.skipif("KNOWGATE_BENCH" not in os.environ, reason="the benchmark sets are not here")
@pytest.mark.parametrize("name", [*SETS, *map(also_slow, SETS_OF_LONG_PASSAGES)])
def test_no_gold_answer_is_left_in_a_benchmark_set(name):
    first = load_questions(f"bench:{name}/test", limit=2 * CHECKED)
    questions = (question for question in first if question.contexts and question.answers and not question.choices)
    held = left = 0
    for question in islice(questions, CHECKED):
        answers = [tokenize(gold) for gold in question.answers if tokenize(gold) not in ([], ["mask"])]
        held += contains_answer(format_passages(question.contexts), answers)
        left += contains_answer(format_passages(mask_passages(question.contexts, question.answers)), answers)
    assert held > 20
    assert left == 0


def test_answers_with_the_word_mask_are_recognized():
    assert is_mask("MASK.")
    assert not is_mask("MASK province")
    assert mentions_mask("It is the MASK province.")
    assert not mentions_mask("a masked ball")
