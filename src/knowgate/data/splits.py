"""Fingerprints of questions, and random splits of questions by a hash.

Because of the hash, the part that a question falls into does not depend on the other questions. Each kind of split adds
its own text (salt) to the hash, so that different splits are independent. The hashes must never change, because gates
and thresholds on disk rely on them.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import sha256_text
from knowgate.core.text import normalize, normalize_unicode
from knowgate.stats.metrics import BoolArray
from knowgate.types import Question

SPLIT_SHARES = {"train": 0.6, "dev": 0.1, "calibration": 0.15, "test": 0.15}
DEV_SHARE = 0.3  # rows that a threshold may be chosen on if no other run is given for it
SPACES_TO_REMOVE = re.compile(r"(?<!\d) +| +(?!\d)")  # not between numbers: "1 23" differs from "12 3"
HASH_DIGITS = 12
DEV_HASH_DIGITS = 8


def hash_to_unit(*salt_and_key: str, digits: int = HASH_DIGITS) -> float:
    """Hash texts (a salt and a key) to a number in [0, 1), using the first `digits` hexadecimal digits of the hash."""
    return int(sha256_text(*salt_and_key)[:digits], 16) / 16**digits  # type: ignore[no-any-return]


# --- fingerprints ---------------------------------------------------------------------------------


def fingerprint_text(question: str) -> str:
    """Return a hash of a question's text. A fitted gate stores the hashes of its training questions."""
    return sha256_text(normalize(question) or question)[:12]


def fingerprint_text_loosely(question: str) -> str:
    """Return a hash of a question that ignores case, spaces, punctuation and accents.

    "icecream" and "ice cream" have the same hash.
    """
    # Category "Cf" holds invisible format characters such as the zero-width joiner.
    visible = "".join(char for char in question.casefold() if unicodedata.category(char) != "Cf")
    plain = normalize_unicode(normalize(visible), "NFKD").casefold()
    letters = "".join(char for char in plain if char.isalnum() or char == " " or _is_vowel_sign(char))
    letters = SPACES_TO_REMOVE.sub("", letters)
    return sha256_text("loose", letters or question)[:12]


def _is_vowel_sign(char: str) -> bool:
    """Return whether a character is a vowel sign, for example of Hindi.

    Accents of Latin, Greek and Cyrillic letters do not count.
    """
    return unicodedata.category(char)[0] == "M" and not "\u0300" <= char <= "\u036f"


def fingerprint_question(question: Question) -> str:
    """Return a hash of a question's text, or of its id if the text was removed from the label run."""
    return fingerprint_text(question.text if question.text else f"id:{question.id}")


# --- splits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Row numbers of the four disjoint parts of training data.

    Attributes:
        train: Rows for fitting the weights of a model.
        dev: Rows for choosing its settings, such as the number of epochs.
        calibration: Rows for turning its scores into probabilities.
        test: Rows for measuring it.
    """

    train: NDArray[np.int64]
    dev: NDArray[np.int64]
    calibration: NDArray[np.int64]
    test: NDArray[np.int64]

    def sizes(self) -> dict[str, int]:
        """Return the number of rows of each part."""
        return {name: len(getattr(self, name)) for name in SPLIT_SHARES}


def split_questions(texts: Sequence[str], seed: int) -> Split:
    """Split questions into train, dev, calibration and test by the hash of their text.

    Equal questions are in the same part.
    """
    hashes = np.array([hash_to_unit(str(seed), fingerprint_text(text)) for text in texts])
    boundaries = np.cumsum(list(SPLIT_SHARES.values()))[:-1]  # between the parts: 0.6, 0.7, 0.85
    part_numbers = np.searchsorted(boundaries, hashes, side="right")
    return Split(*(np.flatnonzero(part_numbers == number) for number in range(len(SPLIT_SHARES))))


def mark_dev_rows(ids: Sequence[str]) -> BoolArray:
    """Return a mask of the evaluation rows on which a threshold may be chosen; the others are for testing it."""
    return np.array([hash_to_unit("dev", question_id, digits=DEV_HASH_DIGITS) for question_id in ids]) < DEV_SHARE


def mark_held_out(fingerprints: Sequence[str], share: float, seed: int = 0) -> BoolArray:
    """Return for each question whether it is held out from calibration.

    The hash of the question decides, so this is repeatable.

    Args:
        fingerprints: Fingerprint of each question.
        share: Share of the questions to hold out, from 0 to 1.
        seed: Another seed holds out other questions.
    """
    # The text "calibrate" makes the result independent of `split_questions`.
    return np.array([hash_to_unit("calibrate", str(seed), key) for key in fingerprints]) < share
