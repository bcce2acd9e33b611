"""Fingerprints of questions, and splits by a hash of each question.

The part that a question falls into does not depend on the other questions. Each split has its own salt, so that the
splits are independent. Gates and thresholds on disk rely on these hashes: they must not change.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import sha256_text
from knowgate.core.text import normalize
from knowgate.stats.metrics import BoolArray
from knowgate.types import Question

SPLIT_SHARES = {"train": 0.6, "dev": 0.1, "calibration": 0.15, "test": 0.15}
DEV_SHARE = 0.3  # rows that a threshold may be chosen on if no other run is given for it
SPACES_TO_REMOVE = re.compile(r"(?<!\d) +| +(?!\d)")  # not between numbers: "1 23" differs from "12 3"
HASH_DIGITS = 12
DEV_HASH_DIGITS = 8


def hash_to_unit(*salt_and_key: str, digits: int = HASH_DIGITS) -> float:
    """Hash a salt and a key to a number in [0, 1), from this many hexadecimal digits of the hash."""
    return int(sha256_text(*salt_and_key)[:digits], 16) / 16**digits  # type: ignore[no-any-return]


# --- fingerprints ---------------------------------------------------------------------------------


def fingerprint_text(question: str) -> str:
    """Fingerprint the text of a question, to recognize questions that a gate was fitted on."""
    return sha256_text(normalize(question) or question)[:12]


def fingerprint_text_loosely(question: str) -> str:
    """Fingerprint a question so that case, spaces, punctuation, accents and invisible characters do not matter.

    `fingerprint_text`, which older gates record, distinguishes "icecream" and "ice cream"; this one does not.
    """
    visible = "".join(char for char in question.casefold() if unicodedata.category(char) != "Cf")
    plain = unicodedata.normalize("NFKD", normalize(visible)).casefold()
    letters = "".join(char for char in plain if char.isalnum() or char == " " or _is_vowel_sign(char))
    letters = SPACES_TO_REMOVE.sub("", letters)
    return sha256_text("loose", letters or question)[:12]


def _is_vowel_sign(char: str) -> bool:
    """Return whether a mark changes the word, as in Hindi or Japanese, unlike Latin, Greek and Cyrillic accents."""
    return unicodedata.category(char)[0] == "M" and not "\u0300" <= char <= "\u036f"


def fingerprint_question(question: Question) -> str:
    """Fingerprint a question by its text, or by its id if the row was packed without texts."""
    return fingerprint_text(question.text if question.text else f"id:{question.id}")


# --- splits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Row numbers of the disjoint parts of a training run."""

    train: NDArray[np.int64]
    dev: NDArray[np.int64]
    calibration: NDArray[np.int64]
    test: NDArray[np.int64]

    def sizes(self) -> dict[str, int]:
        """Return the number of rows of each part."""
        return {name: len(getattr(self, name)) for name in SPLIT_SHARES}


def split_questions(texts: Sequence[str], seed: int) -> Split:
    """Split questions for training; equal questions fall into the same part."""
    shares = np.array([hash_to_unit(str(seed), fingerprint_text(text)) for text in texts])
    edges = np.cumsum(list(SPLIT_SHARES.values()))[:-1]
    part = np.searchsorted(edges, shares, side="right")
    return Split(*(np.flatnonzero(part == number) for number in range(len(SPLIT_SHARES))))


def mark_dev_rows(ids: Sequence[str]) -> BoolArray:
    """Mark the rows of an evaluation that a threshold may be chosen on, by question id."""
    return np.array([hash_to_unit("dev", question_id, digits=DEV_HASH_DIGITS) for question_id in ids]) < DEV_SHARE


def mark_held_out(fingerprints: Sequence[str], share: float, seed: int = 0) -> BoolArray:
    """Mark the questions held out from calibration.

    The salt differs from that of `split_questions`; otherwise all test questions of a fit would fall on one side.
    """
    return np.array([hash_to_unit("calibrate", str(seed), key) for key in fingerprints]) < share
