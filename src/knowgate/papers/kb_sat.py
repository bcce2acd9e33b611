"""KB-SAT: a balanced test of self-assessment, and two stress sets made from it (DH-ICL sections 2.1 and appendix).

Half of the questions the LLM answered right, half wrong. The stress sets take known questions and (1) swap an entity
for one of another question, which makes a question nobody can answer, or (2) put a rare word in front, which changes
nothing about what is asked. The paper had an LLM find entities and invent rare words; rules do here, so that anyone
gets the same sets.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from knowgate.data.runs.rows import LabelRow
from knowgate.errors import BadInput

# a run of capitalised words or a number, not at the start of the question; Chinese titles in their marks
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


@dataclass(frozen=True)
class SelfAssessmentSets:
    """Records to write: each has id, question, lang, known (what the LLM should say of itself) and answers."""

    balanced: list[dict[str, Any]]
    swapped: list[dict[str, Any]]
    rare: list[dict[str, Any]]

    @property
    def why_none_swapped(self) -> str:
        """Why no known question could be turned into one that nobody can answer."""
        known = [record for record in self.balanced if record["meta"]["known"]]
        named = sum(bool(ENTITY_PATTERN.search(record["question"])) for record in known)
        about = "a name is taken to be capitalised words after the first, a year, or what stands in 《》 or “”"
        if not named:
            return f"No entity was swapped: none of the {len(known)} known questions names one ({about}). Label more."
        return (
            f"No entity was swapped: {named} of the {len(known)} known questions name one, but no other question of "
            f"the same language names another of its kind ({about}). Label more."
        )


def build_kb_sat(rows: Iterable[LabelRow], seed: int = 0) -> SelfAssessmentSets:
    """All three sets from labelled rows; as many right as wrong ones, the rarer kind decides how many."""
    graded = [row for row in rows if row.error is None and row.closed is not None and row.closed.correct is not None]
    right = [row for row in graded if row.closed and row.closed.correct]
    wrong = [row for row in graded if row.closed and not row.closed.correct]
    if not right or not wrong:
        raise BadInput(
            f"KB-SAT needs questions answered right and wrong; the run has {len(right)} right and {len(wrong)} wrong. "
            "Label more."
        )
    shuffle = random.Random(seed)
    size = min(len(right), len(wrong))
    chosen = shuffle.sample(right, size) + shuffle.sample(wrong, size)
    shuffle.shuffle(chosen)
    known = [row for row in chosen if row.closed and row.closed.correct]
    return SelfAssessmentSets(
        balanced=[_record(row, row.question, bool(row.closed and row.closed.correct)) for row in chosen],
        swapped=swap_entities(known, graded, shuffle),
        rare=[_record(row, draw_rare_word(row, shuffle) + SEPARATOR + row.question, True, "rare") for row in known],
    )


def swap_entities(known: Sequence[LabelRow], pool: Sequence[LabelRow], shuffle: random.Random) -> list[dict[str, Any]]:
    """Known questions with one entity taken from another question; those without an entity are left out."""
    entities = {lang: sorted({e for row in pool if row.lang == lang for e in _entities(row)}) for lang in ("en", "zh")}
    records = []
    for row in known:
        own = _entities(row)
        others = [entity for entity in entities.get(row.lang, []) if _alike(own, entity)]
        if own and others:
            replaced = shuffle.choice(own)
            text = row.question.replace(replaced, shuffle.choice(others), 1)
            records.append(_record(row, text, False, "swapped"))
    return records


def draw_rare_word(row: LabelRow, shuffle: random.Random) -> str:
    return shuffle.choice(RARE_WORDS_ZH if row.lang == "zh" else RARE_WORDS)


def _entities(row: LabelRow) -> list[str]:
    return [match.group() for match in ENTITY_PATTERN.finditer(row.question)]


def _alike(own: Sequence[str], other: str) -> bool:
    """Years are swapped for years, names for names, and never for themselves."""
    return other not in own and any(entity[0].isdigit() == other[0].isdigit() for entity in own)


def _record(row: LabelRow, text: str, known: bool, kind: str = "") -> dict[str, Any]:
    return {
        "id": f"{row.id}-{kind}" if kind else row.id,
        "question": text,
        "lang": row.lang,
        "answers": list(row.answers) if kind != "swapped" else [],
        "meta": {"known": known, "source": row.id, "kind": kind or "balanced"},
    }
