"""Features of the text of a question, and how frequent its words are in an index."""

from __future__ import annotations

import math
import re
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

    Words are hashed into buckets, and a bucket counts all its words together.

    Returns:
        log(1 + number of passages) of each bucket.
    """
    counts = np.zeros(BUCKETS, dtype=np.float64)
    for passage in passages:
        words = tokenize(f"{passage.title} {passage.text}")
        buckets = {hash_word(word) for word in words}  # each counts once per passage
        counts[sorted(buckets)] += 1
    return np.log1p(counts).astype(np.float32)


def hash_word(word: str) -> int:
    """Return the bucket of a normalized word; the same on every machine."""
    return zlib.crc32(word.encode("utf-8", "surrogatepass")) % BUCKETS


def frequency_features(questions: Sequence[Question], frequencies: Vector) -> Vector:
    """Compute how frequent the words of each question are in the corpus.

    Args:
        questions: The questions.
        frequencies: Logarithmic frequency of each bucket of words, from `count_word_frequencies`.

    Returns:
        One row per question, with the `FREQUENCY_FEATURES` as columns.
    """
    rows = [_describe_frequencies(question.text, frequencies) for question in questions]
    return np.array(rows, dtype=np.float32).reshape(len(questions), len(FREQUENCY_FEATURES))


def popularity_features(questions: Sequence[Question]) -> Vector:
    """Compute two features for the popularity of each question's entity, from `Question.meta`.

    Returns:
        One row per question: log(1 + popularity), and 1. If the popularity is unknown, both are 0.
    """
    features = np.zeros((len(questions), len(POPULARITY_FEATURES)), dtype=np.float32)
    for row, question in zip(features, questions, strict=True):
        popularity = question.meta.get(POPULARITY_KEY)
        if isinstance(popularity, (int, float)) and 0 <= popularity < math.inf:
            row[:] = math.log1p(popularity), 1
    return features


def _describe_frequencies(text: str, frequencies: Vector) -> list[float]:
    """Return the frequency of the rarest word, the mean, and the rarest name."""
    words = tokenize(text)
    values = [float(frequencies[hash_word(word)]) for word in words] or [0.0]
    # The first word is capitalized in any case, so it does not count as a name.
    names = [word for part in text.split()[1:] if part[:1].isupper() for word in tokenize(part)]
    named = [float(frequencies[hash_word(word)]) for word in names] or values
    return [min(values), sum(values) / len(values), min(named)]


# A question is of the first type whose words it contains, in this order.
QUESTION_TYPES = {
    "how_many": re.compile(r"\bhow (many|much|old|long|tall|far|big|large|high)\b|多少|几"),
    "when": re.compile(r"\b(when|what (year|date|day|month|time)|which year|in what year)\b|何时|什么时候|哪年"),
    "who": re.compile(r"\b(who|whom|whose)\b|谁"),
    "where": re.compile(r"\b(where|which (city|country|state|town)|what (city|country|state|town))\b|哪里|在哪"),
    "which": re.compile(r"\bwhich\b|哪"),
    "how_or_why": re.compile(r"\b(how|why)\b|怎么|为什么|如何"),
    "yes_no": re.compile(r"^(is|are|was|were|do|does|did|has|have|had|can|could|will|would|should)\b|吗"),
    "what": re.compile(r"\bwhat\b|什么"),
}
RECENT = re.compile(
    r"\b(20[12]\d|current|currently|latest|last|new|next|now|recent|recently|today|season)\b|最新|目前|现在"
)
SUPERLATIVE = re.compile(r"\b(\w+est|most|first|only)\b|最")
NUMBER = re.compile(r"\d")
NAME = re.compile(r"\b[A-Z][\w'’-]+")
QUESTION_FEATURES = (
    *QUESTION_TYPES,
    "other_type",
    "question_words",
    "question_names",
    "question_numbers",
    "recent",
    "superlative",
)


def question_features(questions: Sequence[Question]) -> Vector:
    """Compute the `QUESTION_FEATURES` of each question: its type, length, names, numbers and time words."""
    rows = [_describe_question(question.text) for question in questions]
    return np.array(rows, dtype=np.float32).reshape(len(questions), len(QUESTION_FEATURES))


def classify_question(text: str) -> str:
    """Return the type of a question: a key of `QUESTION_TYPES`, or 'other_type'.

    Example:
        >>> classify_question("In what year did Rome fall?")
        'when'
    """
    lowered = text.lower().strip()
    return next((name for name, pattern in QUESTION_TYPES.items() if pattern.search(lowered)), "other_type")


def _describe_question(text: str) -> list[float]:
    """Compute the `QUESTION_FEATURES` of a question: type, length, names, numbers, recent words and superlatives."""
    kind = classify_question(text)
    lowered = text.lower()
    return [
        *(float(name == kind) for name in (*QUESTION_TYPES, "other_type")),
        math.log1p(len(tokenize(text))),
        math.log1p(len(NAME.findall(text[1:]))),  # the first word is capitalized in any case
        float(bool(NUMBER.search(text))),
        float(bool(RECENT.search(lowered))),
        float(bool(SUPERLATIVE.search(lowered))),
    ]
