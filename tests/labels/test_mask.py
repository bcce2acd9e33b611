"""Gold answers are replaced by MASK in passages: aliases, case, Chinese."""

from knowgate.labels.mask import is_mask, mask_passages, says_mask
from knowgate.types import Passage


def masked(text, golds, title=""):
    return mask_passages([Passage("p", text, title)], golds)[0]


def test_every_alias_is_replaced_in_any_case():
    assert masked("Boxing, or PUGILISM; a boxing match.", ["Boxing", "pugilism"]).text == "MASK, or MASK; a MASK match."


def test_the_longest_alias_is_replaced_first():
    assert masked("New York City is large.", ["New York", "New York City"]).text == "MASK is large."


def test_parts_of_words_are_left_alone():
    assert masked("A party of artists likes art.", ["art"]).text == "A party of artists likes MASK."


def test_an_answer_broken_over_lines_is_found():
    assert masked("the New\nYork area", ["New York"]).text == "the MASK area"


def test_titles_are_masked_too():
    assert masked("He lived there.", ["Paris"], title="Paris").title == "MASK"


def test_chinese_answers_are_replaced_without_word_boundaries():
    assert masked("郑州是河南省省会", ["河南"]).text == "郑州是MASK省省会"


def test_a_latin_answer_between_chinese_characters_is_a_whole_word():
    assert masked("他在NBA打球", ["NBA"]).text == "他在MASK打球"


def test_accented_letters_belong_to_the_word():
    assert masked("Café and Caf", ["Caf"]).text == "Café and MASK"


def test_without_gold_answers_nothing_changes():
    assert masked("as it is", ["", "  "]).text == "as it is"


def test_answers_that_say_mask_are_seen():
    assert is_mask("MASK.")
    assert not is_mask("MASK province")
    assert says_mask("It is the MASK province.")
    assert not says_mask("a masked ball")
