"""Splits by hash: laws that hold for any questions, and the values that gates on disk rest on."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knowgate.data.splits import (
    SPLIT_SHARES,
    fingerprint_question,
    fingerprint_text,
    fingerprint_text_loosely,
    hash_to_unit,
    mark_dev_rows,
    mark_held_out,
    split_questions,
)
from knowgate.types import Question

TEXTS = [f"question number {i}?" for i in range(20)]
WORDS = st.text(min_size=1, max_size=12)
SPLITS = {
    "fit": lambda texts: part_numbers(split_questions(texts, 0), len(texts)),
    "dev": lambda texts: mark_dev_rows(texts).tolist(),
    "held out": lambda texts: mark_held_out(texts, 0.4).tolist(),
}
SIZES = {"fit": SPLIT_SHARES["test"], "dev": 0.3, "held out": 0.4}


def part_numbers(split, n):
    """For each row the number of its part."""
    numbers = {place: number for number, name in enumerate(SPLIT_SHARES) for place in getattr(split, name).tolist()}
    return [numbers[place] for place in range(n)]


# --- values on disk -------------------------------------------------------------------------------


def test_the_hash_is_scaled_to_the_unit_interval():
    digest = hashlib.sha256(b"".join(len(text).to_bytes(8, "big") + text for text in (b"salt", b"key"))).hexdigest()
    assert hash_to_unit("salt", "key", digits=8) == int(digest[:8], 16) / 2**32
    assert hash_to_unit("salt", "key") == int(digest[:12], 16) / 2**48


def test_the_training_split_equals_that_of_existing_gates():
    found = {name: getattr(split_questions(TEXTS, 7), name).tolist() for name in SPLIT_SHARES}
    assert found == {
        "train": [0, 1, 2, 5, 6, 9, 10, 17, 19],
        "dev": [4, 11, 16],
        "calibration": [7, 13],
        "test": [3, 8, 12, 14, 15, 18],
    }


def test_the_dev_rows_equal_those_of_earlier_evaluations():
    assert np.flatnonzero(mark_dev_rows([f"q{i}" for i in range(20)])).tolist() == [4, 7, 11, 12, 14, 15, 18]


def test_the_held_out_questions_equal_those_of_existing_thresholds():
    keys = [f"key {i}" for i in range(20)]
    assert np.flatnonzero(mark_held_out(keys, 0.5)).tolist() == [0, 1, 4, 8, 9, 12, 13, 14, 15, 17, 18]
    assert np.flatnonzero(mark_held_out(keys, 0.3, seed=3)).tolist() == [2, 5, 6, 9, 12, 14, 15]


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPLITS)
@given(texts=st.lists(WORDS, min_size=1, max_size=20))
def test_equal_questions_stay_together(name, texts):
    found = SPLITS[name](texts + texts)
    assert found[: len(texts)] == found[len(texts) :]


@pytest.mark.parametrize("name", SPLITS)
@given(texts=st.lists(WORDS, min_size=1, max_size=20), more=st.lists(WORDS, max_size=20))
def test_adding_rows_does_not_move_others(name, texts, more):
    assert SPLITS[name](texts + more)[: len(texts)] == SPLITS[name](texts)


@given(texts=st.lists(WORDS, max_size=30), seed=st.integers(0, 9))
def test_every_row_is_in_exactly_one_part_of_a_fit(texts, seed):
    split = split_questions(texts, seed)
    numbers = [place for name in SPLIT_SHARES for place in getattr(split, name).tolist()]
    assert sorted(numbers) == list(range(len(texts)))


@pytest.mark.parametrize("name", SPLITS)
@given(start=st.integers(0, 10**6))
def test_parts_have_about_their_share(name, start):
    found = np.array(SPLITS[name]([f"question {start + i}" for i in range(400)]))
    inside = found == list(SPLIT_SHARES).index("test") if name == "fit" else found
    assert abs(inside.mean() - SIZES[name]) < 0.15  # six standard deviations


@given(WORDS, st.floats(0, 1), st.floats(0, 1))
def test_a_larger_held_out_share_contains_a_smaller_one(key, one, other):
    small, large = sorted((one, other))
    assert mark_held_out([key], large)[0] or not mark_held_out([key], small)[0]


# --- keys -----------------------------------------------------------------------------------------


def test_a_question_without_text_is_identified_by_its_id():
    assert fingerprint_question(Question("Who?", id="7")) == fingerprint_text("who")
    assert fingerprint_question(Question("", id="7")) == fingerprint_text("id:7")


@pytest.mark.parametrize(
    "disguised",
    [
        "WHO  wrote THE  ice cream song in Peru",
        "who wrote the icecream song, in Perú?!",
        "Who wrote the ice\u200b-cream song in Per\u0075\u0301?",
        "Ｗｈｏ ｗｒｏｔｅ ｔｈｅ ice\u00adcream song in Peru？",
        "who wrote  ice-cream song\tin peru ...",
        "\u202eWho wrote the ice-cream song in Peru?\u202c",
    ],
)
def test_spelling_details_do_not_change_the_loose_fingerprint(disguised):
    assert fingerprint_text_loosely(disguised) == fingerprint_text_loosely("Who wrote the ice-cream song in Peru?")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("who wrote faust", "who wrote hamlet"),
        ("q 1", "q 2"),
        ("?", "!"),
        ("कि", "का"),
        ("か", "が"),
        ("what is 1 + 23", "what is 12 + 3"),
        ("x", "id:x"),
    ],
)
def test_different_questions_have_different_loose_fingerprints(one, other):
    assert fingerprint_text_loosely(one) != fingerprint_text_loosely(other)


def test_capitals_that_casefold_to_two_letters_match():
    assert fingerprint_text_loosely("Wo ist die Hauptstraße?") == fingerprint_text_loosely("WO IST DIE HAUPTSTRASSE")
