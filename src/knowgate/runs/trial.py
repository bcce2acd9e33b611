"""Label runs read back: graded questions of one model, answered both ways, with everything gates saw then.

This is the one reader of label runs for whoever measures, fits or calibrates. Reports over rows as they are, failed
ones included, go through `RunFolder.rows`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.errors import BadInput
from knowgate.files import sha256_text
from knowgate.runs.aligned import aligned_needs, some_needs
from knowgate.runs.caveats import tell_mixed
from knowgate.runs.columns import Columns, fill
from knowgate.runs.gathering import PART, Gathered
from knowgate.runs.needs import RecordedNeeds, shared_needs
from knowgate.runs.run_folder import RunFolder
from knowgate.runs.slices import FREQUENCY, frequency_thirds
from knowgate.runs.stored import PackedTexts, StoredReadings, StoredRows
from knowgate.runs.together import check_together, names_of
from knowgate.statistics import Bools, Floats

log = logging.getLogger(__name__)
USUAL_ROUNDS = 3.0
HELD = 20_000  # rows in memory, some 0.5 GB; an evaluation leaves more of them on disk
ONE_MODEL = "evaluate one model at a time"
TO_EVALUATE = {
    "model_fingerprint": ONE_MODEL,
    "prompts_fingerprint": ONE_MODEL,
    "reranker_fingerprint": "evaluate them one at a time, or side by side: knowgate sweep beta",
}


@dataclass(frozen=True)
class Trial(Columns):
    """Graded questions of one model under one wording.

    keys: a name for each row over all runs. settings: what the runs share. recorded: needs on record, by gate.
    left_out: how many rows are not used, by reason.
    """

    settings: dict[str, Any]
    runs: list[str] = field(default_factory=list)
    recorded: Mapping[str, RecordedNeeds] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def is_held(self) -> bool:
        """Whether the rows are in memory; else they are read anew whenever somebody looks at them (see `stored`)."""
        return not isinstance(self.rows, StoredRows)

    @property
    def open_right(self) -> Bools | None:
        """Whether the answer with passages is right; None where no row has one.

        Where nothing was found, the pipeline answers closed-book.
        """
        return self.final_right if self.opened.any() else None

    @property
    def always_right(self) -> Bools:
        """What always retrieving comes to: without any open-book answer, the closed-book ones."""
        return self.closed_right if self.open_right is None else self.open_right

    @property
    def iterative_right(self) -> Bools | None:
        """Whether the answer after several rounds of retrieval is right; None where not every opened row has one."""
        if not self.opened.any() or (self.opened & ~self.iterated).any():
            return None
        return self.iterated_right

    @property
    def rounds(self) -> float:
        """Rounds of retrieval an iterative answer took, on average; 3 where that is not on record."""
        counted = self.rounds_taken[self.rounds_taken > 0]
        return float(np.mean(counted)) if len(counted) else USUAL_ROUNDS

    @property
    def unopened(self) -> int:
        """Rows whose retrieval found nothing, among others: they are answered closed-book either way."""
        return 0 if self.open_right is None else int((~self.opened).sum())

    def open_tokens(self) -> Floats:
        return self.open_lengths

    def closed_tokens(self) -> Floats:
        return self.closed_lengths

    def part_of(self, dimension: str) -> NDArray[np.object_]:
        """The part each row belongs to along a dimension, by name; None where its data set does not say."""
        if dimension == FREQUENCY:
            known = [None if count < 0 else count for count in self.frequencies.tolist()]
            return np.array(frequency_thirds(known), dtype=object)
        names = {kind: dict(kind).get(dimension) for kind in set(self.kinds.tolist())}
        return np.array([names[kind] for kind in self.kinds.tolist()], dtype=object)

    # --- some of them ----------------------------------------------------------------------------

    def subset(self, numbers: Iterable[int]) -> Trial:
        """The rows of these numbers, in their order."""
        chosen = np.fromiter(numbers, dtype=np.int64)
        known = {name: column[chosen] for name, column in self.known.items()}
        return fill(replace(self, **self._some(chosen)), known)

    @property
    def has_lengths(self) -> bool:
        """Whether the rows tell how long answers were; grades without texts do not."""
        return bool(self.closed_tokens().any() or self.open_tokens().any())

    def _some(self, chosen: NDArray[np.int64]) -> dict[str, Any]:
        if not isinstance(self.rows, StoredRows):
            return {name: [getattr(self, name)[number] for number in chosen] for name in ("rows", "keys", "readings")}
        if len(chosen) > HELD:
            some = {name: getattr(self, name).some(chosen) for name in ("rows", "keys", "readings")}
            recorded = {gate: some_needs(item, chosen, some["keys"]) for gate, item in self.recorded.items()}
            return {**some, "recorded": recorded}
        rows = list(self.rows.taken(chosen))
        assert isinstance(self.keys, PackedTexts)
        assert isinstance(self.readings, StoredReadings)
        return {"rows": rows, "keys": list(self.keys.taken(chosen)), "readings": self.readings.of(chosen, rows)}

    def parts(self) -> Iterator[Trial]:
        """The trial in pieces whose rows are in memory: itself where they are."""
        if self.is_held:
            yield self
            return
        for start in range(0, len(self.rows), PART):
            yield self.subset(range(start, min(start + PART, len(self.rows))))

    def but(self, **changes: Any) -> Trial:
        """The same rows, with something else about them."""
        return fill(replace(self, **changes), self.known)


def load_trial(
    runs: Sequence[Path],
    *,
    layers: Sequence[int] | None = None,
    same: Mapping[str, str] = TO_EVALUATE,
    graded: bool = True,
    held: int | None = None,
) -> Trial:
    """All graded rows of these runs; with graded=False all that are answered.

    layers: those whose hidden states are read; None for all that were kept. same: the settings that the runs must
    share, with what to do where they do not. held: leave rows on disk where there are more than this (see `stored`).
    """
    if not runs:
        raise BadInput("there is no label run to read: name at least one.")
    settings = [RunFolder(run).settings() for run in runs]
    check_together(runs, settings, same)
    names = names_of(runs)
    gathered = Gathered(names, graded, held)
    for number, run in enumerate(runs):
        before = gathered.seen
        gathered.add(number, RunFolder(run))
        tell_unfinished(run, gathered.seen - before, RunFolder(run).settings().get("questions"))
    if not len(gathered):
        lost = ", ".join(f"{count} {reason}" for reason, count in gathered.left_out.items() if count) or "no row at all"
        raise BadInput(
            f"there is no graded row in {', '.join(map(str, runs))}: {lost}. Label questions that have gold answers; "
            f"what is there is shown by: knowgate report {runs[0]}"
        )
    found = gathered.columns([RunFolder(run) for run in runs], layers)
    tell_mixed(int(found.synthetic.sum()), len(found.rows))
    if isinstance(found.rows, StoredRows):
        needs = aligned_needs(runs, names, found.keys, found.rows.run)
    else:
        needs = shared_needs(runs, names)
    about = (_shared(settings), [str(run) for run in runs], needs, gathered.left_out)
    return fill(Trial(found.rows, found.keys, found.readings, *about), found.known)


def tell_unfinished(run: Path, n_rows: int, wanted: object) -> None:
    """Say so where a run has rows for some of its questions only: its figures are those of a part."""
    if isinstance(wanted, int) and n_rows < wanted:
        words = "%s holds %d of %d questions: it was not finished. The same `knowgate label` goes on with it."
        log.warning(words, run, n_rows, wanted)


def _shared(settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Settings of all runs; the data are those of every run, so they have a fingerprint of their own."""
    data = sha256_text(*(str(one.get("data_fingerprint")) for one in settings))[:16]
    return {**settings[0], "data_fingerprint": data}
