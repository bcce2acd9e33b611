"""The record of one labeled question: a line of `labels.jsonl`, and the slices that it belongs to."""

from __future__ import annotations

import dataclasses
import functools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from knowgate.core.schema import NonNegativeInt, NumberRange, UnitInterval, read_record
from knowgate.data.signals.samples import retrieval_benefit
from knowgate.errors import ArtifactError, BadInput
from knowgate.types import SYNTHETIC_KEY, Completion, Passage, Token

ANSWER_FREQUENCY = "answer frequency"
SLICE_DIMENSIONS = ("data set", "language", "freshness", "hops", ANSWER_FREQUENCY, "form")
FREQUENCY_THIRDS = ("rare", "middle", "frequent")
ROUNDED_DIGITS = 6
RECORDED_GRADER = "recorded"  # grader of rows whose grades were imported with the answers
CHOICE_GRADER = "choice"
STRING_GRADERS = ("exact", "contains", CHOICE_GRADER)
SCALAR_TYPES = frozenset({str, int, bool, type(None)})


@dataclass(frozen=True)
class GradedAnswer:
    """The answer of an LLM to a question, with sampled answers and grades.

    Attributes:
        text: Greedy answer (at temperature 0).
        tokens: Statistics of its tokens; None if the backend gives none.
        finished: Whether the LLM ended the answer; False if it was cut off at the maximum length.
        correct: Grade of the greedy answer; None without gold answer or with an unparsable verdict.
        samples: Sampled answers.
        sample_correct: Grades of the samples.
        mastery: Share of correct samples; None if none was graded.
        certainty: How much the samples agree: 1 if all are equal, 0 if all differ; None for fewer than two.
        other_grades: Verdicts of further graders on the greedy answer, by the name of the grader.
        n_tokens: Number of generated tokens if `tokens` is None; None if it was not recorded.
        prompt_tokens: Number of tokens that the LLM read; None if it was not recorded.
        seconds: How long the answer took; None if it was not recorded.
    """

    text: str
    tokens: tuple[Token, ...] | None = None
    finished: bool = True
    correct: bool | None = None
    samples: tuple[str, ...] = ()
    sample_correct: tuple[bool | None, ...] = ()
    mastery: UnitInterval | None = None
    certainty: UnitInterval | None = None
    other_grades: Mapping[str, bool | None] = field(default_factory=dict)
    n_tokens: NonNegativeInt | None = None
    prompt_tokens: NonNegativeInt | None = None
    seconds: Annotated[float, NumberRange(0)] | None = None


@dataclass(frozen=True)
class LabelRow:
    """All results of labeling one question.

    Attributes:
        grader: Name of the grader.
        closed: Closed-book answer, which the LLM gave without passages.
        open: Open-book answer, which it gave with retrieved passages.
        mask: Answer with passages in which the gold answers are masked.
        iterative: Answer after several rounds of retrieval.
        rounds: Rounds of retrieval of the iterative answer.
        effect_mastery: Whether passages raised or lowered the share of correct samples.
        effect_certainty: Whether passages raised or lowered the agreement of the samples.
        benefit: 1 if only the open-book answer is right, -1 if only the closed-book answer is; otherwise 0.
        cut: Number of passages dropped or shortened to fit the context window.
        guarded: Number of answers graded as wrong because they only repeat the question, which contains the gold answer.
        unparsable: Number of judge verdicts that could not be parsed.
        answer_frequency: Number of passages in the corpus that contain a gold answer; None if not counted.
        vector: File name of the shard that holds the hidden states, and the row in it.
        states: Digest of the id and the hidden states; "" in rows of earlier versions.
        seconds: Mean time per question of the batch.
        tokens: Number of generated tokens.
        error: Why labeling failed; None if it succeeded.
    """

    id: str
    question: str
    lang: str
    answers: tuple[str, ...] = ()  # gold answers
    choices: tuple[str, ...] = ()  # of a multiple-choice question
    meta: Mapping[str, Any] = field(default_factory=dict)  # other fields of the question
    grader: str = ""
    closed: GradedAnswer | None = None
    open: GradedAnswer | None = None
    mask: GradedAnswer | None = None
    iterative: GradedAnswer | None = None
    rounds: NonNegativeInt = 0
    effect_mastery: str | None = None
    effect_certainty: str | None = None
    benefit: Annotated[int, NumberRange(-1, 1)] | None = None
    passages: tuple[Passage, ...] = ()  # shown to the LLM for the open-book answer
    cut: NonNegativeInt = 0
    guarded: NonNegativeInt = 0
    unparsable: NonNegativeInt = 0
    answer_frequency: NonNegativeInt | None = None
    signals: Mapping[str, float] = field(default_factory=dict)  # numbers that gates read, by name
    vector: tuple[str, NonNegativeInt] | None = None
    states: str = ""
    seconds: Annotated[float, NumberRange(0)] = 0.0
    tokens: NonNegativeInt = 0
    error: str | None = None

    @property
    def is_synthetic(self) -> bool:
        """Whether an LLM wrote the question."""
        return bool(self.meta.get(SYNTHETIC_KEY))


def build_ungraded_answer(draft: Completion, samples: Sequence[Completion]) -> GradedAnswer:
    """Build an answer without grades from a draft and its samples."""
    return GradedAnswer(draft.text, draft.tokens, draft.finished, samples=tuple(sample.text for sample in samples))


# --- graders --------------------------------------------------------------------------------------


def list_graders(row: LabelRow) -> list[str]:
    """List the graders with verdicts in a row. The first one counts."""
    others = [name for answer in (row.closed, row.open) if answer for name in answer.other_grades]
    return list(dict.fromkeys([row.grader, *others]))


def select_grader(row: LabelRow, grader: str) -> LabelRow:
    """Return a row with the grades that another grader stored for its answers. Answers without them get no grade.

    Args:
        row: Label row.
        grader: Name of a grader, such as 'recorded', 'contains' or 'judge:implies:MODEL'. 'judge' means any judge.
    """
    # Multiple-choice answers are graded by their letter, whichever grader that compares strings is asked for.
    if _is_named(row.grader, grader) or (row.grader == CHOICE_GRADER and grader in STRING_GRADERS):
        return row
    # The stored name may be longer, as 'judge:implies:MODEL' for 'judge'.
    full_name = next((name for name in list_graders(row) if _is_named(name, grader)), grader)

    def select(answer: GradedAnswer | None) -> GradedAnswer | None:
        return answer and dataclasses.replace(answer, correct=answer.other_grades.get(full_name))

    closed_book = select(row.closed)
    open_book = select(row.open)
    benefit = retrieval_benefit(closed_book.correct, open_book.correct) if closed_book and open_book else None
    return dataclasses.replace(
        row, grader=full_name, closed=closed_book, open=open_book, iterative=select(row.iterative), benefit=benefit
    )


def _is_named(name: str, wanted: str) -> bool:
    return name == wanted or name.startswith(f"{wanted}:")


# --- JSON -----------------------------------------------------------------------------------------


def row_to_json(row: Any) -> dict[str, Any]:
    """Convert a row to a compact record. Defaults are left out, and floats are rounded."""
    record = {}
    for name, default in _list_defaults(cast(Any, type(row))):
        value = getattr(row, name)
        if not _is_default(value, default):
            record[name] = _to_json(value)
    return record


def _to_json(value: Any) -> Any:
    """Convert a value of a row to JSON. Comparing exact types is fast."""
    value_type = type(value)
    if value_type in SCALAR_TYPES:
        return value
    if isinstance(value, float):
        return round(value, ROUNDED_DIGITS)
    if value_type is Token:
        return [value.text, *map(_to_json, (value.logprob, value.entropy, value.margin))]
    if value_type is tuple or value_type is list:
        return [_to_json(item) for item in value]
    if dataclasses.is_dataclass(value_type):
        return row_to_json(value)
    if isinstance(value, Mapping):
        return {key: _to_json(item) for key, item in value.items()}
    return value


@functools.cache
def _list_defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    """List the fields of a dataclass with their defaults."""
    return tuple((item.name, _get_default(item)) for item in dataclasses.fields(kind))


def _get_default(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def _is_default(value: Any, default: Any) -> bool:
    """Return whether a field has its default value. The type counts, so 0.0 differs from 0."""
    if isinstance(value, Mapping):
        return bool(value == default)
    return type(value) is type(default) and bool(value == default)


def row_from_json(record: Mapping[str, Any], where: str) -> LabelRow:
    """Parse a row of `labels.jsonl`. `where` is its location for errors."""
    try:
        return read_record(LabelRow, record, where)
    except BadInput as error:
        raise ArtifactError(f"invalid recorded answer: {str(error).rstrip('.')}. Create the label run again.") from None


# --- slices ---------------------------------------------------------------------------------------


def list_slices(row: LabelRow) -> dict[str, str]:
    """Return the slices of a row by dimension. A slice is a group for reports, such as a language."""
    meta = row.meta
    is_hotpot = str(meta.get("dataset", "")).startswith("hotpotqa")  # `type` has other meanings elsewhere
    hops = meta.get("num_hops") or meta.get("hops") or (meta.get("type") if is_hotpot else None)
    values = {
        "data set": meta.get("dataset"),
        "language": row.lang,
        "freshness": meta.get("fact_type"),
        "hops": hops,
        "form": "multiple choice" if row.choices else "open question",
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


def assign_frequency_thirds(counts: Sequence[int | None]) -> list[str | None]:
    """Divide rows into rare, middle and frequent, by the number of passages with the answer.

    Equal counts share a third.

    Args:
        counts: Passages that contain the answer; None if unknown.

    Returns:
        rare, middle or frequent for each row; None if its count is unknown or all known counts are equal.
    """
    known = sorted(count for count in counts if count is not None)
    if len(set(known)) < 2:
        return [None] * len(counts)
    max_rare = known[math.ceil(len(known) / 3) - 1]  # the highest count of the first third
    max_middle = known[math.ceil(2 * len(known) / 3) - 1]
    # bisect_left returns how many of both maxima are below a count: 0 for rare, 1 for middle, 2 for frequent.
    maxima = [max_rare, max_middle]
    return [None if count is None else FREQUENCY_THIRDS[bisect_left(maxima, count)] for count in counts]
