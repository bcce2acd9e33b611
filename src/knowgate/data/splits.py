"""Questions told apart and divided by a hash of each: which part one falls into does not depend on the others.

Three splits go by the same hashed share, each with a salt of its own, so that the parts of one are spread over the
parts of the others. Gates and thresholds on disk rest on these numbers: they may not change.
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
DEV_SHARE = 0.3  # questions a threshold may be chosen on when no other run is given for it
BETWEEN_WORDS = re.compile(r"(?<!\d) +| +(?!\d)")  # not between numbers: 1 and 23 are not 12 and 3
DEV_DIGITS = 8  # of the hash; the other splits take twelve


def hash_to_unit(*salt_and_key: str, digits: int = 12) -> float:
    """A number in [0, 1) that a key's hash stands for: so many hexadecimal digits of it, behind the point."""
    return int(sha256_text(*salt_and_key)[:digits], 16) / 16**digits  # type: ignore[no-any-return]


# --- keys -----------------------------------------------------------------------------------------


def fingerprint_text(question: str) -> str:
    """A question's fingerprint, kept so that nobody evaluates a gate on what it was fitted on."""
    return sha256_text(normalize(question) or question)[:12]


def fingerprint_text_loosely(question: str) -> str:
    """The same for a question in other capitals, spaces, punctuation or accents, or with characters nobody sees.

    Beside `seen_key`, which is on disk in older gates: it tells "icecream" from "ice cream", this one does not.
    """
    visible = "".join(char for char in question.casefold() if unicodedata.category(char) != "Cf")
    plain = unicodedata.normalize("NFKD", normalize(visible)).casefold()
    kept = "".join(char for char in plain if char.isalnum() or char == " " or _is_vowel_sign(char))
    kept = BETWEEN_WORDS.sub("", kept)
    return sha256_text("loose", kept or question)[:12]


def _is_vowel_sign(char: str) -> bool:
    """A mark that makes another word, as in Hindi or Japanese; accents of Latin, Greek and Cyrillic do not."""
    return unicodedata.category(char)[0] == "M" and not "\u0300" <= char <= "\u036f"


def fingerprint_question(question: Question) -> str:
    """Its fingerprint by text, or by id for rows that were packed without their texts."""
    return fingerprint_text(question.text if question.text else f"id:{question.id}")


# --- splits ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Row numbers of each part; no question is in two."""

    train: NDArray[np.int64]
    dev: NDArray[np.int64]
    calibration: NDArray[np.int64]
    test: NDArray[np.int64]

    def sizes(self) -> dict[str, int]:
        return {name: len(getattr(self, name)) for name in SPLIT_SHARES}


def split_questions(texts: Sequence[str], seed: int) -> Split:
    """What a fit uses for what. Salt: the seed; key: the question's fingerprint, so equal questions go together."""
    shares = np.array([hash_to_unit(str(seed), fingerprint_text(text)) for text in texts])
    edges = np.cumsum(list(SPLIT_SHARES.values()))[:-1]
    part = np.searchsorted(edges, shares, side="right")
    return Split(*(np.flatnonzero(part == number) for number in range(len(SPLIT_SHARES))))


def mark_dev_rows(ids: Sequence[str]) -> BoolArray:
    """Rows of an evaluation that a threshold may be chosen on. Salt: 'dev'; key: the question's id."""
    return np.array([hash_to_unit("dev", each, digits=DEV_DIGITS) for each in ids]) < DEV_SHARE


def mark_held_out(keys: Sequence[str], share: float, seed: int = 0) -> BoolArray:
    """Questions kept back from choosing a threshold. Salt: 'calibrate' and the seed; key: the question's fingerprint.

    With the salt of a fit, questions that it left aside for its test would all fall on one side.
    """
    return np.array([hash_to_unit("calibrate", str(seed), key) for key in keys]) < share
