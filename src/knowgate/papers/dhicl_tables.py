"""The tables of DH-ICL (Lv et al.: 1, 4, 5, 6, Figure 6): accuracy (retrieval rate) of its variants on label runs.

Each variant decides with the LLM at hand and is put on record in the run, so that the tables can be made again without
it. The three signs come from one pass. Knows gates and trials; not how tables are shown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np

from knowgate.core.display import MISSING_VALUE, TextTable, format_percent
from knowgate.data.history import open_history
from knowgate.data.runs.records import RecordedNeeds, write_needs
from knowgate.data.runs.table import LabelTable, load_label_table
from knowgate.errors import BadInput, BadSetting
from knowgate.gates.dhicl import DhiclGate
from knowgate.gates.offline_scoring import TableScores, score_gate
from knowgate.gates.prompt import PromptGate
from knowgate.gates.scoring import bind_gate, read_questions, score_questions
from knowgate.labels.history_entries import scope_from_settings
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.papers.sweeps import format_auroc
from knowgate.types import Gate, Model

log = logging.getLogger(__name__)
EXAMPLE_COUNTS = (5, 10, 20, 30, 40, 50, 60, 70)  # Figure 6
LABEL_WORD_PAIRS = (
    "true/false",
    "false/true",
    "yes/no",
    "bar/foo",
    "foo/bar",
    "1/2",
    "2/1",
    "ile/ore",
    "ore/ile",
)  # Table 6
DECISION_BATCH = 32
DIRECT_GATE = "prompt"  # no history at all: the LLM is asked outright


@dataclass(frozen=True)
class DhiclVariants:
    """Which variants there are. k: examples of all but those that vary their number."""

    history: str
    k: int = 20
    counts: Sequence[int] = EXAMPLE_COUNTS
    words: Sequence[str] = LABEL_WORD_PAIRS
    embedder: str | None = None

    @property
    def plain(self) -> DhiclGate:
        return DhiclGate(self.history, k=self.k, embedder=self.embedder)

    def tables(self) -> dict[str, dict[str, DhiclGate | None]]:
        """Titles, with what stands in each table; None for the gate without history."""
        plain = self.plain
        ablated: list[DhiclGate] = [
            replace(plain, sign="none"), replace(plain, sign="code"), replace(plain, time_sensitive=False)
        ]  # fmt: skip
        return {
            "Ablations (Table 4)": {**self._named([plain, *ablated]), DIRECT_GATE: None},
            "Cold start (Table 5)": self._named([plain, replace(plain, cold=True)]),
            "Number of examples (Figure 6)": self._named(replace(plain, k=count) for count in self.counts),
            "Label words (Table 6)": self._named(replace(plain, words=pair) for pair in self.words),
        }

    def all(self) -> dict[str, DhiclGate | None]:
        return {name: gate for table in self.tables().values() for name, gate in table.items()}

    def _named(self, gates: Iterable[DhiclGate]) -> dict[str, DhiclGate | None]:
        return {self.name(gate): gate for gate in gates}

    def name(self, gate: DhiclGate) -> str:
        """By what it is not like the plain gate with 20 examples."""
        usual = DhiclGate(self.history, embedder=self.embedder)
        shown = [field.name for field in fields(gate) if field.name not in ("history", "embedder", "tenant", "scope")]
        own = [(name, getattr(gate, name)) for name in shown if getattr(gate, name) != getattr(usual, name)]
        options = ",".join(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in own)
        return f"dhicl:{options}" if options else "dhicl"


def build_dhicl_tables(
    runs: Sequence[Path],
    variants: DhiclVariants,
    *,
    model: Model | None = None,
    prompts: AnswerPrompts | None = None,
    others: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> list[TextTable]:
    """All tables, a column for each run. model: decides now; None reads what is on record. others: gates beside it."""
    trials = {run.name: _decided(run, variants, model, prompts or AnswerPrompts(), say) for run in runs}
    scored = {
        name: {one: score_gate(trial, one) for one in variants.all() if one in trial.recorded_needs}
        for name, trial in trials.items()
    }
    beside = {name: {one: score_gate(trial, one) for one in others} for name, trial in trials.items()}
    names = [*dict.fromkeys(others), variants.name(variants.plain)]
    main = {name: {**beside[name], **scored[name]} for name in trials}
    sheets = [_sheet("Accuracy (retrieval rate) (Table 1)", trials, main, names)]
    for title, members in variants.tables().items():
        sheets.append(_sheet(title, trials, scored, list(members)))
    return sheets


def _decided(
    run: Path, variants: DhiclVariants, model: Model | None, prompts: AnswerPrompts, say: Callable[[str], None]
) -> LabelTable:
    trial = load_label_table([run])
    if model is not None:
        _check_same(trial, model, prompts)
        _decide_all(run, trial, variants, model, prompts, say)
        trial = load_label_table([run])
    plain = variants.name(variants.plain)
    if plain not in trial.recorded_needs:
        raise BadInput(
            f"{run} has no needs of {plain} on record. Let the LLM decide: --model {trial.settings['model']}"
        )
    return trial


def _check_same(trial: LabelTable, model: Model, prompts: AnswerPrompts) -> None:
    scope = scope_from_settings(trial.settings)
    if (scope.model, scope.prompts) != (model.fingerprint, prompts.fingerprint):
        raise BadSetting(
            f"the run was made by {trial.settings['model']} ({scope.model}, prompts {scope.prompts}), "
            f"not by {model.name} ({model.fingerprint}, prompts {prompts.fingerprint})."
        )


def _decide_all(
    run: Path,
    trial: LabelTable,
    variants: DhiclVariants,
    model: Model,
    prompts: AnswerPrompts,
    say: Callable[[str], None],
) -> None:
    """What is on record for a log of this size stays; variants that differ by their sign alone share a pass."""
    entries = open_history(variants.history, variants.embedder).count(scope_from_settings(trial.settings))
    about = f"log of {entries} questions" + (f", {variants.embedder}" if variants.embedder else "")
    there = {name for name, said in trial.recorded_needs.items() if said.about == about}
    groups: dict[Gate, dict[str, Gate]] = {}
    for name, gate in variants.all().items():
        pass_of: Gate = PromptGate() if gate is None else replace(gate, sign="none")
        groups.setdefault(pass_of, {})[name] = PromptGate() if gate is None else gate
    for pass_of, members in groups.items():
        if not set(members) <= there:
            say(f"{run.name}: {', '.join(members)}")
            try:
                write_needs(run, _needs(trial, pass_of, members, model, prompts, about))
            except BadSetting as error:  # label words that this tokenizer cannot tell apart, say
                say(f"left out: {error}")


def _needs(
    trial: LabelTable, pass_of: Gate, members: Mapping[str, Gate], model: Model, prompts: AnswerPrompts, about: str
) -> list[RecordedNeeds]:
    bound = bind_gate(pass_of, model, prompts)
    found: dict[str, dict[str, float]] = {name: {} for name in members}
    for first in range(0, len(trial.questions), DECISION_BATCH):
        part = trial.questions[first : first + DECISION_BATCH]
        readings = read_questions(model, [bound], part, prompts)
        for name, gate in members.items():
            needs = score_questions(gate, part, readings)
            found[name] |= {question.id: need for question, need in zip(part, needs, strict=True)}
    return [RecordedNeeds(name, gate.threshold, found[name], about) for name, gate in members.items()]


def _sheet(
    title: str, trials: Mapping[str, LabelTable], scored: Mapping[str, Mapping[str, TableScores]], names: Sequence[str]
) -> TextTable:
    """A line for each gate below never and always; for each run accuracy (retrieval rate), matched random, AUROC."""
    columns = ("gate", *(column for run in trials for column in (run, "random", "AUROC")))
    rows = [(name, *(cell for run in trials for cell in _line_end(trials[run], name))) for name in ("never", "always")]
    rows += [(name, *(cell for run in trials for cell in _cells(trials[run], scored[run].get(name)))) for name in names]
    return TextTable(title, columns, tuple(rows))


def _line_end(trial: LabelTable, name: str) -> tuple[str, str, str]:
    needs = np.full(len(trial.rows), float(name == "always"))
    return (*_cells(trial, TableScores(name, needs, 0.5))[:2], MISSING_VALUE)


def _cells(trial: LabelTable, gate: TableScores | None) -> tuple[str, str, str]:
    """Accuracy (retrieval rate), matched random, AUROC; only the rate where there are no answers with passages."""
    if gate is None:
        return (MISSING_VALUE, MISSING_VALUE, MISSING_VALUE)
    retrieve = gate.needs > gate.threshold
    rate, ranks = float(retrieve.mean()), format_auroc(trial, gate)
    if trial.open_right is None:
        return (f"{MISSING_VALUE} ({format_percent(rate)})", MISSING_VALUE, ranks)
    closed, opened = trial.closed_right, trial.open_right
    accuracy = float(np.where(retrieve, opened, closed).mean())
    random = rate * float(opened.mean()) + (1 - rate) * float(closed.mean())
    return (f"{format_percent(accuracy)} ({format_percent(rate)})", format_percent(random), ranks)
