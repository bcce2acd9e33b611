"""Counting passages that hold a phrase: the same as taking every found passage apart."""

from __future__ import annotations

import json

import pytest

from knowgate.core.text import find_anchor_words, fold_text, join_tokens
from knowgate.retrieval import load_retriever
from knowgate.retrieval.index import build_index
from knowgate.retrieval.passages import MAX_LABEL_CHARS, MAX_PASSAGE_CHARS, count_passages_containing, cut_passage
from knowgate.types import Passage
from tests.support.retrieval_fakes import build_bm25

TEXTS = [
    "The tower has 2,846 steps.",
    "2846 pupils went to the TOWER, they say.",
    "A towering height of 3.5 metres.",
    "Café Ｔｏｗｅｒ is full-width.",
    "北京大学 has a tower, too.",
    "Nothing of the kind.",
]
PHRASES = ["tower", "the tower", "2846", "2,846 steps", "3.5", "5", "北京", "café tower", "height", "?", "absent"]


class Plain:
    """Finds everything for everybody."""

    name, fingerprint = "plain", "1"

    def search(self, queries, k):
        return [[Passage(str(i), text) for i, text in enumerate(TEXTS)][:k] for _ in queries]


def by_hand(phrase):
    return sum(bool(join_tokens(phrase).strip()) and join_tokens(phrase) in join_tokens(text) for text in TEXTS)


def test_counts_equal_those_of_a_plain_search_in_every_passage():
    assert count_passages_containing(Plain(), PHRASES, 100) == [by_hand(phrase) for phrase in PHRASES]
    assert by_hand("tower") == 4


@pytest.mark.parametrize("phrase", PHRASES)
def test_passages_of_an_index_folder_are_counted(tmp_path, phrase):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8")
    build_index(tmp_path / "texts", tmp_path / "index")
    index = load_retriever(str(tmp_path / "index"))
    found = [passage.text for passage in index.search([phrase], 100)[0]]
    held = sum(bool(join_tokens(phrase).strip()) and join_tokens(phrase) in join_tokens(text) for text in found)
    assert count_passages_containing(index, [phrase], 100) == [held]


@pytest.mark.parametrize("phrase", ["tower", "said", "green tower", "2846", "red"])
def test_escaped_texts_are_counted_and_titles_are_not(tmp_path, phrase):
    texts = [
        'He message "tower".',
        "A line\ntower\nsaid",
        "back\\slash, 2,846 green, the tower",
        "grün tower\u2028",
        "no",
    ]
    lines = [json.dumps({"id": str(i), "title": "red tower", "text": text}) for i, text in enumerate(texts)]
    (tmp_path / "corpus.jsonl").write_text("\n".join(lines), encoding="utf-8")
    build_index(tmp_path / "corpus.jsonl", tmp_path / "index")
    index = load_retriever(str(tmp_path / "index"))
    found = [passage.text for passage in index.search([phrase], 100)[0]]
    assert count_passages_containing(index, [phrase], 100) == [
        sum(join_tokens(phrase) in join_tokens(text) for text in found)
    ]
    assert len(found) == 5 or phrase not in ("tower", "red")


def test_at_most_k_passages_are_counted():
    shelf = build_bm25([Passage(str(i), f"tower number {i}") for i in range(9)])
    assert count_passages_containing(shelf, ["tower"], 4) == [4]


def test_anchor_words_are_sorted_by_length():
    assert find_anchor_words("The Tower of 2,846 bricklayers") == ["bricklayers", "tower", "2846", "of"]
    assert find_anchor_words("北京") == []
    assert find_anchor_words("1,000,000")[0] in fold_text("It cost 1,000,000 crowns.")


def test_only_the_beginning_of_a_huge_passage_is_kept():
    passage = Passage("a", "The tower.", "Towers", 0.5)
    assert cut_passage(passage) is passage
    huge = cut_passage(Passage("i" * 1_000, "x" * 9_000_000, "t" * 3_000_000, 0.5))
    assert (len(huge.id), len(huge.title), len(huge.text)) == (MAX_LABEL_CHARS, MAX_LABEL_CHARS, MAX_PASSAGE_CHARS)
    assert huge.score == 0.5
