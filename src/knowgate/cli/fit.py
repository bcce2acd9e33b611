"""`knowgate fit`: a group with a command for each gate that can be fitted, one for arbiters and one for rerankers.

The flags of a command are those of `FitOptions` and the options that the gate's fit function declares.
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
from knowgate.cli.error_messages import translate_arguments
from knowgate.cli.option_flags import make_flags
from knowgate.cli.options import SeedOption, format_command_line, parse_path
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.data.runs.folder import suggest_ask_options
from knowgate.errors import KnowgateError, UnknownName
from knowgate.gates import FITTED_GATES
from knowgate.gates.arbiters import FITTED_ARBITERS
from knowgate.gates.fitted_gate import describe_retrieval_rule
from knowgate.training.arbiter import fit_arbiter, load_arbiter_fit_function
from knowgate.training.fit_function import FitOption, FitProgress, read_fit_options, read_requirements
from knowgate.training.gate import FitOptions, fit, list_fittable_gates, load_fit_function
from knowgate.training.gate_artifact import majority_accuracy

if TYPE_CHECKING:
    from knowgate.gates.fitted_gate import FittedGate

ARBITER, RERANKER, GATES_PANEL = "arbiter", "reranker", "Gates, and when they retrieve"
RENAMED_OPTIONS = {"--rate": "--learning-rate"}
RENAMED_GATE_OPTIONS = {"uar": {"--base": "--model"}}
RECOMMENDED_QUESTIONS, MIN_TEST_QUESTIONS = 600, 50
ARBITER_HELP = """Fit an arbiter: after retrieval it chooses between the closed-book and the open-book answer.

    Example: knowgate fit arbiter --labels RUN --out my-arbiter"""

Labels = Annotated[
    list[Path] | None,
    typer.Option("--labels", parser=parse_path, metavar="RUN", help="Label run; may be repeated."),
]
GateFolder = Annotated[
    Path,
    typer.Option("--out", parser=parse_path, metavar="DIR", help="Folder of the fitted gate; use it as --gate DIR."),
]
ArbiterFolder = Annotated[
    Path,
    typer.Option("--out", parser=parse_path, metavar="DIR", help="Folder of the arbiter; use it as --arbiter DIR."),
]
ArbiterMode = Annotated[
    str, typer.Option("--mode", metavar="|".join(FITTED_ARBITERS), help="What it uses; see the options of each.")
]


# --- the group ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FitGateCommand(CommandEntry):
    """The command of one gate, made from the signature of its fit function."""

    def describe(self, name: str) -> str:
        """Return the gate's summary; a gate of another package is loaded for its docstring."""
        if name in FITTED_GATES:
            return FITTED_GATES[name].summary
        try:
            return (inspect.getdoc(load_fit_function(name)) or "a gate of another package").splitlines()[0]
        except KnowgateError as error:
            return str(error)

    def load(self, name: str) -> Any:
        """Make the command."""
        renamed = {**RENAMED_OPTIONS, **RENAMED_GATE_OPTIONS.get(name, {})}
        command = create_command(name, make_gate_command(name), renamed)
        command.suggest_elsewhere = suggest_owning_gates
        return command


def suggest_owning_gates(option: str) -> str:
    """Name the gates that have an option that was given to another gate."""
    name = option.lstrip("-").removeprefix("no-").replace("-", "_")
    owners = [gate for gate in FITTED_GATES if name in read_fit_options(load_fit_function(gate))]
    return f" It is an option of: {', '.join(owners)}." if owners else ""


@dataclass(frozen=True)
class FitArbiterCommand(CommandEntry):
    """The command of arbiters, with the options of every mode."""

    def load(self, name: str) -> Any:
        """Make the command."""
        return create_command(name, make_arbiter_command(), RENAMED_OPTIONS)


class FitGroup(LazyGroup):
    """The commands of `knowgate fit`."""

    def get_entries(self) -> Mapping[str, CommandEntry]:
        """Return the commands by name."""
        target = "knowgate.cli.fit_reranker:fit_reranker_command"
        return {
            **{name: FitGateCommand("", "", GATES_PANEL) for name in list_fittable_gates()},
            ARBITER: FitArbiterCommand("", "which of two answers is given after retrieval", "Arbiters"),
            RERANKER: CommandEntry(target, "which passages the LLM can use", "Rerankers", RENAMED_OPTIONS),
        }

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or raise an error that suggests a similar name."""
        if cmd_name not in self.commands and not cmd_name.startswith("-") and not ctx.resilient_parsing:
            raise UnknownName("fitted gate", cmd_name, self.commands)
        return self.commands.get(cmd_name)


app = typer.Typer(
    cls=FitGroup,
    no_args_is_help=True,
    help="Fit a gate to your LLM: splits, training, calibration, measures on held-out questions, a card."
    "\n\nEach has its own options: knowgate fit probe --help",
)


def make_fit_parameter(option: FitOption, panel: str, flags: Mapping[str, str], *, unset: bool = False) -> Any:
    """Make the typer parameter of an option that a fit function declares; the library checks its values.

    Args:
        option: The option.
        panel: Heading of the help page.
        flags: Flag of each option, to translate option names in the help.
        unset: Make the default None, so that the fit function's own default applies.
    """
    values = [str(value) for value in option.allowed]
    is_switch = option.kind is bool and option.default is False
    names = [flags[option.name]] if is_switch else []  # a switch that is off by default needs no --no-... flag
    shown = typer.Option(
        *names,
        help=translate_arguments(option.help, flags),
        metavar="|".join(values) or None,
        rich_help_panel=f"Options of {panel}",
        show_default=_choose_shown_default(option, unset),
        autocompletion=(lambda incomplete: [value for value in values if value.startswith(incomplete)])
        if values
        else None,
    )
    kind: Any = option.kind | None if option.default is None or unset else option.kind
    keyword, default = inspect.Parameter.KEYWORD_ONLY, None if unset else option.default
    return inspect.Parameter(option.name, keyword, default=default, annotation=Annotated[kind, shown])


def _choose_shown_default(option: FitOption, unset: bool) -> str | bool:
    """Return what the help page shows as default: nothing for switches, and the library's default if unset."""
    if option.kind is bool and option.default is False:
        return False
    return str(option.default) if unset and option.default is not None else True


def _make_fit_parameters(options: Mapping[str, FitOption], panel: str, *, unset: bool = False) -> list[Any]:
    flags = {name: f"--{name.replace('_', '-')}" for name in options}
    return [make_fit_parameter(option, panel, flags, unset=unset) for option in options.values()]


# --- gates ----------------------------------------------------------------------------------------


def make_gate_command(name: str) -> Callable[..., None]:
    """Make the function behind `knowgate fit NAME`, with the flags of that gate."""
    function = load_fit_function(name)
    required = read_requirements(function)
    excluded = {"max_loss"} if required.target == "known" else set()
    excluded |= set() if required.reads_states else {"keep_questions"}
    shared = [flag for flag in make_flags(FitOptions) if flag.name not in excluded]

    def declare(labels: Labels = None, *, out: GateFolder) -> None:
        """Declare the flags that are no options."""

    def command(labels: list[Path] | None, out: Path, **values: Any) -> None:
        given = {flag.name: values.pop(flag.name) for flag in shared}
        options = FitOptions(**{key: value for key, value in given.items() if value is not None})
        fit_and_print(name, labels or [], out, options, values)

    own = _make_fit_parameters(read_fit_options(function), name)
    declared = inspect.signature(declare, eval_str=True).parameters.values()
    command.__signature__ = inspect.Signature([*declared, *shared, *own])  # type: ignore[attr-defined]
    summary = (inspect.getdoc(function) or f"Fit {name}.").split("\n\n")[0]
    command.__doc__ = f"{summary}\n\nExample: knowgate fit {name} --labels RUN --out my-{name}"
    return command


def fit_and_print(
    name: str, labels: list[Path], out: Path, options: FitOptions, gate_options: Mapping[str, Any]
) -> None:
    """Fit a gate and print its metrics, its threshold and warnings."""
    with show_progress(f"fitting {name}", "examples", STDERR_CONSOLE) as show:
        watch = FitProgressBar(show)
        gate = fit(name, labels, out=out, options=options, command=format_command_line(), watch=watch, **gate_options)
    manifest = gate.artifact.manifest
    for note in watch.select_new_notes(manifest["notes"]):
        STDERR_CONSOLE.print(note)
    table = Table("measure", "test split", box=None)
    for measure, estimate in manifest["metrics"].items():
        table.add_row(measure, format_estimate(estimate))
        if measure == "accuracy":
            table.add_row("(majority)", f"{majority_accuracy(manifest):.3f}")
    console = create_console(soft_wrap=False)
    console.print(table)
    if "sets" in manifest:
        console.print(_make_run_table(manifest["sets"]))
    STDERR_CONSOLE.print(f"{name} fitted on '{manifest['target']}': {format_split(manifest['split'])}.")
    STDERR_CONSOLE.print(_describe_gate(gate))
    n_test = manifest["split"]["test"]
    if n_test < MIN_TEST_QUESTIONS:
        STDERR_CONSOLE.print(
            f"Only {n_test} questions were held out to measure on: intervals are wide and calibration is rough. Label "
            f"{RECOMMENDED_QUESTIONS} questions or more.",
            style="yellow",
        )
    STDERR_CONSOLE.print(f"Use it: knowgate ask --gate {out}{suggest_ask_options(manifest['model']['name'])}")


def _make_run_table(runs: Mapping[str, Mapping[str, Any]]) -> Table:
    """Make a table of each label run's test questions; a pooled number can hide a run on which the gate fails."""
    table = Table("label run", "test questions", "AUROC", box=None)
    for name, run in runs.items():
        table.add_row(name, str(run["n"]), format_estimate(run["auroc"]))
    return table


def _describe_gate(gate: FittedGate) -> Text:
    """Describe when the gate retrieves, and warn if it is not better than chance."""
    manifest = gate.artifact.manifest
    text, low = (
        Text(f"It retrieves {describe_retrieval_rule(manifest['threshold'])}."),
        manifest["metrics"]["auroc"]["low"],
    )
    if low is not None and low <= 0.5:
        other = "known" if manifest["target"] == "benefit" else "benefit"
        has_one_target = read_requirements(load_fit_function(gate.name)).target == "benefit"
        advice = "label more questions"
        if not has_one_target and manifest["target"] != "agree":
            advice += f", or try --target {other}"
        text.append(f" On the held-out questions it is not better than chance: {advice}.", style="yellow")
    return text


# --- arbiters -------------------------------------------------------------------------------------


def make_arbiter_command() -> Callable[..., None]:
    """Make the function behind `knowgate fit arbiter`, with the options of every mode."""
    options: dict[str, FitOption] = {}
    for mode in FITTED_ARBITERS:
        options = {**read_fit_options(load_arbiter_fit_function(mode)), **options}

    def declare(
        labels: Labels = None, *, out: ArbiterFolder, mode: ArbiterMode = "features", seed: SeedOption = 0
    ) -> None:
        """Declare the flags that all modes share."""

    def command(labels: list[Path] | None, out: Path, mode: str, seed: int, **values: Any) -> None:
        given = {name: value for name, value in values.items() if value is not None}
        fit_arbiter_and_print(labels or [], out, mode, seed, given)

    own = _make_fit_parameters(options, "the modes", unset=True)
    declared = inspect.signature(declare, eval_str=True).parameters.values()
    command.__signature__ = inspect.Signature([*declared, *own])  # type: ignore[attr-defined]
    command.__doc__ = ARBITER_HELP
    return command


def fit_arbiter_and_print(labels: list[Path], out: Path, mode: str, seed: int, options: Mapping[str, Any]) -> None:
    """Fit an arbiter and print its metrics."""
    with show_progress("fitting an arbiter", "examples", STDERR_CONSOLE) as show:
        watch, command = FitProgressBar(show), format_command_line()
        arbiter = fit_arbiter(labels, out=out, mode=mode, seed=seed, command=command, watch=watch, **options)
    manifest = arbiter.artifact.manifest
    for note in watch.select_new_notes(manifest["notes"]):
        STDERR_CONSOLE.print(note)
    table = Table("measure", "test split", box=None)
    for measure, estimate in manifest["metrics"].items():
        table.add_row(measure.replace("_", " "), format_estimate(estimate))
    create_console(soft_wrap=False).print(table)
    split = format_split(manifest["split"])
    STDERR_CONSOLE.print(f"{mode} arbiter fitted: {split}. Use it: knowgate ask --arbiter {out}")
    gain = manifest["metrics"].get("gain")
    if gain and gain["low"] is not None and gain["low"] <= 0:
        STDERR_CONSOLE.print(
            "On the held-out questions no gain over always giving the open-book answer is shown: label more questions, "
            "or use --arbiter rules.",
            style="yellow",
        )


# --- output ---------------------------------------------------------------------------------------


@dataclass
class FitProgressBar:
    """Shows the progress of a fit and remembers the milestones ('epoch 0.5') that it has printed."""

    show: ProgressCallback
    printed: set[str] = field(default_factory=set)

    def __call__(self, progress: FitProgress) -> None:
        self.show(progress.done, progress.total, progress.words, stage=progress.stage, unit=progress.unit)
        if progress.is_milestone:
            self.show.say(progress.words)
            self.printed.add(progress.words.partition(",")[0])

    def select_new_notes(self, notes: Iterable[str]) -> list[str]:
        """Return the notes without those on milestones that were printed already."""
        return [note for note in notes if note.partition(":")[0] not in self.printed]


def format_estimate(estimate: Mapping[str, float | None]) -> str:
    """Format a value with its interval."""
    if estimate["value"] is None:
        return "not defined"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}"
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def format_split(split: Mapping[str, int]) -> str:
    """Format the sizes of the splits, such as '181 train, 40 test'."""
    return ", ".join(f"{n} {part}" for part, n in split.items())
