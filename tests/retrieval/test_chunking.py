from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from knowgate.retrieval.chunking import split_document, split_text
from knowgate.retrieval.documents import Document
from tests.support.word_counts import count_words


def words(n: int, name: str = "w") -> str:
    return " ".join(f"{name}{number}" for number in range(n))


def test_a_short_document_is_one_passage_with_its_own_id():
    (passage,) = split_document(Document("d", "T", "A few words."))
    assert (passage.id, passage.title, passage.text) == ("d", "T", "A few words.")


def test_passages_of_a_long_document_are_numbered():
    passages = split_document(Document("d", "T", words(5) + "\n\n" + words(5)), max_words=5)
    assert [passage.id for passage in passages] == ["d#0", "d#1"]


def test_paragraphs_are_merged_up_to_the_limit():
    text = "\n\n".join([words(4, "a"), words(4, "b"), words(4, "c")])
    assert split_text(text, 8) == [words(4, "a") + "\n\n" + words(4, "b"), words(4, "c")]


def test_a_long_paragraph_is_split_at_sentence_ends():
    text = "One two three. Four five six! Seven eight nine?"
    assert split_text(text, 6) == ["One two three. Four five six!", "Seven eight nine?"]


def test_a_chinese_paragraph_is_split_at_chinese_full_stops():
    text = "一二三四五。六七八九十！甲乙丙丁戊？"
    assert split_text(text, 5) == ["一二三四五。六七八九十！", "甲乙丙丁戊？"]  # 10 characters are 4.8 words


def test_two_hundred_and_fifty_chinese_characters_are_one_passage():
    assert [len(text) for text in split_text("字" * 251)] == [250, 1]


def test_a_sentence_without_end_is_split_between_words():
    assert split_text(words(7), 3) == ["w0 w1 w2", "w3 w4 w5", "w6"]


def test_a_very_long_word_is_not_split():
    assert split_text("x" * 10_000 + " end", 1) == ["x" * 10_000, "end"]


def test_a_heading_stays_with_the_text_below_it():
    text = words(6, "a") + "\n\n# Next\n\n" + words(6, "b")
    assert split_text(text, 9) == [words(6, "a"), "# Next\n\n" + words(6, "b")]


def test_list_items_are_not_split():
    assert split_text("- a b c\n- d e f\n- g h i", 6) == ["- a b c\n- d e f", "- g h i"]


def test_punctuation_is_not_counted():
    assert count_words("-- Hello, world! 你好。 ...") == 2 + 2 * 120 / 250


def test_whitespace_gives_no_passages():
    assert split_document(Document("d", "", " \n\n ")) == []


pieces = st.lists(st.sampled_from(["word", "字词", "End.", "句。", "\n\n", "# Head\n\n", "- item\n", "x1y2"]))


@given(pieces, st.integers(1, 6))
def test_passages_cover_the_text_without_splitting_words_or_exceeding_the_limit(parts: list[str], limit: int):
    text = " ".join(parts)
    passages = split_text(text, limit)
    assert re.sub(r"\s", "", "".join(passages)) == re.sub(r"\s", "", text)
    assert [word for part in passages for word in re.findall(r"[a-zA-Z0-9]+", part)] == re.findall(
        r"[a-zA-Z0-9]+", text
    )
    assert all(count_words(passage) <= limit + 1e-9 for passage in passages)
