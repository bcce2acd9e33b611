"""Passage preferences of an LLM: the record of one question, the folder of a preference run, and ranking metrics."""

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

DEFAULT_TOP = 5  # positives and negatives kept per question (CBDR, section 3.2.2)
MIN_SHIFT = 1e-6  # smaller shifts are noise: the same passage differs by that much between batches
PAIRS_FILE = "pairs.jsonl"
COMMON_SETTINGS = ("model_fingerprint", "prompts_fingerprint", "source", "cut_to")  # must be equal to be combined
CUTOFFS = (1, 3, 5)


@dataclass(frozen=True)
class CandidatePassage:
    """A candidate passage and what it does to the LLM.

    Attributes:
        score: Score of the retriever.
        shift: Value with the passage minus the value without it.
        correct: Grade of the answer with the passage; None if answers were not graded.
    """

    id: str
    text: str
    title: str = ""
    score: float | None = None
    shift: float = 0.0
    correct: bool | None = None

    @property
    def passage(self) -> Passage:
        """The candidate as a passage."""
        return Passage(self.id, self.text, self.title, self.score)


@dataclass(frozen=True)
class Preference:
    """The preferences of one question.

    Attributes:
        split: train, dev or test.
        base: Value without a passage.
        candidates: Candidate passages in the order of the retriever.
        positives: Indices of the candidates that help most, strongest first.
        negatives: Indices of the candidates that hurt most, strongest first.
        duplicates: Passages dropped because another has the same text.
        cut: Passages shortened to fit the context window.
        error: Why measuring failed; None if it did not.
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
        """Whether there are positives and negatives, as training and ranking metrics need."""
        return bool(self.positives and self.negatives)

    def to_question(self) -> Question:
        """Return the question."""
        return Question(self.question, self.id, self.answers, self.lang, self.choices, meta=self.meta)

    @property
    def pool(self) -> tuple[int, ...]:
        """Indices of all positives and negatives in the order of the retriever; rankers are measured on them."""
        return tuple(sorted({*self.positives, *self.negatives}))

    def keep_pool(self) -> Preference:
        """Return the row without candidates outside the pool; ranking metrics stay the same."""
        new_index = {old: new for new, old in enumerate(self.pool)}
        return replace(
            self,
            candidates=tuple(self.candidates[old] for old in self.pool),
            positives=tuple(new_index[old] for old in self.positives),
            negatives=tuple(new_index[old] for old in self.negatives),
        )


class PreferenceFolder(RowFolder):
    """A preference run on disk: all rows in `preferences.jsonl`, CBDR's training records in `pairs.jsonl`."""

    version: ClassVar[int] = 1
    manifest_name: ClassVar[str] = "pref.json"
    rows_name: ClassVar[str] = "preferences.jsonl"
    folder_type: ClassVar[str] = "preference folder"
    command: ClassVar[str] = "knowgate prefer"

    def rows(self) -> Iterator[Preference]:
        """Yield the rows in file order, including failed ones."""
        for where, record in self.records():
            yield preference_from_json(record, where)

    def append(self, rows: Sequence[Preference]) -> None:
        """Append finished rows."""
        self.append_records([row_to_json(row) for row in rows])


def preference_from_json(record: Mapping[str, Any], where: str) -> Preference:
    """Parse the record of a preference; `where` names its location in errors."""
    try:
        row = read_record(Preference, record, where)
    except BadInput as error:
        problem = str(error).rstrip(".")
        raise ArtifactError(f"invalid preference row: {problem}. Make it again: knowgate prefer") from None
    if invalid := [index for index in (*row.positives, *row.negatives) if index >= len(row.candidates)]:
        raise ArtifactError(
            f"{where} refers to candidate {invalid[0]} of {len(row.candidates)}: the file is damaged. "
            "Make it again: knowgate prefer"
        )
    return row


def to_cbdr_record(row: Preference) -> dict[str, Any]:
    """Convert a row to a record of CBDR's data set, with the shifts as scores."""
    positives = [row.candidates[index] for index in row.positives]
    negatives = [row.candidates[index] for index in row.negatives]
    return {
        "query": row.question,
        "pos": [format_passage(candidate.passage) for candidate in positives],
        "neg": [format_passage(candidate.passage) for candidate in negatives],
        "pos_scores": [candidate.shift for candidate in positives],
        "neg_scores": [candidate.shift for candidate in negatives],
        "pos_id": [candidate.id for candidate in positives],
        "neg_id": [candidate.id for candidate in negatives],
        "id": row.id,
        "split": row.split,
    }


@dataclass(frozen=True)
class PassageSelection:
    """Indices of the positive and negative candidates, strongest first."""

    positives: tuple[int, ...]
    negatives: tuple[int, ...]


def select_passages(
    shifts: Sequence[float], correct: Sequence[bool | None], top: int = DEFAULT_TOP
) -> PassageSelection:
    """Select the candidates with the largest rises and falls (CBDR, section 3.2.2).

    If answers were graded, candidates that lead to a right answer are the positives and the others the negatives: a
    question that is right without a passage cannot rise, and one that is wrong cannot fall.
    """
    order = sorted(range(len(shifts)), key=lambda index: -shifts[index])
    if any(grade is not None for grade in correct):
        positives = [index for index in order if correct[index]]
        negatives = [index for index in order if correct[index] is False]
    else:
        positives = [index for index in order if shifts[index] > MIN_SHIFT]
        negatives = [index for index in reversed(order) if shifts[index] < -MIN_SHIFT]
    return PassageSelection(tuple(positives[:top]), tuple(negatives[:top]))


def deduplicate_passages(passages: Sequence[Passage]) -> list[Passage]:
    """Drop passages whose normalized text repeats an earlier one."""
    first: dict[str, Passage] = {}
    for passage in passages:
        first.setdefault(normalize(passage.text) or passage.text, passage)
    return list(first.values())


def hash_preferences(rows: Sequence[Preference]) -> str:
    """Hash everything that a reranker learns from."""
    parts = [
        f"{row.id}|{row.positives}|{row.negatives}|{[asdict(candidate) for candidate in row.candidates]}"
        for row in rows
    ]
    return sha256_text(*parts)[:16]


def load_common_settings(folders: Sequence[PreferenceFolder]) -> dict[str, Any]:
    """Return the settings of the first folder; raise BadSetting if the others differ in `COMMON_SETTINGS`."""
    settings: list[dict[str, Any]] = [folder.manifest()["settings"] for folder in folders]
    for folder, other in zip(folders[1:], settings[1:], strict=True):
        for key in COMMON_SETTINGS:
            if other.get(key) != settings[0].get(key):
                raise BadSetting(
                    f"'{folder.path}' cannot be combined with '{folders[0].path}': {key} is {other.get(key)} there and "
                    f"{settings[0].get(key)} here."
                )
    return settings[0]


# --- ranking metrics (CBDR, section 4.1.4) --------------------------------------------------------


def rank_scores(scores: Sequence[float]) -> list[int]:
    """Return indices by descending score; equal scores keep their order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def precision_at(hits: Sequence[bool], k: int) -> float:
    """Return the share of positives among the first k; missing passages count as misses."""
    return sum(hits[:k]) / k


def recall_at(hits: Sequence[bool], k: int) -> float:
    """Return the share of the positives that are among the first k."""
    return sum(hits[:k]) / sum(hits)


def reciprocal_rank_at(hits: Sequence[bool], k: int) -> float:
    """Return 1 / rank of the first positive; 0 if it comes after k."""
    return next((1 / rank for rank, hit in enumerate(hits[:k], start=1) if hit), 0.0)


RANK_METRICS = {"P": precision_at, "R": recall_at, "MRR": reciprocal_rank_at}
RANK_METRIC_NAMES = tuple(f"{name}@{k}" for k in CUTOFFS for name in RANK_METRICS)


def rank_hits(row: Preference, scores: Sequence[float]) -> list[bool]:
    """Order the pool of a row by score, and return which of its passages are positives."""
    positives = set(row.positives)
    ranked = [row.pool[number] for number in rank_scores([scores[index] for index in row.pool])]
    return [index in positives for index in ranked]


def compute_rank_metrics(rows: Sequence[Preference], scores: Sequence[Sequence[float]]) -> dict[str, FloatArray]:
    """Compute every metric for every row; rows need positives and negatives."""
    hits = [rank_hits(row, values) for row, values in zip(rows, scores, strict=True)]
    return {
        f"{name}@{k}": np.array([metric(row_hits, k) for row_hits in hits], dtype=np.float64)
        for k in CUTOFFS
        for name, metric in RANK_METRICS.items()
    }
