"""Length of a text in words, as passages are measured."""

from knowgate.retrieval import chunking


def count_words(text: str) -> float:
    """Return the number of words; a Chinese or Japanese character counts as 0.48 words."""
    return chunking._count_units(text) / chunking._UNITS_PER_WORD
