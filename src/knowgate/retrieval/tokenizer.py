"""Texts to index terms: English words, stemmed where PyStemmer is installed, and Chinese character bigrams.

Knows nothing of scores. Mixed text is cut into runs of either kind.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from knowgate.errors import MissingExtra

# For use inside a character class: kana, CJK extension A, unified, compatibility, extensions B to G.
CJK_RANGES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"

CJK_CHARACTER = re.compile(f"[{CJK_RANGES}]")


# Those of Lucene's English analyser.
_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these "
    "they this to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
_REMEMBERED_STEMS = 200_000  # PyStemmer's own 10,000 made indexing a large vocabulary twice as slow
_RUN = re.compile(rf"(?P<cjk>[{CJK_RANGES}]+)|[^\W_{CJK_RANGES}]+(?:'[^\W_{CJK_RANGES}]+)*")


def can_stem() -> bool:
    """Whether PyStemmer (extra `stem`) is installed."""
    return importlib.util.find_spec("Stemmer") is not None


@dataclass(frozen=True)
class Tokenizer:
    """Lower-case terms without English stop words. `stem`: English Snowball stems (Porter2)."""

    stem: bool

    def __call__(self, text: str) -> list[str]:
        terms: list[str] = []
        words: list[int] = []  # where in `terms` stand words, to be stemmed in one call
        for run in _RUN.finditer(_normalise(text)):
            if run["cjk"]:
                terms += split_bigrams(run[0])
            elif (word := run[0].removesuffix("'s")) not in STOP_WORDS:
                words.append(len(terms))
                terms.append(word)
        return self._stemmed(terms, words)

    def _stemmed(self, terms: list[str], words: list[int]) -> list[str]:
        if self.stem:
            stems = self._stemmer.stemWords([terms[place] for place in words])
            for place, stem in zip(words, stems, strict=True):
                terms[place] = stem
        return terms

    @cached_property
    def _stemmer(self) -> Any:
        try:
            import Stemmer
        except ModuleNotFoundError as error:
            raise MissingExtra("this index, built with stemmed words,", "stem") from error
        return Stemmer.Stemmer("english", _REMEMBERED_STEMS)


def split_bigrams(run: str) -> list[str]:
    """The character pairs of a run: 北京大学 gives 北京, 京大, 大学. A single character stands alone."""
    return [run[start : start + 2] for start in range(len(run) - 1)] or [run]


def _normalise(text: str) -> str:
    """Full-width letters and digits become plain ones, curly apostrophes straight ones, all lower-case."""
    return unicodedata.normalize("NFKC", text).replace("’", "'").lower()
