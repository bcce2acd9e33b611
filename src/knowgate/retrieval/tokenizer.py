"""Turn text into index terms: English words, stemmed if PyStemmer is installed, and Chinese character bigrams."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from knowgate.core.text import normalize_unicode
from knowgate.errors import require_extra

# Characters written without spaces between words, for use inside a character class: kana, CJK extension A, unified,
# compatibility, extensions B to G. Korean is not among them because it is written with spaces.
CJK_RANGES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003134f"
CJK_CHARACTER = re.compile(f"[{CJK_RANGES}]")

# The stop words of Lucene's English analyzer.
_STOP_WORDS = (
    "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this "
    "to was will with"
)
STOP_WORDS = frozenset(_STOP_WORDS.split())
# A run of Chinese or Japanese characters, or a word of other letters and digits that may contain apostrophes.
_RUN = re.compile(rf"(?P<cjk>[{CJK_RANGES}]+)|[^\W_{CJK_RANGES}]+(?:'[^\W_{CJK_RANGES}]+)*")


def can_stem() -> bool:
    """Return whether PyStemmer (extra `stem`), which stems English words, is installed."""
    return importlib.util.find_spec("Stemmer") is not None


@dataclass(frozen=True)
class Tokenizer:
    """Splits a text into lower-case index terms, without stop words such as `the`.

    Chinese and Japanese text becomes pairs of adjacent characters.

    Args:
        stem: Whether to reduce English words to their Snowball stems (Porter2), such as `running` to `run`.
    """

    stem: bool

    def __call__(self, text: str) -> list[str]:
        terms: list[str] = []
        for run in _RUN.finditer(_normalize(text)):
            word = run[0].removesuffix("'s")
            if run["cjk"]:
                terms += split_bigrams(run[0])
            elif word not in STOP_WORDS:
                terms.append(self._stem_word(word))
        return terms

    @cached_property
    def _stem_word(self) -> Callable[[str], str]:
        """The function that stems a word, or leaves it as it is without stemming.

        Raises:
            MissingExtra: PyStemmer is not installed.
        """
        if not self.stem:
            return str
        with require_extra("searching an index of stemmed words", "stem"):
            import Stemmer
        # Without a cache (0): it would keep words of any length, and saves less than a tenth of the time.
        stem_word: Callable[[str], str] = Stemmer.Stemmer("english", 0).stemWord
        return stem_word


def split_bigrams(run: str) -> list[str]:
    """Return all pairs of adjacent characters; a single character is returned as it is.

    Example:
        >>> split_bigrams("北京大学")
        ['北京', '京大', '大学']
    """
    return [run[start : start + 2] for start in range(len(run) - 1)] or [run]


def _normalize(text: str) -> str:
    """Return the text in lower case, with plain instead of full-width characters and with straight apostrophes."""
    return normalize_unicode(text).replace("’", "'").lower()
