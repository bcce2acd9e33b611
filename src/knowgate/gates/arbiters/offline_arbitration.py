"""Arbiters applied to a label table: which answer they would have given, without running the LLM again.

Beliefs are recorded in the label run, so that an arbiter is called once per run. Rows without texts can be used if the
beliefs are recorded.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from knowgate.core.registry import split_spec
from knowgate.data.runs.records import RecordedBeliefs, read_beliefs, write_beliefs
from knowgate.data.runs.rows import GradedAnswer, LabelRow
from knowgate.data.runs.storage import question_from_row
from knowgate.data.runs.table import LabelTable
from knowgate.errors import BadInput, BadSetting, UnsupportedSignal
from knowgate.gates.arbiters import ARBITERS, load_arbiter
from knowgate.gates.arbiters.arbitration import compute_beliefs
from knowgate.gates.arbiters.fitted_arbiter import FittedArbiter, is_arbiter_folder
from knowgate.gates.offline_scoring import RunModelIdentity, check_unseen
from knowgate.stats.metrics import BoolArray
from knowgate.types import AnswerPair, Arbiter, Completion, Signal

log = logging.getLogger(__name__)
FIRST_BATCH, MAX_BATCH = 32, 512  # questions; batches grow while they are fast
FAST_BATCH_SECONDS = 2.0
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class ArbiterChoices:
    """The choices of an arbiter for every row of a label table.

    Attributes:
        name: Name of the arbiter.
        fingerprint: Fingerprint of the arbiter.
        from_memory: Whether it gives the closed-book answer.
        right: Whether the chosen answer is right.
    """

    name: str
    fingerprint: str
    from_memory: BoolArray
    right: BoolArray


@dataclass(frozen=True)
class _NamedArbiter:
    """An arbiter that is identified by name and fingerprint; `arbiter` is None if only its record is known."""

    name: str
    fingerprint: str
    arbiter: Arbiter | None


def get_answer_pair(row: LabelRow) -> AnswerPair:
    """Return the two answers of a row with its question and passages."""
    if row.closed is None or row.open is None:
        raise BadInput(f"question '{row.id}' does not have both a closed-book and an open-book answer.")
    return AnswerPair(question_from_row(row), _to_completion(row.closed), _to_completion(row.open), row.passages)


def _to_completion(answer: GradedAnswer) -> Completion:
    """Convert a recorded answer."""
    return Completion(answer.text, answer.tokens, answer.finished, len(answer.tokens or ()))


def get_arbiter_folder(arbiter: str | Arbiter | None) -> str | None:
    """Return the folder of a fitted arbiter, None for any other."""
    if isinstance(arbiter, FittedArbiter):
        return str(arbiter.artifact.path)
    return arbiter if isinstance(arbiter, str) and is_arbiter_folder(arbiter) else None


def arbitrate(
    table: LabelTable,
    arbiter: str | Arbiter,
    *,
    plug_in: bool = False,
    on_progress: ProgressCallback = lambda done, total: None,
) -> ArbiterChoices:
    """Choose an answer for every row of a label table; beliefs that are not recorded yet are computed and recorded.

    Args:
        table: Rows with closed-book and open-book answers.
        arbiter: An arbiter, its spec or folder, or the name of a recorded one.
        plug_in: Accept answers of another LLM than the one it was fitted on.
        on_progress: Called with the number of finished rows and the total.
    """
    if table.open_right is None:
        raise BadSetting("an arbiter chooses after retrieval, and no row has an open-book answer. Label with passages.")
    named = _resolve_arbiter(table, arbiter, plug_in)
    closed_keys: set[str] = set()
    for run in table.split_by_run():
        rows = [table.rows[number] for number in run.numbers.tolist()]
        beliefs = _complete_beliefs(run.path, rows, named, on_progress)
        closed_keys |= {f"{run.name}/{key}" for key in beliefs.from_memory}
    from_memory = np.array([key in closed_keys for key in table.keys], dtype=bool)
    right = np.where(from_memory, table.closed_right, table.always_right)
    return ArbiterChoices(named.name, named.fingerprint, from_memory, right)


def _resolve_arbiter(table: LabelTable, arbiter: str | Arbiter, plug_in: bool) -> _NamedArbiter:
    """Load the arbiter and bind it to the LLM of the table, or find its record."""
    if isinstance(arbiter, str) and not is_arbiter_folder(arbiter) and split_spec(arbiter)[0] not in ARBITERS:
        recorded = {item.arbiter: item for run in table.runs for item in read_beliefs(Path(run))}
        if arbiter in recorded:
            return _NamedArbiter(arbiter, recorded[arbiter].fingerprint, None)
    loaded = load_arbiter(arbiter, plug_in=plug_in) if isinstance(arbiter, str) else arbiter
    if (folder := get_arbiter_folder(loaded)) is not None:
        check_unseen(table, folder, "arbiter")
    bound = loaded.bind(RunModelIdentity.from_table(table), table.settings["prompts_fingerprint"])
    return _NamedArbiter(bound.name, bound.fingerprint, bound)


def _complete_beliefs(
    run: Path, rows: Sequence[LabelRow], named: _NamedArbiter, on_progress: ProgressCallback
) -> RecordedBeliefs:
    """Return the beliefs of a run; missing ones are computed and recorded."""
    identity = (named.name, named.fingerprint)
    recorded = [item for item in read_beliefs(run) if (item.arbiter, item.fingerprint) == identity]
    beliefs = recorded[0] if recorded else RecordedBeliefs(*identity, {}, {})
    missing = [row for row in rows if row.open is not None and row.id not in beliefs.judged]
    if not missing:
        return beliefs
    if named.arbiter is None:
        raise BadInput(f"the arbiter '{named.name}' is recorded for some rows of '{run}' only: name its folder.")
    _check_rows(run, missing, named.arbiter)
    log.info("%s judges the answers to %d questions", named.name, len(missing))
    try:
        n_done, batch_size = 0, FIRST_BATCH
        while batch := missing[n_done : n_done + batch_size]:
            start = time.monotonic()
            beliefs = _add_beliefs(beliefs, batch, named.arbiter)
            n_done += len(batch)
            on_progress(n_done, len(missing))
            batch_size = min(2 * batch_size, MAX_BATCH) if time.monotonic() - start < FAST_BATCH_SECONDS else batch_size
    finally:  # an interrupted run keeps the finished batches
        if beliefs.judged:
            write_beliefs(run, beliefs)
    return beliefs


def _add_beliefs(recorded: RecordedBeliefs, rows: Sequence[LabelRow], arbiter: Arbiter) -> RecordedBeliefs:
    """Add the beliefs of an arbiter about further rows."""
    computed = compute_beliefs(arbiter, [get_answer_pair(row) for row in rows])
    by_id = {row.id: belief for row, belief in zip(rows, computed, strict=True)}
    beliefs = {key: belief for key, belief in by_id.items() if belief is not None}
    return RecordedBeliefs(
        recorded.arbiter,
        recorded.fingerprint,
        {**recorded.closed, **{key: belief.closed for key, belief in beliefs.items()}},
        {**recorded.open, **{key: belief.open for key, belief in beliefs.items()}},
        (*recorded.agreed, *(key for key, belief in by_id.items() if belief is None)),
    )


def _check_rows(run: Path, rows: Sequence[LabelRow], arbiter: Arbiter) -> None:
    """Raise an error if the rows lack what the arbiter reads."""
    if not any(row.question for row in rows):
        raise BadSetting(
            f"'{run}' is packed without questions and answers, which the arbiter '{arbiter.name}' reads. Use the "
            "original run, or one in which the arbiter is recorded."
        )
    answers = [answer for row in rows for answer in (row.closed, row.open) if answer is not None]
    missing = ""
    if arbiter.needs_passages and not any(row.passages for row in rows):
        missing = "passages"
    elif Signal.LOGPROBS in arbiter.needs and all(answer.tokens is None for answer in answers):
        missing = "log-probabilities"
    if missing:
        raise UnsupportedSignal(
            f"the arbiter '{arbiter.name}' reads {missing}, and the rows of '{run}' have none. Label again with "
            f"{missing}, or fit the arbiter on rows like these.",
            brief=f"the rows lack {missing}",
        )
