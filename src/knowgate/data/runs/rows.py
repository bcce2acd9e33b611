"""The record of one labelled question: what `labels.jsonl` holds, one per line.

Knows JSON and the types; not how rows come about.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, cast

from knowgate.core.schema import NonNegativeInt, NumberRange, UnitInterval, read_record
from knowgate.errors import ArtifactError, BadInput
from knowgate.types import SYNTHETIC_KEY, Completion, Passage, Token


@dataclass(frozen=True)
class GradedAnswer:
    """One way of answering: the greedy answer with its token statistics, and the samples.

    correct / sample_correct: None where there is no gold answer or the judge could not be read.
    """

    text: str
    tokens: tuple[Token, ...] | None = None
    finished: bool = True
    correct: bool | None = None
    samples: tuple[str, ...] = ()
    sample_correct: tuple[bool | None, ...] = ()
    mastery: UnitInterval | None = None
    certainty: UnitInterval | None = None


@dataclass(frozen=True)
class LabelRow:
    """Everything learnt about one question. `vector` points to its hidden states: (shard file, row in it).

    states: digest of the question's id and its hidden states; rows of earlier versions have none.
    """

    id: str
    question: str
    lang: str
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)
    grader: str = ""
    closed: GradedAnswer | None = None
    open: GradedAnswer | None = None
    mask: GradedAnswer | None = None
    iterative: GradedAnswer | None = None  # after several rounds of retrieval
    rounds: NonNegativeInt = 0  # of retrieval that the iterative answer took
    effect_mastery: str | None = None
    effect_certainty: str | None = None
    benefit: Annotated[int, NumberRange(-1, 1)] | None = None
    passages: tuple[Passage, ...] = ()
    cut: NonNegativeInt = 0  # passages dropped or shortened to fit the context window
    guarded: NonNegativeInt = 0  # verdicts the echo guard changed
    unparsable: NonNegativeInt = 0  # judge verdicts that could not be read
    answer_frequency: NonNegativeInt | None = None  # passages of the corpus that hold a gold answer
    signals: Mapping[str, float] = field(default_factory=dict)
    vector: tuple[str, NonNegativeInt] | None = None
    states: str = ""
    seconds: Annotated[float, NumberRange(0)] = 0.0
    tokens: NonNegativeInt = 0  # generated
    error: str | None = None

    @property
    def is_synthetic(self) -> bool:
        """An LLM wrote the question."""
        return bool(self.meta.get(SYNTHETIC_KEY))


def row_to_json(row: LabelRow) -> dict[str, Any]:
    """A compact record: defaults are left out, floats rounded to six digits."""
    record: dict[str, Any] = _compact(row)
    return record


def _compact(value: Any) -> Any:
    """By type, not by asking what it is an instance of: rows are many, and hold hundreds of values each."""
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is float:
        return round(value, 6)
    if kind is Token:
        return [value.text, _round(value.logprob), _round(value.entropy), _round(value.margin)]
    if kind is tuple or kind is list:
        return [_compact(found) for found in value]
    if dataclasses.is_dataclass(kind):
        return _record(value)
    if isinstance(value, Mapping):
        return {key: _compact(found) for key, found in value.items()}
    return round(value, 6) if isinstance(value, float) else value


_AS_IT_IS = frozenset({str, int, bool, type(None)})


def _record(value: Any) -> dict[str, Any]:
    found = ((name, getattr(value, name), default) for name, default in _defaults(cast(Any, type(value))))
    return {name: _compact(kept) for name, kept, default in found if not _is_default(kept, default)}


@functools.cache
def _defaults(kind: Any) -> tuple[tuple[str, Any], ...]:
    """The fields of a record, each with its default."""
    return tuple((item.name, _default(item)) for item in dataclasses.fields(kind))


def _default(item: dataclasses.Field[Any]) -> Any:
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def _is_default(value: Any, default: Any) -> bool:
    """Of the same type, too: 0.0 is not the 0 of a count. Mappings that are empty are alike, whatever they are."""
    return value is default or (value == default and (type(value) is type(default) or isinstance(value, Mapping)))


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def row_from_json(record: Mapping[str, Any], where: str) -> LabelRow:
    """The row a record holds."""
    try:
        return read_record(LabelRow, record, where)
    except BadInput as error:
        raise ArtifactError(f"{str(error).rstrip('.')}; that is no label row. Label again.") from None


def build_ungraded_answer(draft: Completion, samples: Sequence[Completion]) -> GradedAnswer:
    """An ungraded side."""
    return GradedAnswer(draft.text, draft.tokens, draft.finished, samples=tuple(sample.text for sample in samples))


ANSWER_FREQUENCY = "answer frequency"
SLICE_DIMENSIONS = ("data set", "language", "freshness", "hops", ANSWER_FREQUENCY, "form")
FREQUENCY_THIRDS = ("rare", "middle", "frequent")


def list_slices(row: LabelRow) -> dict[str, str]:
    """The slices a question belongs to, by dimension; what its data set does not say is left out.

    Answer frequency is not among them: which third a question is in depends on the others (`frequency_thirds`).
    """
    meta = row.meta
    is_hotpot = str(meta.get("dataset", "")).startswith("hotpotqa")  # elsewhere `type` means something else
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
    """Thirds by how many passages of the corpus hold the answer: what is rare there is long-tail knowledge.

    The rule: a third ends with the last count that a third (two thirds) of the known counts, rounded up, reach. Equal
    counts stay together, so a third can be empty. None: the count is not known, or all known ones are equal.
    """
    known = sorted(count for count in counts if count is not None)
    if len(set(known)) < 2:
        return [None] * len(counts)
    low, high = (known[math.ceil(part * len(known) / 3) - 1] for part in (1, 2))
    return [None if count is None else FREQUENCY_THIRDS[(count > low) + (count > high)] for count in counts]
