"""Which passages help this LLM: measured, kept in a folder, turned into rankings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from knowgate.core.files import sha256_text
from knowgate.core.schema import NonNegativeInt, read_record
from knowgate.core.text import normalize
from knowgate.data.row_folder import RowFolder
from knowgate.data.runs.rows import row_to_json
from knowgate.errors import ArtifactError, BadInput, BadSetting
from knowgate.retrieval.passages import format_passage
from knowgate.stats.metrics import FloatArray
from knowgate.types import Passage, Question

DEFAULT_TOP = 5  # positives and negatives kept of each question (CBDR 3.2.2)
MIN_SHIFT = 1e-6  # a smaller shift is none: one passage read in two batches differs by that much
PAIRS_FILE = "pairs.jsonl"
COMMON_SETTINGS = (
    "model_fingerprint",
    "prompts_fingerprint",
    "source",
    "cut_to",
)  # what folders that are used together must share


@dataclass(frozen=True)
class CandidatePassage:
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
    candidates: tuple[CandidatePassage, ...] = ()
    positives: tuple[NonNegativeInt, ...] = ()
    negatives: tuple[NonNegativeInt, ...] = ()
    duplicates: NonNegativeInt = 0
    cut: NonNegativeInt = 0
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
            yield preference_from_json(record, where)

    def append(self, rows: Sequence[Preference]) -> None:
        self.append_records([row_to_json(row) for row in rows])  # type: ignore[arg-type]


def preference_from_json(record: Mapping[str, Any], where: str) -> Preference:
    try:
        row = read_record(Preference, record, where)
    except BadInput as error:
        raise ArtifactError(
            f"{str(error).rstrip('.')}; that is no preference row. Make it again: knowgate prefer"
        ) from None
    if beyond := [place for place in (*row.positives, *row.negatives) if place >= len(row.candidates)]:
        raise ArtifactError(
            f"{where} chooses candidate {beyond[0]} of {len(row.candidates)}; the file is damaged. "
            "Make it again: knowgate prefer"
        )
    return row


def to_cbdr_record(row: Preference) -> dict[str, Any]:
    """A question with its positive and negative passages, as CBDR's data set has them, and the shifts beside."""

    def chosen(places: Sequence[int]) -> list[CandidatePassage]:
        return [row.candidates[place] for place in places]

    return {
        "query": row.question,
        "pos": [format_passage(candidate.passage) for candidate in chosen(row.positives)],
        "neg": [format_passage(candidate.passage) for candidate in chosen(row.negatives)],
        "pos_scores": [candidate.shift for candidate in chosen(row.positives)],
        "neg_scores": [candidate.shift for candidate in chosen(row.negatives)],
        "pos_id": [candidate.id for candidate in chosen(row.positives)],
        "neg_id": [candidate.id for candidate in chosen(row.negatives)],
        "id": row.id,
        "split": row.split,
    }


@dataclass(frozen=True)
class PassageSelection:
    """Places of the positives and negatives, strongest first."""

    positives: tuple[int, ...]
    negatives: tuple[int, ...]


def select_passages(
    shifts: Sequence[float], correct: Sequence[bool | None], top: int = DEFAULT_TOP
) -> PassageSelection:
    """CBDR 3.2.2: the largest rises are positives, the largest falls negatives.

    Where answers were graded (benefit), no question can rise with one passage and fall with another, so its passages
    that lead to a right answer are the positives, those that lead to a wrong one the negatives.
    """
    order = sorted(range(len(shifts)), key=lambda place: -shifts[place])
    if any(verdict is not None for verdict in correct):
        right = [place for place in order if correct[place]]
        wrong = [place for place in order if correct[place] is False]
        return PassageSelection(tuple(right[:top]), tuple(wrong[:top]))
    rising = [place for place in order if shifts[place] > MIN_SHIFT]
    falling = [place for place in reversed(order) if shifts[place] < -MIN_SHIFT]
    return PassageSelection(tuple(rising[:top]), tuple(falling[:top]))


def deduplicate_passages(passages: Sequence[Passage]) -> list[Passage]:
    """The passages, each text once; the first stays."""
    first: dict[str, Passage] = {}
    for passage in passages:
        first.setdefault(normalize(passage.text) or passage.text, passage)
    return list(first.values())


def hash_preferences(rows: Sequence[Preference]) -> str:
    """Of everything a reranker learns from."""
    parts = [
        f"{row.id}|{row.positives}|{row.negatives}|{[asdict(candidate) for candidate in row.candidates]}"
        for row in rows
    ]
    return sha256_text(*parts)[:16]


def load_common_settings(folders: Sequence[PreferenceFolder]) -> dict[str, Any]:
    """Settings of the first folder; the others must be preferences of the same LLM, taken in the same way."""
    settings: list[dict[str, Any]] = [folder.manifest()["settings"] for folder in folders]
    for folder, other in zip(folders[1:], settings[1:], strict=True):
        for key in COMMON_SETTINGS:
            if other.get(key) != settings[0].get(key):
                raise BadSetting(
                    f"'{folder.path}' cannot be used with '{folders[0].path}': {key} is {other.get(key)} there and "
                    f"{settings[0].get(key)} here."
                )
    return settings[0]


CUTOFFS = (1, 3, 5)


def rank_scores(scores: Sequence[float]) -> list[int]:
    """Places, best score first; equals stay in the order they came in."""
    return sorted(range(len(scores)), key=lambda number: -scores[number])


def precision_at(hits: Sequence[bool], k: int) -> float:
    """Share of positives among the first k; places that are empty because there are fewer passages count as misses."""
    return sum(hits[:k]) / k


def recall_at(hits: Sequence[bool], k: int) -> float:
    """Share of the positives that are among the first k."""
    return sum(hits[:k]) / sum(hits)


def reciprocal_rank_at(hits: Sequence[bool], k: int) -> float:
    """1 / rank of the first positive, 0 if it comes after k."""
    return next((1 / rank for rank, hit in enumerate(hits[:k], start=1) if hit), 0.0)


RANK_METRICS = {"P": precision_at, "R": recall_at, "MRR": reciprocal_rank_at}
RANK_METRIC_NAMES = tuple(f"{name}@{k}" for k in CUTOFFS for name in RANK_METRICS)


def rank_hits(row: Preference, scores: Sequence[float]) -> list[bool]:
    """The row's positives and negatives in the order of their scores: which of them are positives."""
    positives = set(row.positives)
    pool = [row.pool[number] for number in rank_scores([scores[number] for number in row.pool])]
    return [number in positives for number in pool]


def compute_rank_metrics(rows: Sequence[Preference], scores: Sequence[Sequence[float]]) -> dict[str, FloatArray]:
    """Every measure of every row. Rows must have both kinds of passages."""
    hits = [rank_hits(row, values) for row, values in zip(rows, scores, strict=True)]
    return {
        f"{name}@{k}": np.array([measure(row_hits, k) for row_hits in hits], dtype=np.float64)
        for k in CUTOFFS
        for name, measure in RANK_METRICS.items()
    }
