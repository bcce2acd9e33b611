from __future__ import annotations

import sys
import tracemalloc

import pytest

from knowgate.errors import MissingExtra
from knowgate.retrieval.tokenizer import Tokenizer, split_bigrams

plain = Tokenizer(stem=False)


def test_words_are_lower_case_without_stop_words_and_punctuation():
    assert plain("The Cat sat, on the MAT!") == ["cat", "sat", "mat"]


def test_words_are_stemmed():
    pytest.importorskip("Stemmer")
    assert Tokenizer(stem=True)("running cities were connected") == ["run", "citi", "were", "connect"]


def test_the_possessive_is_dropped():
    assert plain("Einstein’s theory") == ["einstein", "theory"]


def test_chinese_becomes_character_bigrams():
    assert plain("北京大学") == ["北京", "京大", "大学"]


def test_a_single_chinese_character_stands_alone():
    assert split_bigrams("水") == ["水"]


def test_mixed_text_is_split_by_script():
    assert plain("GPT模型v2 的参数") == ["gpt", "模型", "v2", "的参", "参数"]


def test_full_width_letters_become_plain_letters():
    assert plain("ＧＰＴ４") == ["gpt4"]


def test_stemming_without_pystemmer_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "Stemmer", None)
    with pytest.raises(MissingExtra, match=r"knowgate\[stem\]"):
        Tokenizer(stem=True)("words")


def test_long_words_are_stemmed_and_not_kept_in_memory():
    pytest.importorskip("Stemmer")
    stem = Tokenizer(stem=True)
    assert stem("connect" * 3_000 + "ed") == ["connect" * 3_000]
    tracemalloc.start()
    try:
        for number in range(20):
            stem(f"q{number}" + "é" * 20_000)
        assert tracemalloc.get_traced_memory()[0] < 200_000  # one of the words takes 40,000 bytes
    finally:
        tracemalloc.stop()
