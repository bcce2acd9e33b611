"""How frequent the words of a question are in an index: a compact table of document frequencies."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence

import numpy as np

from knowgate.core.text import tokenize
from knowgate.types import Passage, Question, Vector

BUCKETS = 1 << 16  # words are hashed into so many buckets; a collision makes a rare word look more frequent
POPULARITY_KEY = "popularity"  # key of `Question.meta` that holds how popular the subject of a question is
FREQUENCY_FEATURES = ("rarest_word", "mean_word", "rarest_name")
POPULARITY_FEATURES = ("popularity", "popularity_known")


def count_word_frequencies(passages: Iterable[Passage]) -> Vector:
    """Count in how many passages each word occurs.

    Returns:
        log(1 + number of passages) of each bucket of words.
    """
    counts = np.zeros(BUCKETS, dtype=np.float64)
    for passage in passages:
        counts[sorted({hash_word(word) for word in tokenize(f"{passage.title} {passage.text}")})] += 1
    return np.log1p(counts).astype(np.float32)


def hash_word(word: str) -> int:
    """Return the bucket of a normalized word; the same on every machine."""
    return zlib.crc32(word.encode("utf-8", "surrogatepass")) % BUCKETS


def frequency_features(questions: Sequence[Question], frequencies: Vector) -> Vector:
    """Compute the `FREQUENCY_FEATURES`: log frequency of the rarest word, of the mean word, of the rarest name."""
    rows = [_describe_frequencies(question.text, frequencies) for question in questions]
    return np.array(rows, dtype=np.float32).reshape(len(questions), len(FREQUENCY_FEATURES))


def popularity_features(questions: Sequence[Question]) -> Vector:
    """Compute the `POPULARITY_FEATURES` from `Question.meta`: log popularity, and whether it is known."""
    values = [question.meta.get(POPULARITY_KEY) for question in questions]
    known = [isinstance(value, (int, float)) and 0 <= value < math.inf for value in values]
    logs = [math.log1p(float(value)) if is_known else 0.0 for value, is_known in zip(values, known, strict=True)]  # type: ignore[arg-type]
    return np.array([logs, known], dtype=np.float32).T.reshape(len(questions), len(POPULARITY_FEATURES))


def _describe_frequencies(text: str, frequencies: Vector) -> list[float]:
    words = tokenize(text)
    values = [float(frequencies[hash_word(word)]) for word in words] or [0.0]
    # The first word is capitalized in any case, so it does not count as a name.
    names = [word for part in text.split()[1:] if part[:1].isupper() for word in tokenize(part)]
    named = [float(frequencies[hash_word(word)]) for word in names] or values
    return [min(values), sum(values) / len(values), min(named)]
