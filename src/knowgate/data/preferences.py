"""Which passages help an LLM and which hurt it: records per question, the folder of a run, and ranking metrics.

The confidence of the LLM in its answer is measured without and with each passage. The difference is the passage's
`shift`. Passages that raise it most are the positives that a reranker learns from; those that lower it are negatives.
"""

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
MIN_SHIFT = 1e-6  # smaller shifts are noise, because the same passage differs by that much between batches
PAIRS_FILE = "pairs.jsonl"
COMMON_SETTINGS = ("model_fingerprint", "prompts_fingerprint", "source", "cut_to")  # must be equal to be combined
CUTOFFS = (1, 3, 5)  # ranking metrics look at the first 1, 3 and 5 passages


@dataclass(frozen=True)
class CandidatePassage:
    """A candidate passage, with its effect on the LLM's confidence.

    Attributes:
        score: Score of the retriever; None if it gave none.
        shift: The LLM's confidence with the passage minus its confidence without it.
        correct: Whether the answer with the passage is right; None if answers were not graded.
    """

    id: str  # of the passage
    text: str
    title: str = ""
    score: float | None = None
    shift: float = 0.0
    correct: bool | None = None

    @property
    def passage(self) -> Passage:
        """The passage without the measurements."""
        return Passage(self.id, self.text, self.title, self.score)


@dataclass(frozen=True)
class Preference:
    """A question with its candidate passages, and which of them help or hurt most.

    Attributes:
        split: Part of the data that the question belongs to: train, dev or test.
        base: Base value: the LLM's confidence without a passage. None if it was not measured.
        candidates: Candidate passages in the order of the retriever.
        positives: Indices of the candidates that help most, strongest first.
        negatives: Indices of the candidates that hurt most, strongest first. If answers were graded: those that lead to a
            wrong answer, most confident first.
        duplicates: Number of passages dropped because another has the same text.
        cut: Number of passages shortened to fit the context window.
        error: Why the measurement failed; None if it succeeded.
    """

    id: str  # of the question
    question: str
    split: str
    lang: str | None = None  # such as "en"
    answers: tuple[str, ...] = ()  # gold answers
    choices: tuple[str, ...] = ()  # of a multiple-choice question
    meta: Mapping[str, Any] = field(default_factory=dict)  # other fields of the question
    base: float | None = None
    candidates: tuple[CandidatePassage, ...] = ()
    positives: tuple[NonNegativeInt, ...] = ()
    negatives: tuple[NonNegativeInt, ...] = ()
    duplicates: NonNegativeInt = 0
    cut: NonNegativeInt = 0
    error: str | None = None

    @property
    def is_kept(self) -> bool:
        """Whether the question can be used for training and ranking metrics: it has positives and negatives."""
        return bool(self.positives and self.negatives)

    def to_question(self) -> Question:
        """Return the question without its passages."""
        return Question(self.question, self.id, self.answers, self.lang, self.choices, meta=self.meta)

    @property
    def pool(self) -> tuple[int, ...]:
        """Indices of all positives and negatives in the order of the retriever. Rerankers are measured on these."""
        return tuple(sorted({*self.positives, *self.negatives}))

    def keep_pool(self) -> Preference:
        """Return a copy with only the positive and negative candidates (the pool)."""
        # Positives and negatives are indices of candidates, so they are renumbered.
        new_index = {old: new for new, old in enumerate(self.pool)}
        return replace(
            self,
            candidates=tuple(self.candidates[old] for old in self.pool),
            positives=tuple(new_index[old] for old in self.positives),
            negatives=tuple(new_index[old] for old in self.negatives),
        )


class PreferenceFolder(RowFolder):
    """The folder of a preference run. `preferences.jsonl` has all rows, `pairs.jsonl` has training records."""

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
        """Append finished rows to the file."""
        self.append_records([row_to_json(row) for row in rows])


def preference_from_json(record: Mapping[str, Any], where: str) -> Preference:
    """Parse a row of `preferences.jsonl`.

    Args:
        record: JSON object of the row.
        where: File and line of the record, for error messages.
    """
    try:
        row = read_record(Preference, record, where)
    except BadInput as error:
        problem = str(error).rstrip(".")
        raise ArtifactError(f"invalid preference record: {problem}. Create the folder again: knowgate prefer") from None
    if invalid := [index for index in (*row.positives, *row.negatives) if index >= len(row.candidates)]:
        raise ArtifactError(
            f"{where} names the candidate passage {invalid[0]}, but lists only {len(row.candidates)} candidates. The file is "
            "damaged. Create the folder again: knowgate prefer"
        )
    return row


def to_cbdr_record(row: Preference) -> dict[str, Any]:
    """Convert a row to a training record for rerankers (CBDR format). A score is the change in the LLM's confidence."""
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
    """Indices of passages that help the LLM (positives) or hurt it (negatives)."""

    positives: tuple[int, ...]
    negatives: tuple[int, ...]


def select_passages(
    shifts: Sequence[float], correct: Sequence[bool | None], top: int = DEFAULT_TOP
) -> PassageSelection:
    """Select the passages that help an LLM most (positives) and hurt it most (negatives).

    If answers were graded, the grades decide, otherwise the change in the LLM's confidence.

    Args:
        shifts: Confidence with each candidate minus the confidence without it.
        correct: Whether the answer with each candidate is right; None if it was not graded.
        top: Maximum number of positives, and of negatives.
    """
    order = rank_scores(shifts)
    if any(grade is not None for grade in correct):
        positives = [index for index in order if correct[index]]
        negatives = [index for index in order if correct[index] is False]
    else:
        positives = [index for index in order if shifts[index] > MIN_SHIFT]
        negatives = [index for index in reversed(order) if shifts[index] < -MIN_SHIFT]
    return PassageSelection(tuple(positives[:top]), tuple(negatives[:top]))


def deduplicate_passages(passages: Sequence[Passage]) -> list[Passage]:
    """Keep the first of passages with the same text. Case, punctuation and articles are ignored."""
    by_text: dict[str, Passage] = {}
    for passage in passages:
        by_text.setdefault(normalize(passage.text) or passage.text, passage)
    return list(by_text.values())


def hash_preferences(rows: Sequence[Preference]) -> str:
    """Hash the training data of a reranker: the ids, positives, negatives and candidates of all rows."""
    parts = [
        f"{row.id}|{row.positives}|{row.negatives}|{[asdict(candidate) for candidate in row.candidates]}"
        for row in rows
    ]
    return sha256_text(*parts)[:16]


def load_common_settings(folders: Sequence[PreferenceFolder]) -> dict[str, Any]:
    """Check that preference folders can be combined, and return the first settings.

    Raises:
        BadSetting: Another folder differs in one of the `COMMON_SETTINGS`.
    """
    settings: list[dict[str, Any]] = [folder.manifest()["settings"] for folder in folders]
    for folder, other in zip(folders[1:], settings[1:], strict=True):
        for key in COMMON_SETTINGS:
            if other.get(key) != settings[0].get(key):
                raise BadSetting(
                    f"the preference folders '{folders[0].path}' and '{folder.path}' have different values of '{key}': "
                    f"{settings[0].get(key)} and {other.get(key)}. Use only one of them."
                )
    return settings[0]


# --- ranking metrics (CBDR, section 4.1.4) --------------------------------------------------------


def rank_scores(scores: Sequence[float]) -> list[int]:
    """Return the indices of scores from highest to lowest; equal scores keep their order."""
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def precision_at(hits: Sequence[bool], k: int) -> float:
    """Return the share of positives among the first k passages.

    `hits` says for each ranked passage whether it is positive.
    """
    return sum(hits[:k]) / k


def recall_at(hits: Sequence[bool], k: int) -> float:
    """Return the share of all positives found among the first k passages."""
    return sum(hits[:k]) / sum(hits)


def reciprocal_rank_at(hits: Sequence[bool], k: int) -> float:
    """Return 1 / rank of the first positive among the first k passages, or 0."""
    return 1 / (list(hits).index(True) + 1) if any(hits[:k]) else 0.0


RANK_METRICS = {"P": precision_at, "R": recall_at, "MRR": reciprocal_rank_at}
RANK_METRIC_NAMES = tuple(f"{name}@{k}" for k in CUTOFFS for name in RANK_METRICS)


def rank_hits(row: Preference, scores: Sequence[float]) -> list[bool]:
    """Rank the positive and negative passages of a row by score.

    Return for each rank whether the passage is positive.

    Args:
        row: A question with its candidate passages.
        scores: The score of every candidate; higher is better.
    """
    positives = set(row.positives)
    ranked = sorted(row.pool, key=lambda index: -scores[index])
    return [index in positives for index in ranked]


def compute_rank_metrics(rows: Sequence[Preference], scores: Sequence[Sequence[float]]) -> dict[str, FloatArray]:
    """Compute how well scores rank helpful passages first.

    The metrics are precision (P), recall (R) and reciprocal rank (MRR).

    Args:
        rows: Questions with helpful passages (positives) and harmful ones (negatives).
        scores: For each row, the score of every candidate passage; higher is better.

    Returns:
        The values of each metric by its name, such as 'P@3', with one number per row.
    """
    hits = [rank_hits(row, values) for row, values in zip(rows, scores, strict=True)]
    return {
        f"{name}@{k}": np.array([metric(row_hits, k) for row_hits in hits], dtype=np.float64)
        for k in CUTOFFS
        for name, metric in RANK_METRICS.items()
    }
