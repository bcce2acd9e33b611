"""`knowgate fit`: a group with a command for each gate that can be fitted, and one for rerankers.

A command's options are those all fits share and those the gate's fit function names; no gate is known here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from knowgate.cli.console import WORDS, plain_console
from knowgate.cli.fit_parts import Watching, estimate_shown, fit_parameter, split_shown
from knowgate.cli.lazy_group import LazyGroup, Verb, make_command
from knowgate.cli.made_by import made_by
from knowgate.cli.options import Seed
from knowgate.cli.paths import path
from knowgate.cli.progress import progress
from knowgate.errors import KnowgateError, UnknownName
from knowgate.fitting import FitFunction, fit, fit_function, fit_names, majority, options_of, wanted_by
from knowgate.gates import FITTED, retrieval_rule
from knowgate.runs import how_to_ask

if TYPE_CHECKING:
    from knowgate.gates import FittedGate

ARBITER, RERANKER, GATES = "arbiter", "reranker", "Gates, and when they retrieve"
RENAMED = {"--rate": "--learning-rate"}
RENAMED_OF = {"uar": {"--base": "--model"}}
ENOUGH, ENOUGH_TESTED = 300, 50
SHARED = ("labels", "out", "target", "threshold", "max_loss", "balance_sets", "no_questions", "seed")

FitLabels = Annotated[
    list[Path] | None,
    typer.Option("--labels", parser=path, metavar="RUN", help="Label run to learn from; may be repeated."),
]
FitOut = Annotated[
    Path,
    typer.Option("--out", parser=path, metavar="DIR", help="Folder of the fitted gate; use it as --gate DIR."),
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

FitBare = Annotated[
    bool,
    typer.Option("--no-questions", help="Keep no questions in it, by which a server's hidden states are checked."),
]


@dataclass(frozen=True)
class FitVerb(Verb):
    """A gate's line in the group: the command is made from the signature of its fit function."""

    def about(self, name: str) -> str:
        """The table's words; a gate of another package is loaded for its own, and one that cannot be says why."""
        if name in FITTED:
            return FITTED[name].summary
        try:
            return (inspect.getdoc(fit_function(name)) or "a gate of another package").splitlines()[0]
        except KnowgateError as error:
            return str(error)

    def load(self, name: str) -> Any:
        command = make_command(name, gate_command(name), {**RENAMED, **RENAMED_OF.get(name, {})})
        command.elsewhere = elsewhere
        return command


def elsewhere(option: str) -> str:
    """Whose option it is, for who gives it to another gate."""
    name = option.lstrip("-").removeprefix("no-").replace("-", "_")
    owners = [gate for gate in FITTED if name in options_of(fit_function(gate))]
    return f" It is an option of: {', '.join(owners)}." if owners else ""


@dataclass(frozen=True)
class ArbiterVerb(Verb):
    """The line of the arbiter: its command has the options of every mode."""

    def load(self, name: str) -> Any:
        from knowgate.cli.fit_arbiter import arbiter_command

        return make_command(name, arbiter_command(), RENAMED)


class FitGroup(LazyGroup):
    """The gates of the table, those of other packages, the arbiter and the reranker."""

    def verbs(self) -> Mapping[str, Verb]:
        gates: dict[str, Verb] = {name: FitVerb("", "", GATES) for name in fit_names()}
        reranker = Verb("knowgate.cli.fit_reranker:reranker", "which passages the LLM can use", "Rerankers", RENAMED)
        return {
            **gates,
            ARBITER: ArbiterVerb("", "which of two answers is given after retrieval", "Arbiters"),
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


def gate_command(name: str) -> Callable[..., None]:
    """The function behind `knowgate fit NAME`, with the options of that gate."""
    function = fit_function(name)
    own = options_of(function)

    def command(**given: Any) -> None:
        shared = {key: given.pop(key) for key in SHARED if key in given}
        fit_and_tell(name, shared, given)

    shared = [each for each in inspect.signature(_shared, eval_str=True).parameters.values() if _has(function, each)]
    parameters = [*shared, *(fit_parameter(option, name) for option in own.values())]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    example = f"Example: knowgate fit {name} --labels RUN --out my-{name}"
    command.__doc__ = f"{inspect.getdoc(function) or f'Fit {name}.'}".split("\n\n")[0] + f"\n\n{example}"
    return command


def _has(function: FitFunction, parameter: inspect.Parameter) -> bool:
    """A gate that only learns what the LLM knows has no --max-loss, one that reads no states nothing to compare."""
    wanted = wanted_by(function)
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
    no_questions: FitBare = False,
    seed: Seed = 0,
) -> None:
    """The options of every fit."""


def fit_and_tell(name: str, shared: dict[str, Any], options: dict[str, Any]) -> None:
    """Fit, and say what came out and what a reader of the measures should know."""
    out, labels = shared.pop("out"), shared.pop("labels") or []
    shared["keep_questions"] = not shared.pop("no_questions", False)
    with progress(f"fitting {name}", "examples", WORDS) as show:
        watching = Watching(show)
        gate = fit(name, labels, out=out, command=made_by(), watch=watching, **shared, **options)
    made = gate.artefact.manifest
    for note in watching.untold(made["notes"]):
        WORDS.print(note)
    table = Table("measure", "test split", box=None)
    for measure, estimate in made["metrics"].items():
        table.add_row(measure, estimate_shown(estimate))
        if measure == "accuracy":
            table.add_row("(majority)", f"{majority(made):.3f}")
    console = plain_console(soft_wrap=False)
    console.print(table)
    if "sets" in made:
        console.print(_by_set(made["sets"]))
    WORDS.print(f"{name} fitted on '{made['target']}': {split_shown(made['split'])}.")
    WORDS.print(_decides(gate))
    _warn(gate)
    WORDS.print(f"Use it: knowgate ask --gate {out}{how_to_ask(made['model']['name'])}")


def _by_set(sets: Mapping[str, Mapping[str, Any]]) -> Table:
    """How it does on the part of each label run; a pooled number hides a set it fails on."""
    table = Table("label run", "test questions", "AUROC", box=None)
    for name, one in sets.items():
        table.add_row(name, str(one["n"]), estimate_shown(one["auroc"]))
    return table


def _decides(gate: FittedGate) -> Text:
    """What the gate will do, and whether it learnt anything."""
    made = gate.artefact.manifest
    words, low = Text(f"It retrieves {retrieval_rule(made['threshold'])}."), made["metrics"]["auroc"]["low"]
    if low is not None and low <= 0.5:
        other = "known" if made["target"] == "benefit" else "benefit"
        only = made["target"] == "agree" or wanted_by(fit_function(gate.name)).target == "benefit"  # no other is there
        advice = "label more questions." if only else f"label more questions, or try --target {other}."
        words.append(f" On the held-out questions it is not better than chance: {advice}", style="yellow")
    return words


def _warn(gate: FittedGate) -> None:
    tested = gate.artefact.manifest["split"]["test"]
    if tested < ENOUGH_TESTED:
        WORDS.print(
            f"Only {tested} questions were held out to measure on: intervals are wide and calibration is "
            f"rough. Label some {ENOUGH * 2} questions or more.",
            style="yellow",
        )
