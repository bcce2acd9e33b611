"""`first_run`: from a folder of documents to a gate that is proven, or the word that none is. What `knowgate start`
calls; prints nothing.

Index, questions, labels, gate, report, settings: each step is the library's own, and none is done twice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from knowgate.errors import BadInput, BadSetting
from knowgate.evaluation import Assumed, Evaluation, Promised, evaluate
from knowgate.files import alone
from knowgate.firstrun.asked import Asked, read_asked, unlisted, write_asked
from knowgate.firstrun.choosing import EVERY, Choice, Chooser
from knowgate.firstrun.config import config_hash, write_config
from knowgate.firstrun.labelling import Labelled, check_answered, label_parts
from knowgate.firstrun.progress_file import INDEX, open_progress
from knowgate.firstrun.telling import Silent, Teller
from knowgate.firstrun.wishes import Wishes
from knowgate.gates import at_threshold, load_gate
from knowgate.models import as_model
from knowgate.report import verdict, write_report
from knowgate.retrieval import as_retriever, build_index
from knowgate.runs import RunFolder, cautions
from knowgate.servers import without_secrets
from knowgate.types import Gate, Model, Retriever

UNITS = {"read": "documents"}  # the other stages go through passages


@dataclass(frozen=True)
class FirstRun:
    """What came out. example: a question that was asked. cautions: what must be said beside every figure.

    has_more: questions that were not labelled may be had from the same place.
    """

    choice: Choice
    page: Path
    config: Path
    example: str
    verdict: str
    cautions: tuple[str, ...] = ()
    has_more: bool = False


def first_run(wishes: Wishes, tell: Teller | None = None, *, model: Model | None = None) -> FirstRun:
    """Do what is not done yet of a first run, and say what came out.

    Interrupted at any place, the same call goes on. model: instead of the one that the wishes name.
    """
    wishes.check()
    with alone(wishes.out.resolve()):
        return _Steps(wishes, tell or Silent(), model).run()


@dataclass
class _Steps:
    wishes: Wishes
    tell: Teller
    given: Model | None = None

    def run(self) -> FirstRun:
        """What may be wrong with the wishes is seen first."""
        self.progress = open_progress(self.wishes.out, self.wishes)
        with self.progress.noted():
            read = read_asked(self.wishes, self.tell) if self.wishes.questions else None
            index = self._index()
            retriever = as_retriever(index)
            model = self.given or self._loaded(self.wishes.model)
        asked = read or self._written(index, retriever, model)
        labelled = label_parts(asked, self.wishes.out, model, retriever, seed=self.wishes.seed, tell=self.tell)
        check_answered(labelled.runs("fit", "calibration", "test"))
        choice = self._choice(labelled, model)
        warnings = self._cautions(labelled)
        said = self._report(labelled, choice)
        config = self._config(choice, warnings)
        return FirstRun(choice, self._page, config, asked.questions[0].text, said, tuple(warnings), asked.has_more)

    # --- documents and questions ------------------------------------------------------------------

    def _index(self) -> str:
        """The folder of the index, or what was given instead of documents."""
        if not self.wishes.docs:
            return self.wishes.index
        place = self.wishes.out / INDEX
        try:
            report = build_index(self.wishes.docs, place, progress=self._show_index)
        except BadInput as error:
            raise BadInput(f"{error} Then: {self.wishes.command()}") from None
        self.tell.say(f"Documents: {report.documents}, in {report.passages} passages.")
        if report.problems:
            self.tell.warn(f"Of the documents {report.missed}")
        return str(place)

    def _show_index(self, stage: str, done: int, total: int) -> None:
        self.tell.show(f"indexing: {stage}", done, total, UNITS.get(stage, "passages"))

    def _written(self, index: str, retriever: Retriever, model: Model) -> Asked:
        if why := unlisted(index, self.wishes):
            raise BadSetting(why)
        writer = self._loaded(self.wishes.writer) if self.wishes.writer else model
        self.tell.say(f"No questions were given: {writer.name} writes some from the documents. They are synthetic.")
        return write_asked(self.wishes, index, str(retriever.fingerprint), writer, self.tell)

    def _loaded(self, spec: str) -> Model:
        """The first time, weights are unpacked for a minute or two: say what is waited for."""
        self.tell.say(f"Loading {without_secrets(spec)}.")
        return as_model(spec)

    # --- gate, report, settings -------------------------------------------------------------------

    @property
    def _page(self) -> Path:
        return self.wishes.out / "report" / "report.html"

    def _gates(self, made: dict[str, Any]) -> list[Path]:
        """Folders of gates that were made here."""
        named = [Path(one) for one in (made["choice"]["gate"], *made["choice"]["others"])]
        return [one for one in named if one.is_relative_to(self.wishes.out)]

    def _choice(self, labelled: Labelled, model: Model) -> Choice:
        def work() -> dict[str, Any]:
            chooser = Chooser(labelled, model, self.wishes.out, self.wishes.max_loss, self.tell)
            return {"choice": asdict(chooser.choose())}

        made = self.progress.step("gate", (labelled.key, self.wishes.max_loss, EVERY), work, self._gates)["choice"]
        return Choice(**{**made, "others": tuple(made["others"]), "said": tuple(made["said"])})

    def _cautions(self, labelled: Labelled) -> list[str]:
        runs = labelled.runs("fit", "calibration", "test")
        return cautions([row for run in runs for row in RunFolder(run).rows()])

    def _report(self, labelled: Labelled, choice: Choice) -> str:
        def work() -> dict[str, Any]:
            self.tell.say("Measuring on the questions kept back for that.")
            return {"verdict": write_first_report(labelled, choice, self._page.parent, self.wishes.max_loss)}

        made_from = (labelled.key, self.wishes.max_loss, choice.gate, choice.threshold)
        return str(self.progress.step("report", made_from, work, lambda made: [self._page])["verdict"])

    def _config(self, choice: Choice, warnings: list[str]) -> Path:
        before = self.progress.steps.get("settings", {}).get("hash", "")
        place = write_config(self.wishes, choice, warnings, before)
        if place == self.wishes.config:
            self.progress.steps["settings"] = {"hash": config_hash(place)}
            self.progress.save()
        else:
            self.tell.warn(f"{self.wishes.config} was not written by this first run and stays as it is.")
        return place


def write_first_report(labelled: Labelled, choice: Choice, out: Path, max_loss: float) -> str:
    """The page on the questions that had no say; the verdict in words. What the LLM knows, where gates cannot be
    compared."""
    runs = labelled.runs("test")
    gates: list[str | Gate] = [chosen_gate(choice), *(other for other in choice.others if Path(other).is_dir()), "auto"]
    try:
        evaluation: Evaluation = evaluate([gate for gate in gates if gate != EVERY], runs, drop_seen=True)
    except (BadInput, BadSetting) as error:
        write_report(runs, out)
        return f"Gates cannot be compared: {error}"
    evaluation = _with_promise(evaluation, choice, max_loss)
    write_report(evaluation, out, max_loss=max_loss)
    found = verdict(evaluation, Assumed(), max_loss)
    return f"{_counted(evaluation, choice)} {found.headline}"


def _with_promise(evaluation: Evaluation, choice: Choice, max_loss: float) -> Evaluation:
    """A plain gate keeps no guarantee; what was proven of it a moment ago, on other questions, is put beside it."""
    if choice.threshold is None:
        return evaluation
    proven = Promised(choice.proven, holds=True, loss=max_loss)
    return replace(evaluation, promises={**evaluation.promises, _called(choice): proven})


def _called(choice: Choice) -> str:
    return f"{choice.gate} (chosen)"


def _counted(evaluation: Evaluation, choice: Choice) -> str:
    """Right answers on these questions: with the gate that was chosen, with passages, without."""
    trial = evaluation.trial
    right = [f"{int(trial.always_right.sum())} looking up each", f"{int(trial.closed_right.sum())} from memory"]
    if choice.gate == EVERY:
        return f"of {len(trial.rows)} questions, answered right: {', '.join(right)}."
    gate = evaluation.gates[1 + [one.gate for one in evaluation.gates].index("always")]  # the first that was named
    skipped = f"with the gate, which skips {int((gate.needs <= gate.threshold).sum())} searches"
    return f"of {len(trial.rows)} questions, answered right: {int(gate.right.sum())} {skipped}; {', '.join(right)}."


def chosen_gate(choice: Choice) -> str | Gate:
    """As it will decide."""
    if choice.threshold is None:
        return choice.gate
    return at_threshold(load_gate(choice.gate), choice.threshold, _called(choice))


def explain_interruption(wishes: Wishes) -> str:
    """What to type after Ctrl-C, or after an error that was mended."""
    return f"What is done is safe in {wishes.out}; the same command goes on: {wishes.command()}"
