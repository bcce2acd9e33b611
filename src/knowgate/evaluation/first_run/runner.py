"""`first_run`: from a folder of documents to a gate that is proven, or the word that none is. What `knowgate start`
calls; prints nothing.

Index, questions, labels, gate, report, settings: each step is the library's own, and none is done twice.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from knowgate.core.files import exclusive_writer, sha256_text, write_text
from knowgate.core.redaction import redact_urls
from knowgate.data.runs.caveats import list_caveats
from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation.cost import CostAssumptions
from knowgate.evaluation.first_run.gate_selection import (
    ALWAYS_RETRIEVE_GATE,
    NO_GUARANTEE_MESSAGE,
    GateChoice,
    GateSelector,
)
from knowgate.evaluation.first_run.labeling import LabeledParts, check_label_runs, label_parts
from knowgate.evaluation.first_run.options import (
    INDEX_FOLDER,
    FirstRunOptions,
    ProgressReporter,
    SilentReporter,
    open_progress,
)
from knowgate.evaluation.first_run.questions import (
    FirstRunQuestions,
    explain_unlisted_index,
    load_first_run_questions,
    write_first_run_questions,
)
from knowgate.evaluation.gate_comparison import Evaluation, GateGuarantee
from knowgate.evaluation.gate_evaluation import evaluate
from knowgate.evaluation.report.evaluation_verdict import build_verdict
from knowgate.evaluation.report.report_folder import write_report
from knowgate.gates import DEFAULT_GATE, PACKAGED_GATES, load_gate
from knowgate.gates.scoring import copy_with_threshold
from knowgate.models import resolve_model
from knowgate.pipeline.settings import load_settings
from knowgate.retrieval import as_retriever
from knowgate.retrieval.index import build_index
from knowgate.types import Gate, Model, Retriever

CONFIG_HEADER = "# Written by knowgate start"


def write_config(wishes: FirstRunOptions, choice: GateChoice, cautions: list[str], written_before: str) -> Path:
    """Where it was written: not over a file that somebody else wrote or changed (its hash is not `written_before`)."""
    text = render_config(wishes, choice, cautions)
    is_free = not wishes.config.exists() or _hash_of(wishes.config) == written_before
    place = wishes.config if is_free else wishes.out / "knowgate.toml"
    write_text(place, text)
    load_settings(place)  # what is not understood there is a fault of ours, and said at once
    return place


def _hash_of(file: Path) -> str:
    return sha256_text(file.read_text(encoding="utf-8", errors="replace"))


def hash_config(file: Path) -> str:
    return _hash_of(file)


def render_config(wishes: FirstRunOptions, choice: GateChoice, cautions: list[str]) -> str:
    """The file. A guarantee was shown without an arbiter, so none chooses after retrieval."""
    said = [choice.proven or NO_GUARANTEE_MESSAGE]
    said += [one for one in cautions if one.partition(":")[0] not in said[0]]
    source = ("docs", _place(wishes.docs)) if wishes.docs else ("index", wishes.index)
    values = [("model", wishes.model), source, ("gate", _gate(choice))]
    lines = [f"{CONFIG_HEADER}. `knowgate ask` reads it in this folder; flags override it.", *map(_comment, said)]
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values]
    lines += [f"threshold = {choice.threshold:g}"] if choice.threshold is not None else []
    lines += ['arbiter = "none"  # the guarantee was shown without one'] if choice.proven else []
    lines += [f"# to try: gate = {json.dumps(_gate_path(other))}" for other in choice.others if not choice.proven]
    return "\n".join(lines) + "\n"


def _comment(words: str) -> str:
    return "# " + " ".join(words.split())


def _gate(choice: GateChoice) -> str:
    return _gate_path(choice.gate)


def _gate_path(gate: str) -> str:
    """A folder by its place, a spec as it is; a gate that comes with knowgate by a name that means it everywhere."""
    if Path(gate).resolve().parent == PACKAGED_GATES.resolve():
        return DEFAULT_GATE
    return _place(gate) if Path(gate).is_dir() else gate


def _place(path: str) -> str:
    """Below the folder it is used in, relative to it; else whole."""
    whole, here = Path(path).resolve(), Path.cwd().resolve()
    return str(whole.relative_to(here)) if whole.is_relative_to(here) and whole != here else str(whole)


STAGE_UNITS = {"read": "documents"}  # the other stages go through passages


@dataclass(frozen=True)
class FirstRunResult:
    """What came out. example: a question that was asked. cautions: what must be said beside every figure.

    has_more: questions that were not labelled may be had from the same place.
    """

    choice: GateChoice
    page: Path
    config: Path
    example: str
    verdict: str
    cautions: tuple[str, ...] = ()
    has_more: bool = False


def first_run(
    wishes: FirstRunOptions, tell: ProgressReporter | None = None, *, model: Model | None = None
) -> FirstRunResult:
    """Do what is not done yet of a first run, and say what came out.

    Interrupted at any place, the same call goes on. model: instead of the one that the wishes name.
    """
    wishes.check()
    with exclusive_writer(wishes.out.resolve()):
        return _Steps(wishes, tell or SilentReporter(), model).run()


@dataclass
class _Steps:
    wishes: FirstRunOptions
    tell: ProgressReporter
    given: Model | None = None

    def run(self) -> FirstRunResult:
        """What may be wrong with the wishes is seen first."""
        self.progress = open_progress(self.wishes.out, self.wishes)
        with self.progress.noted():
            read = load_first_run_questions(self.wishes, self.tell) if self.wishes.questions else None
            index = self._index()
            retriever = as_retriever(index)
            model = self.given or self._loaded(self.wishes.model)
        asked = read or self._written(index, retriever, model)
        labelled = label_parts(asked, self.wishes.out, model, retriever, seed=self.wishes.seed, tell=self.tell)
        check_label_runs(labelled.runs("fit", "calibration", "test"))
        choice = self._choice(labelled, model)
        warnings = self._cautions(labelled)
        said = self._report(labelled, choice)
        config = self._config(choice, warnings)
        return FirstRunResult(
            choice, self._page, config, asked.questions[0].text, said, tuple(warnings), asked.has_more
        )

    # --- documents and questions ------------------------------------------------------------------

    def _index(self) -> str:
        """The folder of the index, or what was given instead of documents."""
        if not self.wishes.docs:
            return self.wishes.index
        place = self.wishes.out / INDEX_FOLDER
        try:
            report = build_index(self.wishes.docs, place, progress=self._show_index)
        except BadInput as error:
            raise BadInput(f"{error} Then: {self.wishes.command()}") from None
        self.tell.say(f"Documents: {report.documents}, in {report.passages} passages.")
        if report.problems:
            self.tell.warn(f"Of the documents {report.summarize_problems()}")
        return str(place)

    def _show_index(self, stage: str, done: int, total: int) -> None:
        self.tell.show(f"indexing: {stage}", done, total, STAGE_UNITS.get(stage, "passages"))

    def _written(self, index: str, retriever: Retriever, model: Model) -> FirstRunQuestions:
        if why := explain_unlisted_index(index, self.wishes):
            raise BadSetting(why)
        writer = self._loaded(self.wishes.writer) if self.wishes.writer else model
        self.tell.say(f"No questions were given: {writer.name} writes some from the documents. They are synthetic.")
        return write_first_run_questions(self.wishes, index, str(retriever.fingerprint), writer, self.tell)

    def _loaded(self, spec: str) -> Model:
        """The first time, weights are unpacked for a minute or two: say what is waited for."""
        self.tell.say(f"Loading {redact_urls(spec)}.")
        return resolve_model(spec)

    # --- gate, report, settings -------------------------------------------------------------------

    @property
    def _page(self) -> Path:
        return self.wishes.out / "report" / "report.html"

    def _gates(self, made: dict[str, Any]) -> list[Path]:
        """Folders of gates that were made here."""
        named = [Path(one) for one in (made["choice"]["gate"], *made["choice"]["others"])]
        return [one for one in named if one.is_relative_to(self.wishes.out)]

    def _choice(self, labelled: LabeledParts, model: Model) -> GateChoice:
        def work() -> dict[str, Any]:
            chooser = GateSelector(labelled, model, self.wishes.out, self.wishes.max_loss, self.tell)
            return {"choice": asdict(chooser.choose())}

        made = self.progress.step(
            "gate", (labelled.key, self.wishes.max_loss, ALWAYS_RETRIEVE_GATE), work, self._gates
        )["choice"]
        return GateChoice(**{**made, "others": tuple(made["others"]), "said": tuple(made["said"])})

    def _cautions(self, labelled: LabeledParts) -> list[str]:
        runs = labelled.runs("fit", "calibration", "test")
        return list_caveats([row for run in runs for row in RunFolder(run).rows()])

    def _report(self, labelled: LabeledParts, choice: GateChoice) -> str:
        def work() -> dict[str, Any]:
            self.tell.say("Measuring on the questions kept back for that.")
            return {"verdict": write_first_report(labelled, choice, self._page.parent, self.wishes.max_loss)}

        made_from = (labelled.key, self.wishes.max_loss, choice.gate, choice.threshold)
        return str(self.progress.step("report", made_from, work, lambda made: [self._page])["verdict"])

    def _config(self, choice: GateChoice, warnings: list[str]) -> Path:
        before = self.progress.steps.get("settings", {}).get("hash", "")
        place = write_config(self.wishes, choice, warnings, before)
        if place == self.wishes.config:
            self.progress.steps["settings"] = {"hash": hash_config(place)}
            self.progress.save()
        else:
            self.tell.warn(f"{self.wishes.config} was not written by this first run and stays as it is.")
        return place


def write_first_report(labelled: LabeledParts, choice: GateChoice, out: Path, max_loss: float) -> str:
    """The page on the questions that had no say; the verdict in words. What the LLM knows, where gates cannot be
    compared."""
    runs = labelled.runs("test")
    gates: list[str | Gate] = [
        load_chosen_gate(choice),
        *(other for other in choice.others if Path(other).is_dir()),
        "auto",
    ]
    try:
        evaluation: Evaluation = evaluate(
            [gate for gate in gates if gate != ALWAYS_RETRIEVE_GATE], runs, drop_seen=True
        )
    except (BadInput, BadSetting) as error:
        write_report(runs, out)
        return f"Gates cannot be compared: {error}"
    evaluation = _with_promise(evaluation, choice, max_loss)
    write_report(evaluation, out, max_loss=max_loss)
    found = build_verdict(evaluation, CostAssumptions(), max_loss)
    return f"{_counted(evaluation, choice)} {found.headline}"


def _with_promise(evaluation: Evaluation, choice: GateChoice, max_loss: float) -> Evaluation:
    """A plain gate keeps no guarantee; what was proven of it a moment ago, on other questions, is put beside it."""
    if choice.threshold is None:
        return evaluation
    proven = GateGuarantee(choice.proven, holds=True, loss=max_loss)
    return replace(evaluation, promises={**evaluation.promises, _called(choice): proven})


def _called(choice: GateChoice) -> str:
    return f"{choice.gate} (chosen)"


def _counted(evaluation: Evaluation, choice: GateChoice) -> str:
    """Right answers on these questions: with the gate that was chosen, with passages, without."""
    trial = evaluation.trial
    right = [f"{int(trial.always_right.sum())} looking up each", f"{int(trial.closed_right.sum())} from memory"]
    if choice.gate == ALWAYS_RETRIEVE_GATE:
        return f"of {len(trial.rows)} questions, answered right: {', '.join(right)}."
    gate = evaluation.gates[1 + [one.gate for one in evaluation.gates].index("always")]  # the first that was named
    skipped = f"with the gate, which skips {int((gate.needs <= gate.threshold).sum())} searches"
    return f"of {len(trial.rows)} questions, answered right: {int(gate.right.sum())} {skipped}; {', '.join(right)}."


def load_chosen_gate(choice: GateChoice) -> str | Gate:
    """As it will decide."""
    if choice.threshold is None:
        return choice.gate
    return copy_with_threshold(load_gate(choice.gate), choice.threshold, _called(choice))


def explain_interruption(wishes: FirstRunOptions) -> str:
    """What to type after Ctrl-C, or after an error that was mended."""
    return f"What is done is safe in {wishes.out}; the same command goes on: {wishes.command()}"
