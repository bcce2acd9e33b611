"""Arbiters applied to recorded rows: which answer they would have given, without running the LLM again.

An arbiter is asked once for each run; what it believed is kept beside the rows and read from there the next time, so
that rows without texts are enough then.
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
from knowgate.errors import BadInput, BadSetting, NotOffered
from knowgate.gates.arbiters import ARBITERS, load_arbiter
from knowgate.gates.arbiters.arbitration import compute_beliefs
from knowgate.gates.arbiters.fitted_arbiter import FittedArbiter, is_arbiter_folder
from knowgate.gates.offline_scoring import RunModelIdentity, mark_seen_rows
from knowgate.stats.metrics import BoolArray
from knowgate.types import AnswerPair, Arbiter, Completion, Signal

log = logging.getLogger(__name__)
FIRST_BATCH, MAX_BATCH = (
    32,
    512,
)  # questions that are weighed at a time: more and more, as long as they are quickly done
FAST_BATCH_SECONDS = 2.0  # seconds
MISSING_TEXT_ADVICE = "Use the run it was made from, or one in which the arbiter is on record."


@dataclass(frozen=True)
class ArbiterChoices:
    """What an arbiter did to every row of a trial: where it gave the answer from memory, and what came of that."""

    name: str
    fingerprint: str
    from_memory: BoolArray
    right: BoolArray


def get_answer_pair(row: LabelRow) -> AnswerPair:
    """The two answers of a row, as an arbiter is shown them."""
    if row.closed is None or row.open is None:
        raise BadInput(f"question '{row.id}' is not answered both ways.")
    return AnswerPair(question_from_row(row), _completion(row.closed), _completion(row.open), row.passages)


def _completion(side: GradedAnswer) -> Completion:
    return Completion(side.text, side.tokens, side.finished, len(side.tokens or ()))


def get_arbiter_folder(arbiter: str | Arbiter | None) -> str | None:
    """The folder of a fitted arbiter, None for another."""
    if isinstance(arbiter, FittedArbiter):
        return str(arbiter.artifact.path)
    return arbiter if isinstance(arbiter, str) and is_arbiter_folder(arbiter) else None


def arbitrate(
    trial: LabelTable,
    arbiter: str | Arbiter,
    *,
    plug_in: bool = False,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> ArbiterChoices:
    """The arbiter's choice for every row: on record, or asked now and then on record. watch: rows done, of so many."""
    if trial.open_right is None:
        raise BadSetting("an arbiter chooses after retrieval, and no row has an open-book answer. Label with passages.")
    name, fingerprint, ask = _asked(trial, arbiter, plug_in)
    taken: set[str] = set()
    for run in trial.split_by_run():
        rows = [trial.rows[number] for number in run.numbers.tolist()]
        said = complete_beliefs(run.path, rows, name, fingerprint, ask, watch)
        taken |= {f"{run.name}/{key}" for key in said.from_memory}
    from_memory = np.array([key in taken for key in trial.keys], dtype=bool)
    return ArbiterChoices(name, fingerprint, from_memory, np.where(from_memory, trial.closed_right, trial.always_right))


def _asked(trial: LabelTable, arbiter: str | Arbiter, plug_in: bool) -> tuple[str, str, Arbiter | None]:
    """Name and fingerprint of the arbiter, and itself; None where only its record is there."""
    if isinstance(arbiter, str) and not is_arbiter_folder(arbiter) and split_spec(arbiter)[0] not in ARBITERS:
        on_record = {item.arbiter: item for run in trial.runs for item in read_beliefs(Path(run))}
        if arbiter in on_record:
            return arbiter, on_record[arbiter].fingerprint, None
    loaded = load_arbiter(arbiter, plug_in=plug_in) if isinstance(arbiter, str) else arbiter
    if (folder := get_arbiter_folder(loaded)) is not None:
        check_unseen_by_arbiter(trial, folder)
    settings = trial.settings
    bound = loaded.bind(
        RunModelIdentity(settings["model"], settings["model_fingerprint"]), settings["prompts_fingerprint"]
    )
    return bound.name, bound.fingerprint, bound


def check_unseen_by_arbiter(trial: LabelTable, folder: str) -> None:
    same = sum(mark_seen_rows(trial, folder))
    if same:
        raise BadSetting(
            f"the arbiter '{Path(folder).name}' was fitted on {same} of these {len(trial.rows)} questions; use others, "
            "or leave them out with --drop-seen.",
            brief=f"fitted on {same} of these {len(trial.rows)} questions",
        )


def complete_beliefs(
    run: Path,
    rows: Sequence[LabelRow],
    name: str,
    fingerprint: str,
    arbiter: Arbiter | None,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> RecordedBeliefs:
    """What is on record, and what the arbiter says of rows that are not, which is then on record too."""
    before = [item for item in read_beliefs(run) if (item.arbiter, item.fingerprint) == (name, fingerprint)]
    found = before[0] if before else RecordedBeliefs(name, fingerprint, {}, {})
    waiting = [row for row in rows if row.open is not None and row.id not in found.judged]
    if not waiting:
        return found
    if arbiter is None:
        raise BadInput(f"the arbiter '{name}' is on record for some rows of '{run}' only: name its folder.")
    _check(run, waiting, arbiter)
    log.info("%s weighs the answers to %d questions", name, len(waiting))
    try:
        done, size = 0, FIRST_BATCH
        while part := waiting[done : done + size]:
            start = time.monotonic()
            found = _joined(found, [row.id for row in part], arbiter, [get_answer_pair(row) for row in part])
            done += len(part)
            watch(done, len(waiting))
            size = min(2 * size, MAX_BATCH) if time.monotonic() - start < FAST_BATCH_SECONDS else size
    finally:  # what was asked before an interrupt is not asked again
        if found.judged:
            write_beliefs(run, found)
    return found


def _joined(
    found: RecordedBeliefs, ids: Sequence[str], arbiter: Arbiter, answers: Sequence[AnswerPair]
) -> RecordedBeliefs:
    said = dict(zip(ids, compute_beliefs(arbiter, answers), strict=True))
    beliefs = {key: belief for key, belief in said.items() if belief is not None}
    return RecordedBeliefs(
        found.arbiter,
        found.fingerprint,
        {**found.closed, **{key: belief.closed for key, belief in beliefs.items()}},
        {**found.open, **{key: belief.open for key, belief in beliefs.items()}},
        (*found.agreed, *(key for key, belief in said.items() if belief is None)),
    )


def _check(run: Path, rows: Sequence[LabelRow], arbiter: Arbiter) -> None:
    """Refuse rows that do not hold what the arbiter reads."""
    if not any(row.question for row in rows):
        raise BadSetting(
            f"'{run}' is packed without questions and answers, which the arbiter '{arbiter.name}' would "
            f"weigh. {MISSING_TEXT_ADVICE}"
        )
    if arbiter.needs_passages and not any(row.passages for row in rows):
        raise NotOffered(
            f"the arbiter '{arbiter.name}' reads passages, and the rows of '{run}' have none. Label with passages, or "
            "fit the arbiter on rows like these.",
            brief="the rows lack passages",
        )
    sides = [side for row in rows for side in (row.closed, row.open) if side is not None]
    if Signal.LOGPROBS in arbiter.needs and all(side.tokens is None for side in sides):
        raise NotOffered(
            f"the arbiter '{arbiter.name}' reads log-probabilities, and the rows of '{run}' have none. Label with a "
            "backend that gives them, or fit the arbiter on rows like these.",
            brief="the rows lack log-probabilities",
        )
