"""Arbitration on a label table, which holds recorded answers, so that no LLM runs.

An arbiter's beliefs (how likely each answer is to be right) are recorded in the label run, so that it is called only
once per row. Label runs that are packed without texts can still be used if the beliefs are recorded.
"""

from __future__ import annotations

import logging
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
BATCH_SIZE = 128  # questions that are judged before progress is reported
ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class ArbiterChoices:
    """Which answer an arbiter chooses for every row of a label table.

    Attributes:
        name: Name of the arbiter.
        fingerprint: Fingerprint of the arbiter.
        from_memory: For each row, whether it chooses the closed-book answer, which is from the LLM's memory.
        right: Whether the chosen answer is right, for each row.
    """

    name: str
    fingerprint: str
    from_memory: BoolArray
    right: BoolArray


@dataclass(frozen=True)
class _NamedArbiter:
    """An arbiter, with the name and fingerprint of its recorded results.

    `arbiter` is None if only recorded results are used.
    """

    name: str
    fingerprint: str
    arbiter: Arbiter | None


def get_answer_pair(row: LabelRow) -> AnswerPair:
    """Return the closed-book and the open-book answer of a row, with its question and passages.

    Raises:
        BadInput: The row does not have both answers.
    """
    if row.closed is None or row.open is None:
        raise BadInput(
            f"question '{row.id}' lacks its answer with passages or without passages. Run `knowgate label` again with `index`."
        )
    return AnswerPair(question_from_row(row), _to_completion(row.closed), _to_completion(row.open), row.passages)


def _to_completion(answer: GradedAnswer) -> Completion:
    """Convert a recorded answer to a completion."""
    return Completion(answer.text, answer.tokens, answer.finished, len(answer.tokens or ()))


def get_arbiter_folder(arbiter: str | Arbiter | None) -> str | None:
    """Return the folder of a fitted arbiter, or None for everything else."""
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
    """Choose between the answer without and with passages for every row of a table.

    Recorded choices of the arbiter are reused.

    Args:
        table: Rows with closed-book and open-book answers.
        arbiter: An arbiter, its spec or folder, or the name of an arbiter whose beliefs are recorded.
        plug_in: Accept answers of a different LLM than the one that the arbiter was fitted on.
        on_progress: Called with the number of finished rows and the total.

    Raises:
        BadSetting: The table has no open-book answers, or the arbiter was fitted on its questions.
    """
    _check_open_book_answers(table)
    named = _resolve_arbiter(table, arbiter, plug_in)
    from_memory = np.zeros(len(table), dtype=bool)
    for run in table.split_by_run():
        rows = [table.rows[number] for number in run.numbers.tolist()]
        preferred = _complete_beliefs(run.path, rows, named, on_progress).from_memory
        from_memory[run.numbers] = [row.id in preferred for row in rows]
    # The grade of the chosen answer: of the closed-book answer, or of the one that always retrieving gives.
    right = np.where(from_memory, table.closed_book_right, table.retrieved_right)
    return ArbiterChoices(named.name, named.fingerprint, from_memory, right)


def _check_open_book_answers(table: LabelTable) -> None:
    """Raise BadSetting if a table has no answers with passages."""
    if table.open_book_right is None:
        raise BadSetting(
            "the label run (recorded answers) has no answers with passages. The arbiter must choose between answers with and "
            "without passages. Run `knowgate label` again with `index`."
        )


def _resolve_arbiter(table: LabelTable, arbiter: str | Arbiter, plug_in: bool) -> _NamedArbiter:
    """Load an arbiter, or find its recorded results by name.

    Args:
        table: The label table.
        arbiter: An arbiter, its spec or its folder. Any other text is the name of an arbiter whose results are recorded
            in the label runs of the table. Such an arbiter is not loaded.
        plug_in: Accept an arbiter that was fitted on a different LLM.

    Raises:
        BadSetting: The arbiter was fitted on questions of the table.
    """
    # A text that is neither a folder nor a spec can be the name of an arbiter whose beliefs are recorded.
    if isinstance(arbiter, str) and not is_arbiter_folder(arbiter) and split_spec(arbiter)[0] not in ARBITERS:
        for run in reversed(table.runs):  # the newest first
            for beliefs in reversed(read_beliefs(Path(run))):
                if beliefs.arbiter == arbiter:
                    return _NamedArbiter(arbiter, beliefs.fingerprint, None)
    loaded = load_arbiter(arbiter, plug_in=plug_in) if isinstance(arbiter, str) else arbiter
    folder = get_arbiter_folder(loaded)
    if folder is not None:
        check_unseen(table, folder, "arbiter")
    bound = loaded.bind(RunModelIdentity.from_table(table), table.settings["prompts_fingerprint"])
    return _NamedArbiter(bound.name, bound.fingerprint, bound)


def _complete_beliefs(
    run: Path, rows: Sequence[LabelRow], named: _NamedArbiter, on_progress: ProgressCallback
) -> RecordedBeliefs:
    """Return how probably each answer of a label run is right.

    Recorded results are reused, missing ones are computed and written.

    Raises:
        BadInput: Beliefs are missing, but there is no arbiter to compute them: the user gave only its recorded name.
    """
    beliefs = _read_arbiter_beliefs(run, named)
    judged = beliefs.judged
    missing = [row for row in rows if row.open is not None and row.id not in judged]
    if not missing:
        return beliefs
    if named.arbiter is None:
        raise BadInput(f"'{run}' has no recorded results of arbiter '{named.name}'. Pass the arbiter's folder.")
    _check_rows(run, missing, named.arbiter)
    log.info("%s judges the answers to %d questions", named.name, len(missing))
    return _judge_rows(run, missing, named.arbiter, beliefs, on_progress)


def _read_arbiter_beliefs(run: Path, named: _NamedArbiter) -> RecordedBeliefs:
    """Read from a label run how probably each answer is right, according to an arbiter. Empty if not recorded."""
    for beliefs in read_beliefs(run):
        if (beliefs.arbiter, beliefs.fingerprint) == (named.name, named.fingerprint):
            return beliefs
    return RecordedBeliefs(named.name, named.fingerprint, closed={}, open={})


def _judge_rows(
    run: Path, rows: Sequence[LabelRow], arbiter: Arbiter, beliefs: RecordedBeliefs, on_progress: ProgressCallback
) -> RecordedBeliefs:
    """Ask an arbiter about rows, and write old and new beliefs to the label run."""
    try:
        for start in range(0, len(rows), BATCH_SIZE):
            batch = rows[start : start + BATCH_SIZE]
            beliefs = _add_beliefs(beliefs, batch, arbiter)
            on_progress(start + len(batch), len(rows))
    finally:  # an interrupted run keeps the finished batches
        if beliefs.judged:
            write_beliefs(run, beliefs)
    return beliefs


def _add_beliefs(recorded: RecordedBeliefs, rows: Sequence[LabelRow], arbiter: Arbiter) -> RecordedBeliefs:
    """Ask an arbiter about more rows, and return old and new results.

    If two answers agree, the arbiter is not asked.
    """
    computed = compute_beliefs(arbiter, [get_answer_pair(row) for row in rows])
    closed_book = dict(recorded.closed)
    open_book = dict(recorded.open)
    agreed = list(recorded.agreed)
    for row, belief in zip(rows, computed, strict=True):
        if belief is None:
            agreed.append(row.id)
        else:
            closed_book[row.id] = belief.closed
            open_book[row.id] = belief.open
    return RecordedBeliefs(recorded.arbiter, recorded.fingerprint, closed_book, open_book, tuple(agreed))


def _check_rows(run: Path, rows: Sequence[LabelRow], arbiter: Arbiter) -> None:
    """Raise an error if no row has the data for this arbiter."""
    if not any(row.question for row in rows):
        raise BadSetting(
            f"the label run (recorded answers) in '{run}' was packed without texts. Arbiter '{arbiter.name}' must read "
            "questions and answers. Use the original label run, or one with the probabilities of this arbiter."
        )
    missing = _find_missing_signal(rows, arbiter)
    if missing:
        raise UnsupportedSignal(
            f"arbiter '{arbiter.name}' needs {missing}, but the recorded answers in '{run}' have none. Run `knowgate label` "
            f"again with {missing}, or fit the arbiter without them.",
            brief=f"the recorded answers have no {missing}",
        )


def _find_missing_signal(rows: Sequence[LabelRow], arbiter: Arbiter) -> str:
    """Return what the arbiter needs and no row has: 'passages', 'log-probabilities' or ''."""
    if arbiter.needs_passages and not any(row.passages for row in rows):
        return "passages"
    answers = [answer for row in rows for answer in (row.closed, row.open) if answer is not None]
    if Signal.LOGPROBS in arbiter.needs and all(answer.tokens is None for answer in answers):
        return "log-probabilities"
    return ""
