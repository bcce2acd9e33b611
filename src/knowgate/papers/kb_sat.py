"""KB-SAT: a balanced test of whether an LLM can tell which questions it can answer (DH-ICL, section 2.1, appendix).

The LLM answered half of the questions correctly from memory (known) and half wrong (unknown). Two stress sets change
known questions. The first swaps an entity for an entity of another question, so that nobody can answer the question.
The second puts a rare word in front, which does not change the question. In the paper, an LLM found entities and
invented rare words. Here, rules do both, so that everyone gets the same sets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from knowgate.data.runs.rows import LabelRow
from knowgate.errors import BadInput

# An entity is capitalized words after the first word of a question, a year, or a title in Chinese quotation marks.
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
SEPARATOR = " | "  # between the rare word and the question
ENTITY_RULE = "an entity is capitalized words after the first, a year, or a title in 《》 or “”"


@dataclass(frozen=True)
class SelfAssessmentSets:
    """KB-SAT and its two stress sets, as JSON records of questions.

    `meta.known` of each record is the correct self-assessment: whether the LLM can answer the question from memory.

    Attributes:
        balanced: As many known as unknown questions.
        swapped: Known questions in which an entity was replaced, so that they are now unknown.
        rare: Known questions with a rare word in front. They are still known.
    """

    balanced: list[dict[str, Any]]
    swapped: list[dict[str, Any]]
    rare: list[dict[str, Any]]

    def explain_no_swaps(self) -> str:
        """Explain why `swapped` is empty. Call this only if it is."""
        known = [record for record in self.balanced if record["meta"]["known"]]
        with_entity = sum(bool(ENTITY_PATTERN.search(record["question"])) for record in known)
        if not with_entity:
            return (
                f"No entity was swapped: none of the {len(known)} known questions contains one ({ENTITY_RULE}). "
                "Label more questions."
            )
        return (
            f"No entity was swapped: {with_entity} of the {len(known)} known questions contain one, but no other "
            f"question in the same language contains a different one of the same kind ({ENTITY_RULE}). "
            "Label more questions."
        )


def build_kb_sat(rows: Iterable[LabelRow], seed: int = 0) -> SelfAssessmentSets:
    """Build KB-SAT and its stress sets from label rows.

    Known and unknown questions are drawn in equal numbers, as many as the rarer kind has. Rows that failed or are not
    graded are skipped.

    Raises:
        BadInput: No closed-book answer is correct, or none is wrong.
    """
    graded = [row for row in rows if row.error is None and row.closed is not None and row.closed.correct is not None]
    right = [row for row in graded if _is_right(row)]
    wrong = [row for row in graded if not _is_right(row)]
    if not right or not wrong:
        raise BadInput(
            f"KB-SAT needs questions that the LLM answers right and questions it answers wrong, but the run has "
            f"{len(right)} right and {len(wrong)} wrong answers. Label more questions."
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
    """Replace one entity of each known question by an entity of the same kind from another question.

    Questions without an entity, or without a replacement in the same language, are skipped.

    Args:
        known: Questions to change.
        pool: Questions that replacements are taken from.
        rng: Random number generator.
    """
    entities: dict[str, set[str]] = {"en": set(), "zh": set()}  # by language
    for row in pool:
        if row.lang in entities:
            entities[row.lang].update(_find_entities(row))
    records = []
    for row in known:
        own_entities = _find_entities(row)
        others = sorted(entities.get(row.lang, ()))  # sorted, so that the seed alone decides
        replacements = [entity for entity in others if _can_replace(own_entities, entity)]
        if own_entities and replacements:
            replaced = rng.choice(own_entities)
            text = row.question.replace(replaced, rng.choice(replacements), 1)
            records.append(_make_record(row, text, False, "swapped"))
    return records


def draw_rare_word(row: LabelRow, rng: random.Random) -> str:
    """Draw a rare word in the language of the question."""
    return rng.choice(RARE_WORDS_ZH if row.lang == "zh" else RARE_WORDS)


def _is_right(row: LabelRow) -> bool:
    return bool(row.closed and row.closed.correct)


def _find_entities(row: LabelRow) -> list[str]:
    return [match.group() for match in ENTITY_PATTERN.finditer(row.question)]


def _can_replace(own_entities: Sequence[str], other: str) -> bool:
    """Return whether `other` is new to the question, and a year or a name like one of the question's entities."""
    # Only years start with a digit.
    return other not in own_entities and any(entity[0].isdigit() == other[0].isdigit() for entity in own_entities)


def _make_record(row: LabelRow, text: str, known: bool, kind: str = "") -> dict[str, Any]:
    """Make the JSON record of a question. Swapped questions have no gold answers, as nobody can answer them."""
    return {
        "id": f"{row.id}-{kind}" if kind else row.id,
        "question": text,
        "lang": row.lang,
        "answers": list(row.answers) if kind != "swapped" else [],
        "meta": {"known": known, "source": row.id, "kind": kind or "balanced"},
    }
