"""`knowgate fit`: a group with a command for each gate that can be fitted, and one for rerankers.

A command's options are those all fits share and those the gate's fit function names; no gate is known here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from knowgate.cli.commands import CommandEntry, LazyGroup, create_command
from knowgate.cli.console import STDERR_CONSOLE, create_console
from knowgate.cli.options import SeedOption, format_command_line, parse_path
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.data.runs.folder import suggest_ask_options
from knowgate.errors import KnowgateError, UnknownName
from knowgate.gates import FITTED_GATES
from knowgate.gates.arbiters import FITTED_ARBITERS
from knowgate.gates.fitted_gate import describe_retrieval_rule
from knowgate.training.arbiter import fit_arbiter, load_arbiter_fit_function
from knowgate.training.fit_function import FitFunction, FitOption, FitProgress, read_fit_options, read_requirements
from knowgate.training.gate import fit, list_fittable_gates, load_fit_function
from knowgate.training.gate_artifact import majority_accuracy

if TYPE_CHECKING:
    from knowgate.gates.fitted_gate import FittedGate


def make_fit_parameter(option: FitOption, gate: str, *, unset: bool = False) -> inspect.Parameter:
    """An option of a fit function as typer reads it. Which values are allowed is checked by the library.

    unset: nothing is handed on where it is not given, so that the fit function's own default holds.
    """
    values = [str(value) for value in option.allowed]
    shown = typer.Option(
        help=option.help,
        metavar="|".join(values) or None,
        rich_help_panel=f"Options of {gate}",
        show_default=str(option.default) if unset and option.default is not None else True,
        autocompletion=(lambda incomplete: [value for value in values if value.startswith(incomplete)])
        if values
        else None,
    )
    kind: Any = option.kind | None if option.may_be_none or unset else option.kind
    keyword, default = inspect.Parameter.KEYWORD_ONLY, None if unset else option.default
    return inspect.Parameter(option.name, keyword, default=default, annotation=Annotated[kind, shown])


@dataclass
class FitProgressBar:
    """Shows how far a fit is. said: what its milestones were called ('epoch 0.5'), told as they were reached."""

    show: ProgressCallback
    said: set[str] = field(default_factory=set)

    def __call__(self, step: FitProgress) -> None:
        self.show(step.done, step.total, step.words, stage=step.stage, unit=step.unit)
        if step.is_milestone:
            self.show.say(step.words)
            self.said.add(step.words.partition(",")[0])

    def untold(self, notes: Iterable[str]) -> list[str]:
        """The notes without those on milestones that were seen already."""
        return [note for note in notes if note.partition(":")[0] not in self.said]


def format_estimate(estimate: Mapping[str, float | None]) -> str:
    if estimate["value"] is None:
        return "not defined"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def format_split(split: Mapping[str, int]) -> str:
    """How many questions each part has: '181 train, 40 test'."""
    return ", ".join(f"{n} {part}" for part, n in split.items())


ARBITER, RERANKER, GATES_PANEL = "arbiter", "reranker", "Gates, and when they retrieve"
RENAMED_OPTIONS = {"--rate": "--learning-rate"}
RENAMED_GATE_OPTIONS = {"uar": {"--base": "--model"}}
MIN_QUESTIONS, MIN_TEST_QUESTIONS = 300, 50
SHARED_OPTIONS = ("labels", "out", "target", "threshold", "max_loss", "balance_sets", "no_questions", "seed")

FitLabels = Annotated[
    list[Path] | None,
    typer.Option("--labels", parser=parse_path, metavar="RUN", help="Label run to learn from; may be repeated."),
]
FitOut = Annotated[
    Path,
    typer.Option("--out", parser=parse_path, metavar="DIR", help="Folder of the fitted gate; use it as --gate DIR."),
]
FitTarget = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="TARGET",
        help="known, benefit (retrieval helps) or agree (of both answers; no gold). Default: what suits gate and runs.",
    ),
]
FitThreshold = Annotated[
    float | None,
    typer.Option(
        "--threshold",
        metavar="0..1",
        min=0,
        max=1,
        help="Retrieve when need is above this. Default: 0.5; for benefit by --max-loss.",
    ),
]
FitMaxLoss = Annotated[
    float | None,
    typer.Option(
        "--max-loss",
        metavar="0..1",
        show_default="0.01",
        help="For benefit: accuracy lost, at most.",
    ),
]
FitBalance = Annotated[
    bool,
    typer.Option("--balance-sets", help="Label runs of different size count the same. For gates without a judge."),
]

FitNoQuestions = Annotated[
    bool,
    typer.Option("--no-questions", help="Keep no questions in it, by which a server's hidden states are checked."),
]


@dataclass(frozen=True)
class FitGateCommand(CommandEntry):
    """A gate's line in the group: the command is made from the signature of its fit function."""

    def describe(self, name: str) -> str:
        """The table's words; a gate of another package is loaded for its own, and one that cannot be says why."""
        if name in FITTED_GATES:
            return FITTED_GATES[name].summary
        try:
            return (inspect.getdoc(load_fit_function(name)) or "a gate of another package").splitlines()[0]
        except KnowgateError as error:
            return str(error)

    def load(self, name: str) -> Any:
        command = create_command(
            name, make_gate_command(name), {**RENAMED_OPTIONS, **RENAMED_GATE_OPTIONS.get(name, {})}
        )
        command.suggest_elsewhere = suggest_owning_gates
        return command


def suggest_owning_gates(option: str) -> str:
    """Whose option it is, for who gives it to another gate."""
    name = option.lstrip("-").removeprefix("no-").replace("-", "_")
    owners = [gate for gate in FITTED_GATES if name in read_fit_options(load_fit_function(gate))]
    return f" It is an option of: {', '.join(owners)}." if owners else ""


@dataclass(frozen=True)
class FitArbiterCommand(CommandEntry):
    """The line of the arbiter: its command has the options of every mode."""

    def load(self, name: str) -> Any:
        pass

        return create_command(name, make_arbiter_command(), RENAMED_OPTIONS)


class FitGroup(LazyGroup):
    """The gates of the table, those of other packages, the arbiter and the reranker."""

    def get_entries(self) -> Mapping[str, CommandEntry]:
        gates: dict[str, CommandEntry] = {name: FitGateCommand("", "", GATES_PANEL) for name in list_fittable_gates()}
        reranker = CommandEntry(
            "knowgate.cli.fit_reranker:fit_reranker_command",
            "which passages the LLM can use",
            "Rerankers",
            RENAMED_OPTIONS,
        )
        return {
            **gates,
            ARBITER: FitArbiterCommand("", "which of two answers is given after retrieval", "Arbiters"),
            RERANKER: reranker,
        }

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.commands and not cmd_name.startswith("-") and not ctx.resilient_parsing:
            raise UnknownName("fitted gate", cmd_name, self.commands)
        return self.commands.get(cmd_name)


app = typer.Typer(
    cls=FitGroup,
    no_args_is_help=True,
    help="Fit a gate to your LLM: splits, training, calibration, measures on held-out questions, a card."
    "\n\nEach has its own options: knowgate fit probe --help",
)


def make_gate_command(name: str) -> Callable[..., None]:
    """The function behind `knowgate fit NAME`, with the options of that gate."""
    function = load_fit_function(name)
    own = read_fit_options(function)

    def command(**given: Any) -> None:
        shared = {key: given.pop(key) for key in SHARED_OPTIONS if key in given}
        fit_and_print(name, shared, given)

    shared = [each for each in inspect.signature(_shared, eval_str=True).parameters.values() if _has(function, each)]
    parameters = [*shared, *(make_fit_parameter(option, name) for option in own.values())]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    example = f"Example: knowgate fit {name} --labels RUN --out my-{name}"
    command.__doc__ = f"{inspect.getdoc(function) or f'Fit {name}.'}".split("\n\n")[0] + f"\n\n{example}"
    return command


def _has(function: FitFunction, parameter: inspect.Parameter) -> bool:
    """A gate that only learns what the LLM knows has no --max-loss, one that reads no states nothing to compare."""
    wanted = read_requirements(function)
    lacking = {"max_loss": wanted.target == "known", "no_questions": not wanted.reads_states}
    return not lacking.get(parameter.name, False)


def _shared(
    labels: FitLabels = None,
    *,
    out: FitOut,
    target: FitTarget = None,
    threshold: FitThreshold = None,
    max_loss: FitMaxLoss = None,
    balance_sets: FitBalance = False,
    no_questions: FitNoQuestions = False,
    seed: SeedOption = 0,
) -> None:
    """The options of every fit."""


def fit_and_print(name: str, shared: dict[str, Any], options: dict[str, Any]) -> None:
    """Fit, and say what came out and what a reader of the measures should know."""
    out, labels = shared.pop("out"), shared.pop("labels") or []
    shared["keep_questions"] = not shared.pop("no_questions", False)
    with show_progress(f"fitting {name}", "examples", STDERR_CONSOLE) as show:
        watching = FitProgressBar(show)
        gate = fit(name, labels, out=out, command=format_command_line(), watch=watching, **shared, **options)
    made = gate.artifact.manifest
    for note in watching.untold(made["notes"]):
        STDERR_CONSOLE.print(note)
    table = Table("measure", "test split", box=None)
    for measure, estimate in made["metrics"].items():
        table.add_row(measure, format_estimate(estimate))
        if measure == "accuracy":
            table.add_row("(majority)", f"{majority_accuracy(made):.3f}")
    console = create_console(soft_wrap=False)
    console.print(table)
    if "sets" in made:
        console.print(_by_set(made["sets"]))
    STDERR_CONSOLE.print(f"{name} fitted on '{made['target']}': {format_split(made['split'])}.")
    STDERR_CONSOLE.print(_decides(gate))
    _warn(gate)
    STDERR_CONSOLE.print(f"Use it: knowgate ask --gate {out}{suggest_ask_options(made['model']['name'])}")


def _by_set(sets: Mapping[str, Mapping[str, Any]]) -> Table:
    """How it does on the part of each label run; a pooled number hides a set it fails on."""
    table = Table("label run", "test questions", "AUROC", box=None)
    for name, one in sets.items():
        table.add_row(name, str(one["n"]), format_estimate(one["auroc"]))
    return table


def _decides(gate: FittedGate) -> Text:
    """What the gate will do, and whether it learnt anything."""
    made = gate.artifact.manifest
    words, low = Text(f"It retrieves {describe_retrieval_rule(made['threshold'])}."), made["metrics"]["auroc"]["low"]
    if low is not None and low <= 0.5:
        other = "known" if made["target"] == "benefit" else "benefit"
        only = (
            made["target"] == "agree" or read_requirements(load_fit_function(gate.name)).target == "benefit"
        )  # no other is there
        advice = "label more questions." if only else f"label more questions, or try --target {other}."
        words.append(f" On the held-out questions it is not better than chance: {advice}", style="yellow")
    return words


def _warn(gate: FittedGate) -> None:
    tested = gate.artifact.manifest["split"]["test"]
    if tested < MIN_TEST_QUESTIONS:
        STDERR_CONSOLE.print(
            f"Only {tested} questions were held out to measure on: intervals are wide and calibration is "
            f"rough. Label some {MIN_QUESTIONS * 2} questions or more.",
            style="yellow",
        )


ARBITER_HELP = """Fit an arbiter: it chooses, after retrieval, between the answer from memory and the one with passages.

    Example: knowgate fit arbiter --labels RUN --out my-arbiter"""
ARBITER_MODES = "|".join(FITTED_ARBITERS)
SHARED_ARBITER_OPTIONS = ("labels", "out", "mode", "seed")


def _fit_arbiter_shared(
    labels: Annotated[
        list[Path] | None,
        typer.Option(
            "--labels", parser=parse_path, metavar="RUN", help="Label run with both answers; may be repeated."
        ),
    ] = None,
    *,
    out: Annotated[
        Path,
        typer.Option("--out", parser=parse_path, metavar="DIR", help="Folder of the arbiter; use it as --arbiter DIR."),
    ],
    mode: Annotated[
        str, typer.Option(metavar=ARBITER_MODES, help="What it goes by; see the options of each.")
    ] = "features",
    seed: SeedOption = 0,
) -> None:
    """The options of every mode."""


def make_arbiter_command() -> Callable[..., None]:
    """The function behind `knowgate fit arbiter`, with the options of every mode; None: the mode's own default."""
    own: dict[str, list[FitOption]] = {}
    for mode in FITTED_ARBITERS:
        for name, option in read_fit_options(load_arbiter_fit_function(mode)).items():
            own.setdefault(name, []).append(option)

    def command(**given: Any) -> None:
        shared = {key: given.pop(key) for key in SHARED_ARBITER_OPTIONS}
        fit_arbiter_and_print(shared, {name: value for name, value in given.items() if value is not None})

    shared = inspect.signature(_fit_arbiter_shared, eval_str=True).parameters.values()
    parameters = [*shared, *(make_fit_parameter(options[0], "the modes", unset=True) for options in own.values())]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__doc__ = ARBITER_HELP
    return command


def fit_arbiter_and_print(shared: dict[str, Any], options: Mapping[str, Any]) -> None:
    """Fit, and say what came out."""
    out, labels, mode = shared.pop("out"), shared.pop("labels") or [], shared.pop("mode")
    with show_progress("fitting an arbiter", "examples", STDERR_CONSOLE) as show:
        watching = FitProgressBar(show)
        arbiter = fit_arbiter(
            labels, out=out, mode=mode, command=format_command_line(), watch=watching, **shared, **options
        )
    made = arbiter.artifact.manifest
    for note in watching.untold(made["notes"]):
        STDERR_CONSOLE.print(note)
    table = Table("measure", "test split", box=None)
    for measure, one in made["metrics"].items():
        table.add_row(measure.replace("_", " "), format_estimate(one))
    create_console(soft_wrap=False).print(table)
    STDERR_CONSOLE.print(f"{mode} arbiter fitted: {format_split(made['split'])}. Use it: knowgate ask --arbiter {out}")
    gain = made["metrics"].get("gain")
    if gain and gain["low"] is not None and gain["low"] <= 0:
        STDERR_CONSOLE.print(
            "On the held-out questions it is not shown to gain anything over always giving the answer with passages: "
            "label more questions, or do with --arbiter rules.",
            style="yellow",
        )
