"""The record of one question's preferences: which candidate passages the LLM can use, and which lead it astray.

Knows JSON, the types and how positives and negatives are chosen; not how shifts come about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

from knowgate.errors import ArtefactError, BadInput, BadSetting
from knowgate.files import sha256_text
from knowgate.rerank import shown
from knowgate.runs import RowFolder, to_json
from knowgate.text import normalise
from knowgate.typed import AtLeastZero, read_record
from knowgate.types import Passage, Question

TOP = 5  # positives and negatives kept of each question (CBDR 3.2.2)
NOISE = 1e-6  # a smaller shift is none: one passage read in two batches differs by that much
PAIRS = "pairs.jsonl"
SAME = (
    "model_fingerprint",
    "prompts_fingerprint",
    "source",
    "cut_to",
)  # what folders that are used together must share


@dataclass(frozen=True)
class Candidate:
    """A passage with the retriever's score and what it does to the LLM. correct: of the answer it led to, if asked."""

    id: str
    text: str
    title: str = ""
    score: float | None = None
    shift: float = 0.0
    correct: bool | None = None

    @property
    def passage(self) -> Passage:
        return Passage(self.id, self.text, self.title, self.score)


@dataclass(frozen=True)
class Preference:
    """One question. base: its value without a passage; positives, negatives: places in `candidates`, strongest first.

    duplicates, cut: passages dropped because another says the same, or shortened to fit the context window.
    """

    id: str
    question: str
    split: str
    lang: str | None = None
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    base: float | None = None
    candidates: tuple[Candidate, ...] = ()
    positives: tuple[AtLeastZero, ...] = ()
    negatives: tuple[AtLeastZero, ...] = ()
    duplicates: AtLeastZero = 0
    cut: AtLeastZero = 0
    error: str | None = None

    @property
    def is_kept(self) -> bool:
        """It has passages of both kinds, as training and ranking metrics need."""
        return bool(self.positives and self.negatives)

    @property
    def asked(self) -> Question:
        return Question(self.question, self.id, self.answers, self.lang, self.choices, meta=self.meta)

    @property
    def pool(self) -> tuple[int, ...]:
        """Places of all positives and negatives, in the retriever's order: what rankers are measured on."""
        return tuple(sorted({*self.positives, *self.negatives}))

    def only_pool(self) -> Preference:
        """The row without the candidates that are neither: ranking measures are the same and cost half."""
        place = {old: new for new, old in enumerate(self.pool)}
        return replace(
            self,
            candidates=tuple(self.candidates[old] for old in self.pool),
            positives=tuple(place[old] for old in self.positives),
            negatives=tuple(place[old] for old in self.negatives),
        )


class PreferenceFolder(RowFolder):
    """Where preferences are kept: every question in `preferences.jsonl`, the paper's records in `pairs.jsonl`."""

    version: ClassVar[int] = 1
    manifest_name: ClassVar[str] = "pref.json"
    rows_name: ClassVar[str] = "preferences.jsonl"
    what: ClassVar[str] = "preference folder"
    command: ClassVar[str] = "knowgate prefer"

    def rows(self) -> Iterator[Preference]:
        """The rows in file order; memory stays flat."""
        for where, record in self.records():
            yield from_json(record, where)

    def append(self, rows: Sequence[Preference]) -> None:
        self.append_records([to_json(row) for row in rows])  # type: ignore[arg-type]


def from_json(record: Mapping[str, Any], where: str) -> Preference:
    try:
        row = read_record(Preference, record, where)
    except BadInput as error:
        raise ArtefactError(
            f"{str(error).rstrip('.')}; that is no preference row. Make it again: knowgate prefer"
        ) from None
    if beyond := [place for place in (*row.positives, *row.negatives) if place >= len(row.candidates)]:
        raise ArtefactError(
            f"{where} chooses candidate {beyond[0]} of {len(row.candidates)}; the file is damaged. "
            "Make it again: knowgate prefer"
        )
    return row


def paper_record(row: Preference) -> dict[str, Any]:
    """A question with its positive and negative passages, as CBDR's data set has them, and the shifts beside."""

    def chosen(places: Sequence[int]) -> list[Candidate]:
        return [row.candidates[place] for place in places]

    return {
        "query": row.question,
        "pos": [shown(candidate.passage) for candidate in chosen(row.positives)],
        "neg": [shown(candidate.passage) for candidate in chosen(row.negatives)],
        "pos_scores": [candidate.shift for candidate in chosen(row.positives)],
        "neg_scores": [candidate.shift for candidate in chosen(row.negatives)],
        "pos_id": [candidate.id for candidate in chosen(row.positives)],
        "neg_id": [candidate.id for candidate in chosen(row.negatives)],
        "id": row.id,
        "split": row.split,
    }


@dataclass(frozen=True)
class ChosenPassages:
    """Places of the positives and negatives, strongest first."""

    positives: tuple[int, ...]
    negatives: tuple[int, ...]


def choose(shifts: Sequence[float], correct: Sequence[bool | None], top: int = TOP) -> ChosenPassages:
    """CBDR 3.2.2: the largest rises are positives, the largest falls negatives.

    Where answers were graded (benefit), no question can rise with one passage and fall with another, so its passages
    that lead to a right answer are the positives, those that lead to a wrong one the negatives.
    """
    order = sorted(range(len(shifts)), key=lambda place: -shifts[place])
    if any(verdict is not None for verdict in correct):
        right = [place for place in order if correct[place]]
        wrong = [place for place in order if correct[place] is False]
        return ChosenPassages(tuple(right[:top]), tuple(wrong[:top]))
    rising = [place for place in order if shifts[place] > NOISE]
    falling = [place for place in reversed(order) if shifts[place] < -NOISE]
    return ChosenPassages(tuple(rising[:top]), tuple(falling[:top]))


def distinct(passages: Sequence[Passage]) -> list[Passage]:
    """The passages, each text once; the first stays."""
    first: dict[str, Passage] = {}
    for passage in passages:
        first.setdefault(normalise(passage.text) or passage.text, passage)
    return list(first.values())


def data_hash(rows: Sequence[Preference]) -> str:
    """Of everything a reranker learns from."""
    parts = [
        f"{row.id}|{row.positives}|{row.negatives}|{[asdict(candidate) for candidate in row.candidates]}"
        for row in rows
    ]
    return sha256_text(*parts)[:16]


def shared_settings(folders: Sequence[PreferenceFolder]) -> dict[str, Any]:
    """Settings of the first folder; the others must be preferences of the same LLM, taken in the same way."""
    settings: list[dict[str, Any]] = [folder.manifest()["settings"] for folder in folders]
    for folder, other in zip(folders[1:], settings[1:], strict=True):
        for key in SAME:
            if other.get(key) != settings[0].get(key):
                raise BadSetting(
                    f"'{folder.path}' cannot be used with '{folders[0].path}': {key} is {other.get(key)} there and "
                    f"{settings[0].get(key)} here."
                )
    return settings[0]
