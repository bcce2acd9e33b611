"""KB-SAT: a balanced test of self-assessment, and two stress sets made from it (DH-ICL, section 2.1 and appendix).

Half of its questions the LLM answered right, half wrong. The stress sets change known questions: one swaps an entity
for an entity of another question, which gives a question that nobody can answer; the other puts a rare word in front,
which changes nothing about the question. The paper had an LLM find entities and invent rare words. Rules do it here,
so that everyone gets the same sets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from knowgate.data.runs.rows import LabelRow
from knowgate.errors import BadInput

# Capitalized words after the first word of a question, a year, or a Chinese title in its marks.
ENTITY_PATTERN = re.compile(
    r"(?<=\s)(?:[A-ZÀ-Þ][\w'’.-]*)(?:\s+(?:(?:of|the|de|von|van|and|&)\s*)?[A-ZÀ-Þ][\w'’.-]*)*|\b(?:1\d|20)\d\d\b"
    r"|《[^《》]+》|“[^“”]+”"
)
RARE_WORDS = (
    "sesquipedalian", "quomodocunquize", "floccinaucinihilipilification", "tergiversate", "borborygmus",
    "crepuscular", "defenestrate", "eleemosynary", "gobemouche", "hircine", "ineffable", "jentacular",
    "kakorrhaphiophobia", "limerence", "mumpsimus", "nudiustertian", "obelus", "petrichor", "quire",
    "rhytiphobia", "susurrus", "tittynope", "ultracrepidarian", "vagitus", "winklepicker", "xertz", "yarborough",
    "zoanthropy",
)  # fmt: skip
RARE_WORDS_ZH = ("饕餮", "魑魅", "龃龉", "踟蹰", "氤氲", "旖旎", "囹圄", "耄耋", "觊觎", "蹀躞", "逡巡", "龟裂")
SEPARATOR = " | "
ENTITY_RULE = "an entity is capitalized words after the first, a year, or a title in 《》 or “”"


@dataclass(frozen=True)
class SelfAssessmentSets:
    """The three sets as JSON records; `meta.known` says what the LLM should say of itself.

    Attributes:
        balanced: As many known as unknown questions.
        swapped: Known questions with an entity of another question; unknown.
        rare: Known questions with a rare word in front; still known.
    """

    balanced: list[dict[str, Any]]
    swapped: list[dict[str, Any]]
    rare: list[dict[str, Any]]

    def explain_no_swaps(self) -> str:
        """Explain why no entity could be swapped."""
        known = [record for record in self.balanced if record["meta"]["known"]]
        with_entity = sum(bool(ENTITY_PATTERN.search(record["question"])) for record in known)
        if not with_entity:
            return (
                f"No entity was swapped: none of the {len(known)} known questions has one ({ENTITY_RULE}). Label more."
            )
        return (
            f"No entity was swapped: {with_entity} of the {len(known)} known questions have one, but no other question "
            f"in the same language has another of its kind ({ENTITY_RULE}). Label more."
        )


def build_kb_sat(rows: Iterable[LabelRow], seed: int = 0) -> SelfAssessmentSets:
    """Build KB-SAT and its stress sets from label rows; the rarer kind of question decides the size.

    Raises:
        BadInput: The rows have no right or no wrong answers.
    """
    graded = [row for row in rows if row.error is None and row.closed is not None and row.closed.correct is not None]
    right = [row for row in graded if _is_right(row)]
    wrong = [row for row in graded if not _is_right(row)]
    if not right or not wrong:
        raise BadInput(
            f"KB-SAT needs questions answered right and wrong; the run has {len(right)} right and {len(wrong)} wrong. "
            "Label more."
        )
    rng = random.Random(seed)
    size = min(len(right), len(wrong))
    chosen = rng.sample(right, size) + rng.sample(wrong, size)
    rng.shuffle(chosen)
    known = [row for row in chosen if _is_right(row)]
    return SelfAssessmentSets(
        balanced=[_make_record(row, row.question, _is_right(row)) for row in chosen],
        swapped=swap_entities(known, graded, rng),
        rare=[_make_record(row, draw_rare_word(row, rng) + SEPARATOR + row.question, True, "rare") for row in known],
    )


def swap_entities(known: Sequence[LabelRow], pool: Sequence[LabelRow], rng: random.Random) -> list[dict[str, Any]]:
    """Replace an entity of each known question by one of another question; questions without entity are left out."""
    entities = {
        lang: sorted({entity for row in pool if row.lang == lang for entity in _find_entities(row)})
        for lang in ("en", "zh")
    }
    records = []
    for row in known:
        own = _find_entities(row)
        others = [entity for entity in entities.get(row.lang, []) if _can_replace(own, entity)]
        if own and others:
            replaced = rng.choice(own)
            text = row.question.replace(replaced, rng.choice(others), 1)
            records.append(_make_record(row, text, False, "swapped"))
    return records


def draw_rare_word(row: LabelRow, rng: random.Random) -> str:
    """Draw a rare word in the language of the question."""
    return rng.choice(RARE_WORDS_ZH if row.lang == "zh" else RARE_WORDS)


def _is_right(row: LabelRow) -> bool:
    return bool(row.closed and row.closed.correct)


def _find_entities(row: LabelRow) -> list[str]:
    return [match.group() for match in ENTITY_PATTERN.finditer(row.question)]


def _can_replace(own: Sequence[str], other: str) -> bool:
    """Return whether an entity is of the same kind (year or name) as one of the question's, but not one of them."""
    return other not in own and any(entity[0].isdigit() == other[0].isdigit() for entity in own)


def _make_record(row: LabelRow, text: str, known: bool, kind: str = "") -> dict[str, Any]:
    return {
        "id": f"{row.id}-{kind}" if kind else row.id,
        "question": text,
        "lang": row.lang,
        "answers": list(row.answers) if kind != "swapped" else [],
        "meta": {"known": known, "source": row.id, "kind": kind or "balanced"},
    }
