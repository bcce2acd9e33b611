"""Run a first run: index, questions, labels, gate, report and settings. Finished steps are not repeated."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from knowgate.core.files import exclusive_writer, sha256_text, write_text
from knowgate.core.redaction import redact_urls
from knowgate.data.runs.columns import list_caveats
from knowgate.data.runs.folder import RunFolder
from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation.cost import CostAssumptions
from knowgate.evaluation.first_run import labeling
from knowgate.evaluation.first_run.gate_selection import (
    ALWAYS_RETRIEVE_GATE,
    NO_GUARANTEE_MESSAGE,
    GateChoice,
    GateSelector,
    fit_first_policy,
)
from knowgate.evaluation.first_run.options import INDEX_FOLDER, FirstRunOptions, ProgressReporter, open_progress
from knowgate.evaluation.first_run.questions import (
    FirstRunQuestions,
    check_index_is_listable,
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
from knowgate.types import Model, Retriever

STAGE_UNITS = {"read": "documents"}  # other stages of indexing count passages
CONFIG_HEADER = "# Written by knowgate start"


@dataclass(frozen=True)
class FirstRunResult:
    """Result of a first run (`knowgate start`): the gate, report and settings.

    Attributes:
        choice: The chosen gate.
        page: The HTML report.
        config: The settings file.
        example: One of the questions.
        verdict: What was measured on the test questions, in words.
        caveats: Warnings about the results, such as that the questions are synthetic.
        has_more: Whether there are more questions than were labeled.
    """

    choice: GateChoice
    page: Path
    config: Path
    example: str
    verdict: str
    caveats: tuple[str, ...] = ()
    has_more: bool = False


def first_run(
    options: FirstRunOptions, reporter: ProgressReporter | None = None, *, model: Model | None = None
) -> FirstRunResult:
    """Make a gate for an LLM and documents, with report and settings.

    After an interruption, the same call continues.

    Args:
        options: What to run on.
        reporter: Receives messages and progress.
        model: Use this model instead of the one that the options name.

    Raises:
        BadSetting: Options contradict each other.
        BadInput: Questions or documents cannot be used.
    """
    options.check()
    with exclusive_writer(options.out.resolve()):
        return _FirstRun(options, reporter or ProgressReporter(), model).run()


@dataclass
class _FirstRun:
    """Makes a gate for an LLM and documents. `run` shows the steps.

    Attributes:
        options: The LLM, documents and questions.
        reporter: Receives messages and progress.
        model: Model to use instead of the one that the options name.
    """

    options: FirstRunOptions
    reporter: ProgressReporter
    model: Model | None = None

    def run(self) -> FirstRunResult:
        """Label questions, choose a gate, measure it on test questions, and write report and settings."""
        options, reporter = self.options, self.reporter
        self.progress = open_progress(options.out, options)
        # Wrong options raise an error in this block, before any slow step. The progress file is then restored.
        with self.progress.record_options():
            loaded = load_first_run_questions(options, reporter) if options.questions else None
            n_questions = len(loaded.selected) if loaded else options.count
            labeling.report_plan(n_questions, options.max_loss, reporter)
            index = self._build_index()
            retriever = as_retriever(index)
            model = self.model or self._load_model(options.model)
        # Without questions from the user, the LLM writes some about the documents.
        questions = loaded or self._write_questions(index, retriever, model)
        labeled = self._label(questions, model, retriever)
        choice = self._select_gate(labeled, model)
        # Caveats are warnings about the results. The verdict says in words what the test questions show.
        caveats = list_caveats([row for run in labeled.runs() for row in RunFolder(run).rows()])
        verdict = self._write_report(labeled, choice)
        config = self._write_config(choice, caveats)
        example = questions.selected[0].text
        return FirstRunResult(choice, self._page, config, example, verdict, tuple(caveats), questions.has_more)

    @property
    def _page(self) -> Path:
        """The HTML report."""
        return self.options.out / "report" / "report.html"

    def _build_index(self) -> str:
        """Build or update the index of the documents, and return its folder. Without documents, return `index`."""
        if not self.options.docs:
            return self.options.index
        folder = self.options.out / INDEX_FOLDER

        def show(stage: str, done: int, total: int) -> None:
            self.reporter.show(f"indexing: {stage}", done, total, STAGE_UNITS.get(stage, "passages"))

        report = build_index(self.options.docs, folder, progress=show)
        self.reporter.say(f"Documents: {report.documents}, in {report.passages} passages.")
        if report.problems:
            self.reporter.warn(report.summarize_problems())
        return str(folder)

    def _write_questions(self, index: str, retriever: Retriever, model: Model) -> FirstRunQuestions:
        """Let an LLM write questions from the passages of the index."""
        check_index_is_listable(index)
        writer = self._load_model(self.options.writer) if self.options.writer else model
        self.reporter.say(f"No questions were given: {writer.name} writes some from the documents. They are synthetic.")
        return write_first_run_questions(self.options, index, str(retriever.fingerprint), writer, self.reporter)

    def _load_model(self, spec: str) -> Model:
        """Load a model and say so."""
        self.reporter.say(f"Loading {redact_urls(spec)}.")  # the first time, unpacking weights takes a minute or two
        return resolve_model(spec)

    def _label(self, questions: FirstRunQuestions, model: Model, retriever: Retriever) -> labeling.LabeledParts:
        """Record and grade the LLM's answers with and without passages. This is the slow step."""
        seed, reporter = self.options.seed, self.reporter
        folder = self.options.out / "labels" / labeling.name_label_folder(questions, model, retriever, seed)
        n_labeled = labeling.count_labeled(questions, folder)
        labeling.report_label_time(questions.selected, n_labeled, model, retriever, reporter)
        labeled = labeling.label_parts(questions, folder, model, retriever, seed, reporter)
        labeling.check_label_runs(labeled.runs())
        return labeled

    def _select_gate(self, labeled: labeling.LabeledParts, model: Model) -> GateChoice:
        """Fit a policy or, with too few questions, select a gate. A recorded choice for the same inputs is reused."""
        options = self.options

        def work() -> dict[str, Any]:
            policy = fit_first_policy(labeled, options, self.reporter)
            choice = policy or GateSelector(labeled, model, options.out, options.max_loss, self.reporter).select()
            return {"choice": choice.to_record()}

        inputs = (labeled.key, options.max_loss, ALWAYS_RETRIEVE_GATE)
        result = self.progress.run_step("gate", inputs, work, outputs=self._list_gate_folders)
        return GateChoice.from_record(result["choice"])

    def _list_gate_folders(self, result: dict[str, Any]) -> list[Path]:
        """List the folders of the gates that this run has written."""
        choice = GateChoice.from_record(result["choice"])
        gates = [Path(gate) for gate in (choice.gate, *choice.alternatives)]
        return [gate for gate in gates if gate.is_relative_to(self.options.out)]

    def _write_report(self, labeled: labeling.LabeledParts, choice: GateChoice) -> str:
        """Write the report on the test questions, unless it is there already, and return the verdict in words."""

        def work() -> dict[str, Any]:
            self.reporter.say("Measuring on the held-out questions.")
            return {"verdict": write_first_report(labeled, choice, self._page.parent, self.options.max_loss)}

        inputs = (labeled.key, self.options.max_loss, choice.gate, choice.threshold)
        return str(self.progress.run_step("report", inputs, work, outputs=lambda result: [self._page])["verdict"])

    def _write_config(self, choice: GateChoice, caveats: list[str]) -> Path:
        """Write the settings and return the path of their file.

        If the user wrote or changed that file, it stays as it is. The settings then go to the output folder.
        """
        config = self.options.config
        written_before = self.progress.steps.get("settings", {}).get("hash", "")
        may_overwrite = not config.exists() or hash_config(config) == written_before
        target = config if may_overwrite else self.options.out / "knowgate.toml"
        write_text(target, render_config(self.options, choice, caveats))
        load_settings(target)  # fails at once if we wrote something invalid
        if target == config:
            self.progress.steps["settings"] = {"hash": hash_config(target)}
            self.progress.save()
        else:
            self.reporter.warn(f"{config} was not written by this first run and stays as it is.")
        return target


# --- report ---------------------------------------------------------------------------------------


def write_first_report(labeled: labeling.LabeledParts, choice: GateChoice, out: Path, max_loss: float) -> str:
    """Evaluate the chosen gate on test questions, write the report, and return the verdict."""
    runs = labeled.runs("test")
    try:
        evaluation = _evaluate_choice(choice, runs, max_loss)
    except (BadInput, BadSetting) as error:
        write_report(runs, out)  # it only shows what the LLM knows
        return f"Gates cannot be compared: {error}"
    write_report(evaluation, out, max_loss=max_loss)
    verdict = build_verdict(evaluation, CostAssumptions(), max_loss)
    return f"{_describe_right_answers(evaluation, choice)} {verdict.headline}"


def _evaluate_choice(choice: GateChoice, runs: list[Path], max_loss: float) -> Evaluation:
    """Evaluate the chosen gate, the fitted gates that were not chosen, and all gates that need no fitting."""
    not_chosen = [gate for gate in choice.alternatives if Path(gate).is_dir()]
    others = [*not_chosen, "auto"]  # 'auto' stands for all gates that the recorded answers suffice for
    if choice.threshold is None:  # a fitted gate, whose folder stores its threshold and guarantee
        chosen = [choice.gate] if choice.gate != ALWAYS_RETRIEVE_GATE else []
        return evaluate([*chosen, *others], runs, drop_seen=True)
    name = f"{choice.gate} (chosen)"
    gate = copy_with_threshold(load_gate(choice.gate), choice.threshold, name)
    evaluation = evaluate([gate, *others], runs, drop_seen=True)
    guarantee = GateGuarantee(choice.guarantee, holds=True, max_loss=max_loss)
    return replace(evaluation, guarantees={**evaluation.guarantees, name: guarantee})


def _describe_right_answers(evaluation: Evaluation, choice: GateChoice) -> str:
    """Say how many answers are right: with the gate, always retrieving, and without passages."""
    table = evaluation.table
    always, never = int(table.retrieved_right.sum()), int(table.closed_book_right.sum())
    baselines = f"{always} with retrieval for each, {never} from memory"
    if choice.gate == ALWAYS_RETRIEVE_GATE:
        return f"of {len(table.rows)} questions, answered right: {baselines}."
    # The results begin with the gates `never` and `always`. The first gate after them is the chosen one.
    names = [result.gate for result in evaluation.gates]
    gate = evaluation.gates[names.index("always") + 1]
    n_skipped = int((gate.needs <= gate.threshold).sum())
    chosen = f"{int(gate.right.sum())} with the gate, which skips {n_skipped} searches"
    return f"of {len(table.rows)} questions, answered right: {chosen}; {baselines}."


# --- settings file --------------------------------------------------------------------------------


def hash_config(file: Path) -> str:
    """Hash the text of a settings file."""
    return sha256_text(file.read_text(encoding="utf-8", errors="replace"))


def render_config(options: FirstRunOptions, choice: GateChoice, caveats: list[str]) -> str:
    """Render the settings file as TOML text, with comments."""
    guarantee = choice.guarantee or NO_GUARANTEE_MESSAGE
    # A caveat begins with its subject and a colon. It is left out if the guarantee already mentions the subject.
    comments = [guarantee, *(caveat for caveat in caveats if caveat.partition(":")[0] not in guarantee)]
    source = ("docs", _shorten_path(options.docs)) if options.docs else ("index", options.index)
    values = [("model", options.model), source, ("gate", _name_gate(choice.gate))]
    lines = [f"{CONFIG_HEADER}. `knowgate ask` reads it in this folder; flags override it."]
    lines += ["# " + " ".join(comment.split()) for comment in comments]
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values]
    if choice.threshold is not None:
        lines.append(f"threshold = {choice.threshold:g}")
    if choice.is_policy:
        lines.append("# The gate is a policy: it contains its threshold and its arbiter.")
    elif choice.guarantee:
        lines.append('arbiter = "none"  # the guarantee was proven without one')
    else:
        lines += [f"# to try: gate = {json.dumps(_name_gate(gate))}" for gate in choice.alternatives]
    return "\n".join(lines) + "\n"


def _name_gate(gate: str) -> str:
    """Return the gate's name for the settings file: a path, a spec or `DEFAULT_GATE`."""
    if Path(gate).resolve().parent == PACKAGED_GATES.resolve():
        return DEFAULT_GATE
    return _shorten_path(gate) if Path(gate).is_dir() else gate


def _shorten_path(path: str) -> str:
    """Return a path relative to the current folder, or absolute if outside."""
    absolute, current = Path(path).resolve(), Path.cwd().resolve()
    is_inside = absolute.is_relative_to(current) and absolute != current
    return str(absolute.relative_to(current)) if is_inside else str(absolute)
