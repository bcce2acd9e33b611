"""The record of one labelled question: what `labels.jsonl` holds, one per line.

Knows JSON and the types; not how rows come about.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from knowgate.errors import ArtefactError, BadInput
from knowgate.typed import AtLeastZero, Between, Share, read_record
from knowgate.types import SYNTHETIC, Completion, Passage, Token


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
    mastery: Share | None = None
    certainty: Share | None = None


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
    rounds: AtLeastZero = 0  # of retrieval that the iterative answer took
    effect_mastery: str | None = None
    effect_certainty: str | None = None
    benefit: Annotated[int, Between(-1, 1)] | None = None
    passages: tuple[Passage, ...] = ()
    cut: AtLeastZero = 0  # passages dropped or shortened to fit the context window
    guarded: AtLeastZero = 0  # verdicts the echo guard changed
    unparsable: AtLeastZero = 0  # judge verdicts that could not be read
    answer_frequency: AtLeastZero | None = None  # passages of the corpus that hold a gold answer
    signals: Mapping[str, float] = field(default_factory=dict)
    vector: tuple[str, AtLeastZero] | None = None
    states: str = ""
    seconds: Annotated[float, Between(0)] = 0.0
    tokens: AtLeastZero = 0  # generated
    error: str | None = None

    @property
    def is_synthetic(self) -> bool:
        """An LLM wrote the question."""
        return bool(self.meta.get(SYNTHETIC))


def to_json(row: LabelRow) -> dict[str, Any]:
    """A compact record: defaults are left out, floats rounded to six digits."""
    record: dict[str, Any] = _compact(row)
    return record


def _compact(value: Any) -> Any:
    if isinstance(value, Token):
        return [value.text, _round(value.logprob), _round(value.entropy), _round(value.margin)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((item, getattr(value, item.name)) for item in dataclasses.fields(value))
        return {item.name: _compact(found) for item, found in items if not _is_default(item, found)}
    if isinstance(value, Mapping):
        return {key: _compact(found) for key, found in value.items()}
    if isinstance(value, list | tuple):
        return [_compact(found) for found in value]
    return _round(value) if isinstance(value, float) else value


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _is_default(item: dataclasses.Field[Any], value: Any) -> bool:
    if item.default_factory is not dataclasses.MISSING:
        return bool(value == item.default_factory())
    return item.default is not dataclasses.MISSING and value == item.default and type(value) is type(item.default)


def from_json(record: Mapping[str, Any], where: str) -> LabelRow:
    """The row a record holds."""
    try:
        return read_record(LabelRow, record, where)
    except BadInput as error:
        raise ArtefactError(f"{str(error).rstrip('.')}; that is no label row. Label again.") from None


def side_of(draft: Completion, samples: Sequence[Completion]) -> GradedAnswer:
    """An ungraded side."""
    return GradedAnswer(draft.text, draft.tokens, draft.finished, samples=tuple(sample.text for sample in samples))
