"""Options of a policy fit, and what its label runs hold: signals, answers and grades."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from knowgate.core.options import Seed, option
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.data.signals.features import available_features
from knowgate.data.splits import Split, fingerprint_text, hash_to_unit
from knowgate.errors import BadInput
from knowgate.gates.arbiters.offline_arbitration import get_answer_pair
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, SentenceEmbedder
from knowgate.stats.metrics import BoolArray, FloatArray
from knowgate.training.arbiter_pairs import AnswerPairs
from knowgate.training.examples import MIN_GRADED_ROWS, SHARED_SETTINGS, Examples, Target, check_texts
from knowgate.training.fusion import TOKEN_FEATURES
from knowgate.training.policy.outcomes import ChoiceOptions
from knowgate.training.topics import TOPICS_HELP
from knowgate.types import Vector


class PolicyOptions(ChoiceOptions):
    """Options of `fit_policy`: allowed losses, prices, and the base model of a judge."""

    base: str | None = option(
        None,
        "Also try a judge that is fine-tuned from this model: small (no GPU needed, minutes per 1,000 rows), smollm, "
        "hf:NAME or gguf:FILE; `none` tries no judge. Default on a GPU: the LLM that was labeled if it is local, else small. "
        "Default on a CPU: small if there are at most 2,000 rows, without log-probabilities or hidden states, else none.",
    )
    topics: str = option(
        "auto", f"{TOPICS_HELP} The model card shows them; `none` leaves them out.", metavar="auto|N|KEY|none"
    )
    seed: Seed = option(0, "Random seed of splits and training.")


FOLDS = 4
HELD_OUT = -1  # stands for the held-out rows in the place of the number of a fold
HELD_OUT_SHARE = 0.25  # rows that nothing is fitted or chosen on: they test the policy
TRAIN_EDGES = (0.75, 0.87)  # train, dev and calibration get 75, 12 and 13 % of the rows that do not test


@dataclass
class MemoryEmbedder:
    """A sentence embedder with a cache. All folds embed the same texts.

    Attributes:
        vectors: The cached embeddings, by text.
        embedder: Embeds texts that are not in the cache.
    """

    vectors: dict[str, Vector] = field(default_factory=dict)
    embedder: SentenceEmbedder = field(default_factory=SentenceEmbedder)  # loads its weights when it is first used
    spec = DEFAULT_EMBEDDER

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the embedding model."""
        return self.embedder.fingerprint

    def embed(self, texts: Sequence[str]) -> Vector:
        """Embed texts; each distinct text is embedded once."""
        missing = [text for text in dict.fromkeys(texts) if text not in self.vectors]
        if missing:
            self.vectors |= dict(zip(missing, self.embedder.embed(missing), strict=True))
        return np.stack([self.vectors[text] for text in texts])


@dataclass(frozen=True)
class Evidence:
    """Graded questions to fit and test a policy (gate, threshold and perhaps arbiter).

    A quarter of the rows is held out for the test. All other rows form folds for cross-validation.

    Attributes:
        table: The rows, one per graded question.
        has_both_answers: Whether all rows have two graded answers: closed-book (without passages) and open-book (with
            passages).
        folds: Number of the fold of each row, from 0; `HELD_OUT` (-1) for held-out rows.
        seed: Seed of the splits.
        embedder: Sentence embedder that all fits share.
    """

    table: LabelTable
    has_both_answers: bool
    folds: NDArray[np.int64]
    seed: int
    embedder: MemoryEmbedder = field(default_factory=MemoryEmbedder, repr=False)

    @property
    def held_out(self) -> NDArray[np.int64]:
        """Numbers of the rows that test the policy."""
        return np.flatnonzero(self.folds == HELD_OUT)

    @property
    def fit_rows(self) -> NDArray[np.int64]:
        """Numbers of the rows that the policy is fitted and chosen on."""
        return np.flatnonzero(self.folds != HELD_OUT)

    @cached_property
    def features(self) -> list[str]:
        """Names of the features, such as the mean token probability of the draft, that every row has."""
        return available_features(self.table.questions, self.table.readings)

    @property
    def has_logprobs(self) -> bool:
        """Whether the rows have token probabilities."""
        return bool(TOKEN_FEATURES & set(self.features))

    @property
    def has_states(self) -> bool:
        """Whether the rows have hidden states."""
        return bool(self.table.readings[0].hidden)

    def describe(self) -> str:
        """Say in one sentence what the rows hold."""
        available = {"hidden states": self.has_states, "log-probabilities": self.has_logprobs}
        signals = [name for name, is_available in available.items() if is_available]
        answers = "answers with and without passages" if self.has_both_answers else "answers without passages only"
        return (
            f"{len(self.table)} graded questions, {answers}, {' and '.join(signals) or 'text alone'}; "
            f"{len(self.fit_rows)} to fit and choose on, {len(self.held_out)} to test."
        )

    def list_needed(self, target: Target) -> BoolArray:
        """Return for each question whether it needs retrieval, as the target defines it."""
        is_unknown = ~self.table.closed_book_right
        return is_unknown if target == "known" else is_unknown & self.table.retrieved_right

    def split(self, test_fold: int) -> Split:
        """Split the rows for a training that leaves out one fold.

        This fold becomes the test part. All other rows that are not held out are divided into train, dev and calibration
        by a hash of the question.

        Args:
            test_fold: Number of the fold. With `HELD_OUT`, the held-out rows are the test part, and no fold is left out.
        """
        others = np.flatnonzero((self.folds != HELD_OUT) & (self.folds != test_fold))
        part = np.searchsorted(TRAIN_EDGES, self._positions[others], side="right")
        return Split(others[part == 0], others[part == 1], others[part == 2], np.flatnonzero(self.folds == test_fold))

    def make_examples(self, target: Target, test_fold: int) -> Examples:
        """Return the data to fit a gate on, with one fold (or `HELD_OUT`) as the test part; see `split`."""
        return Examples(self.table, self.list_needed(target), target, self.split(test_fold))

    def make_pairs(self, test_fold: int) -> AnswerPairs:
        """Return the data to fit an arbiter on, with one fold (or `HELD_OUT`) as the test part; see `split`."""
        return replace(self._pairs, split=self.split(test_fold))

    @cached_property
    def _positions(self) -> FloatArray:
        """For each question, a hash from 0 to 1 that decides to which part of a split the question belongs."""
        texts = [question.text for question in self.table.questions]
        return np.array([hash_to_unit("policy part", str(self.seed), fingerprint_text(text)) for text in texts])

    @cached_property
    def _pairs(self) -> AnswerPairs:
        """The closed-book and the open-book answer of each row."""
        answers = [get_answer_pair(row) for row in self.table.rows]
        return AnswerPairs(self.table, answers, self.split(HELD_OUT), {})


def load_evidence(runs: Sequence[Path], seed: int = 0) -> Evidence:
    """Load label runs as the data of a policy fit, with folds and held-out rows.

    Raises:
        BadInput: There are too few graded rows, or they are packed without texts.
    """
    table = load_label_table(runs, required_equal=SHARED_SETTINGS)
    check_texts(table)
    with_both = [
        number for number, row in enumerate(table.rows) if row.open is not None and row.open.correct is not None
    ]
    # If at least half of the rows have both answers, the other rows are left out. Otherwise open-book answers are not used.
    has_both_answers = len(with_both) > 0 and len(with_both) >= 0.5 * len(table)
    if has_both_answers and len(with_both) < len(table):
        table = table.subset(with_both)
    if len(table) < MIN_GRADED_ROWS:
        raise BadInput(
            f"fitting a policy (gate and threshold) needs {MIN_GRADED_ROWS} graded questions, but the recorded answers have "
            f"{len(table)}. Label more questions."
        )
    folds = assign_policy_folds([question.text for question in table.questions], seed)
    return Evidence(table, has_both_answers, folds, seed)


def assign_policy_folds(texts: Sequence[str], seed: int) -> NDArray[np.int64]:
    """Divide questions into a held-out quarter and four folds for cross-validation.

    A hash decides, so equal questions stay together.

    Returns:
        The number of the fold of each question, from 0 to 3; `HELD_OUT` (-1) if it is held out.
    """
    positions = np.array([hash_to_unit("policy", str(seed), fingerprint_text(text)) for text in texts])
    folds = np.floor((positions - HELD_OUT_SHARE) / (1 - HELD_OUT_SHARE) * FOLDS).astype(np.int64)
    return np.where(positions < HELD_OUT_SHARE, HELD_OUT, np.minimum(folds, FOLDS - 1))
