"""`knowgate fit`: a group with one command per gate that can be fitted, one for arbiters and one for rerankers.

Without a gate name, it chooses gate, arbiter and threshold, and writes them as one policy.

The command of a gate has the flags of `FitOptions` (shared by all gates) and one flag for each option that the gate's
fit function declares.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import create_model
from rich.text import Text

from knowgate.cli.commands import CommandEntry, LazyGroup
from knowgate.cli.console import inform, print_table
from knowgate.cli.error_messages import translate_arguments
from knowgate.cli.option_flags import expand_options
from knowgate.cli.options import SeedOption, format_command_line, path_option, suggest_ask_options
from knowgate.cli.progress import ProgressCallback, show_progress
from knowgate.core.options import Options, get_set_fields, option
from knowgate.data.runs.folder import RunFolder
from knowgate.errors import KnowgateError, UnknownName
from knowgate.gates import FITTED_GATES
from knowgate.gates.artifacts.gate_folder import CARD_FILE
from knowgate.gates.fitted_gate import FittedGate, describe_retrieval_rule
from knowgate.stats.bootstrap import Estimate
from knowgate.training.arbiter import ARBITER_MODES, AUTO_MODE, fit_arbiter, load_arbiter_fit_function
from knowgate.training.fit_function import FitProgress, FitProgressCallback, read_fit_options, read_requirements
from knowgate.training.gate import FitOptions, fit, list_fittable_gates, load_fit_function
from knowgate.training.gate_artifact import describe_weakness, majority_accuracy
from knowgate.training.policy.evidence import PolicyOptions
from knowgate.training.policy.folder import format_result, list_legend, list_shown_results
from knowgate.training.policy.search import FittedPolicy, fit_policy

GATES_PANEL = "Gates, and when they retrieve"
# Old names of flags and the new ones, so that an error about an old flag can name the new one.
RENAMED_OPTIONS = {"--rate": "--learning-rate"}
RENAMED_GATE_OPTIONS = {"uar": {"--base": "--model"}}
POLICY_FLAGS = {name: f"--{name.replace('_', '-')}" for name in PolicyOptions.model_fields}
RECOMMENDED_QUESTIONS, MIN_TEST_QUESTIONS = 600, 50
ARBITER_HELP = """Fit an arbiter: after retrieval it chooses between the closed-book and the open-book answer.

    Example: knowgate fit arbiter --labels RUN --out my-arbiter"""

Labels = Annotated[
    list[Path] | None, path_option("RUN", "Label run (made by `knowgate label`). May be repeated.", "--labels")
]
GateFolder = Annotated[Path, path_option("DIR", "Folder to write the gate to; use it as --gate DIR.", "--out")]
ArbiterFolder = Annotated[Path, path_option("DIR", "Folder to write the arbiter to; use it as --arbiter DIR.", "--out")]
ArbiterMode = Annotated[
    str,
    typer.Option(
        "--mode",
        metavar="|".join(ARBITER_MODES),
        help="Type of arbiter: `features` (a small classifier), `lora` (a fine-tuned LLM) or `auto` (the better one).",
    ),
]


# --- the group ------------------------------------------------------------------------------------


class FitGroup(LazyGroup):
    """The command group `knowgate fit`. A command is imported on first use."""

    def get_entries(self) -> Mapping[str, CommandEntry]:
        """Return the commands of the group by name: all gates, then `arbiter` and `reranker`."""
        gates = {name: _make_gate_entry(name) for name in list_fittable_gates()}
        return {**gates, "arbiter": ARBITER_ENTRY, "reranker": RERANKER_ENTRY}

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command. The error for an unknown name suggests a similar one."""
        # Typer itself reports unknown options, and shell completion (`resilient_parsing`) must not fail.
        if cmd_name not in self.commands and not cmd_name.startswith("-") and not ctx.resilient_parsing:
            raise UnknownName("fitted gate", cmd_name, self.commands)
        return self.commands.get(cmd_name)


def _make_gate_entry(name: str) -> CommandEntry:
    """Describe the command that fits a gate. Its code is imported on first use."""
    return CommandEntry(
        target=partial(make_gate_command, name),
        summary=partial(summarize_gate, name),
        panel=GATES_PANEL,
        renamed={**RENAMED_OPTIONS, **RENAMED_GATE_OPTIONS.get(name, {})},
    )


def summarize_gate(name: str) -> str:
    """Return the line of a gate in `knowgate fit --help`."""
    if name in FITTED_GATES:
        return FITTED_GATES[name].summary
    try:
        return (inspect.getdoc(load_fit_function(name)) or "a gate of another package").splitlines()[0]
    except KnowgateError as error:
        return str(error)


# --- policies -------------------------------------------------------------------------------------


def fit_policy_command(
    context: typer.Context,
    labels: Labels = None,
    out: Annotated[
        Path | None, path_option("DIR", "Folder to write the policy to; use it as --gate DIR.", "--out")
    ] = None,
    *,
    options: PolicyOptions,
) -> None:
    """Fit a policy (gate, threshold and arbiter) and print it.

    This is `knowgate fit` without a gate name. A gate name runs the gate's own command.
    """
    if context.invoked_subcommand is not None:
        _check_no_flag_before_name(labels, out)
        return
    if not labels or out is None:
        raise typer.BadParameter(
            "Without a gate name, --labels and --out are needed: knowgate fit --labels RUN --out my-policy"
        )
    with show_progress("fitting a policy", "folds") as show:
        policy = fit_policy(labels, out=out, options=options, watch=_make_watcher(show), command=format_command_line())
    print_policy(policy, str(RunFolder(labels[0]).manifest()["settings"]["model"]))


def _check_no_flag_before_name(labels: list[Path] | None, out: Path | None) -> None:
    """Raise an error if a flag stands before the name of a gate, as in `knowgate fit --out DIR probe`."""
    if labels or out:
        flag = "--labels" if labels else "--out"
        raise typer.BadParameter(f"{flag} must follow the name of the gate. Example: knowgate fit probe {flag} PATH")


def print_policy(policy: FittedPolicy, model: str) -> None:
    """Print the compared policies, the chosen one, and how to use it.

    Args:
        policy: The fitted policy. Its `choice` is None if the label runs have no answers with passages.
        model: Name of the LLM, for the suggested command.
    """
    if policy.choice is not None:
        rows = [format_result(name, result) for name, result in list_shown_results(policy.choice)]
        print_table(("policy", "searches", "right", "LLM calls", "against always"), rows)
        for line in list_legend(policy.choice):
            inform(line)
    for line in policy.summary:
        inform(translate_arguments(line, POLICY_FLAGS))
    if policy.choice is None:
        inform(f"Calibrate it: knowgate calibrate {policy.path} --labels RUN --max-loss 0.03 --net")
    inform(f"The card shows everything that was tried: {policy.path / CARD_FILE}")
    inform(f"Use it: knowgate ask --gate {policy.path}{suggest_ask_options(model)}")


app = typer.Typer(
    cls=FitGroup,
    no_args_is_help=True,
    invoke_without_command=True,
    callback=expand_options(fit_policy_command),
    help="Fit a gate or a policy to your LLM. Both decide when to retrieve."
    "\n\nWithout a gate name, all gates are compared on recorded answers (label runs). The best policy is saved: a gate, a safe "
    "threshold and an arbiter, which chooses between two answers."
    "\n\nExample: knowgate fit --labels RUN --out my-policy"
    "\n\nWith a gate name, only that gate is fitted. To see its options: knowgate fit probe --help",
)


# --- gates ----------------------------------------------------------------------------------------


class TextOptions(FitOptions):
    """Options of gates that read no hidden states: `keep_questions` has no effect and gets no flag."""

    keep_questions: bool = option(True, "", flag=None)


def make_gate_command(name: str) -> Callable[..., None]:
    """Make the function behind a command such as `knowgate fit probe`.

    Its flags are the options that all gates share, and those of this gate.
    """
    function = load_fit_function(name)

    def command(labels: Labels = None, *, out: GateFolder, options: FitOptions, own: Options) -> None:
        fit_and_print(name, labels or [], out, options, get_set_fields(own))

    # `expand_options` turns the annotations of `command` into flags, so they name the option classes of this gate.
    command.__annotations__["own"] = read_fit_options(function)
    if not read_requirements(function).reads_states:
        command.__annotations__["options"] = TextOptions
    summary = (inspect.getdoc(function) or f"Fit {name}.").split("\n\n")[0]
    command.__doc__ = f"{summary}\n\nExample: knowgate fit {name} --labels RUN --out my-{name}"
    return expand_options(command, own=f"Options of {name}")


def fit_and_print(
    name: str, labels: list[Path], out: Path, options: FitOptions, gate_options: Mapping[str, Any]
) -> None:
    """Fit a gate, and print its metrics on held-out questions. Notes, warnings and the next commands go to stderr.

    Args:
        name: Name of the gate.
        labels: Folders of the label runs to fit on.
        out: Folder to write the gate to.
        options: Options that all gates share.
        gate_options: Options of this gate that the user gave, by name.
    """
    with show_progress(f"fitting {name}", "examples") as show:
        watch, command = _make_watcher(show), format_command_line()
        gate = fit(name, labels, out=out, options=options, command=command, watch=watch, **gate_options)
    manifest = gate.artifact.manifest
    _print_gate_metrics(manifest)
    inform(f"{name} fitted on '{manifest['target']}': {format_split(manifest['split'])}.")
    inform(_describe_gate(gate))
    _print_gate_advice(manifest, out)


def _print_gate_advice(manifest: Mapping[str, Any], out: Path) -> None:
    """Print how to use the gate in the folder `out`, and warnings about weak results."""
    n_test = manifest["split"]["test"]
    if n_test < MIN_TEST_QUESTIONS:
        inform(f"Only {n_test} questions were held out; label {RECOMMENDED_QUESTIONS} or more.", style="yellow")
    if not manifest.get("calibrated", True):
        inform(f"Calibrate it: knowgate calibrate {out} --labels RUN --max-loss 0.03 --net")
    inform(f"Use it: knowgate ask --gate {out}{suggest_ask_options(manifest['model']['name'])}")
    weakness = describe_weakness(manifest)
    if weakness:  # "" for a gate that is good enough
        inform(weakness, style="yellow")


def _print_gate_metrics(manifest: Mapping[str, Any]) -> None:
    """Print the notes of a fitted gate, and its metrics on held-out questions."""
    for note in manifest["notes"]:
        inform(note)
    rows = [(measure, Estimate(**estimate).format()) for measure, estimate in manifest["metrics"].items()]
    rows.append(("accuracy of deciding the same for all", f"{majority_accuracy(manifest):.3f}"))
    print_table(("measure", "test split"), rows)
    if "sets" in manifest:  # the results of all runs together can hide a bad one
        results = [(run, str(each["n"]), Estimate(**each["auroc"]).format()) for run, each in manifest["sets"].items()]
        print_table(("label run", "test questions", "AUROC"), results)


def _describe_gate(gate: FittedGate) -> Text:
    """Describe when the gate retrieves. Warn if its AUROC is not provably above 0.5 (chance)."""
    manifest = gate.artifact.manifest
    text = Text(f"It retrieves {describe_retrieval_rule(manifest['threshold'])}.")
    low = manifest["metrics"]["auroc"]["low"]
    if low is not None and low <= 0.5:
        warning = "On the held-out questions it is not better than chance: label more, or try another --target."
        text.append(f" {warning}", style="yellow")
    return text


# --- arbiters -------------------------------------------------------------------------------------


def make_arbiter_command() -> Callable[..., None]:
    """Make the function behind `knowgate fit arbiter`. Its flags include the options of all modes ('features', 'lora')."""
    modes = [mode for mode in ARBITER_MODES if mode != AUTO_MODE]
    option_classes = tuple(read_fit_options(load_arbiter_fit_function(mode)) for mode in modes)

    def command(
        labels: Labels = None, *, out: ArbiterFolder, mode: ArbiterMode = AUTO_MODE, seed: SeedOption = 0, own: Options
    ) -> None:
        with show_progress("fitting an arbiter", "examples") as show:
            watch, line = _make_watcher(show), format_command_line()
            given = get_set_fields(own)
            arbiter = fit_arbiter(labels or [], out=out, mode=mode, seed=seed, command=line, watch=watch, **given)
        _print_arbiter(arbiter.artifact.manifest, out)

    # `expand_options` turns the annotations of `command` into flags. `own` gets the options of all modes together.
    command.__annotations__["own"] = create_model("ArbiterOptions", __base__=option_classes)
    command.__doc__ = ARBITER_HELP
    return expand_options(command, own="Options of the modes")


ARBITER_ENTRY = CommandEntry(
    make_arbiter_command, "which of two answers is given after retrieval", "Arbiters", RENAMED_OPTIONS
)
RERANKER_ENTRY = CommandEntry(
    "knowgate.cli.reranker:fit_reranker_command", "which passages the LLM can use", "Rerankers", RENAMED_OPTIONS
)


def _print_arbiter(manifest: Mapping[str, Any], out: Path) -> None:
    """Print the notes and metrics of a fitted arbiter, and how to use it."""
    for note in manifest["notes"]:
        inform(note)
    metrics = manifest["metrics"]
    rows = [(measure.replace("_", " "), Estimate(**estimate).format()) for measure, estimate in metrics.items()]
    print_table(("measure", "test split"), rows)
    split = format_split(manifest["split"])
    inform(f"{manifest['arbiter']} arbiter fitted: {split}. Use it: knowgate ask --arbiter {out}")
    gain = metrics.get("gain")
    if gain and gain["low"] is not None and gain["low"] <= 0:
        advice = "Label more questions, or use --arbiter rules."
        inform(f"The arbiter is not provably better than always giving the open-book answer. {advice}", style="yellow")


# --- output ---------------------------------------------------------------------------------------


def _make_watcher(show: ProgressCallback) -> FitProgressCallback:
    """Return a callback that shows the progress of a fit.

    Milestones become lines, and everything else moves the progress bar.
    """

    def watch(progress: FitProgress) -> None:
        """Print milestones of the training as lines, and show everything else as a progress bar."""
        if progress.is_milestone and progress.unit in ("steps", "folds"):
            show.say(translate_arguments(progress.words, POLICY_FLAGS))
        else:
            show(progress.done, progress.total, progress.words, stage=progress.stage, unit=progress.unit)

    return watch


def format_split(split: Mapping[str, int]) -> str:
    """Format the sizes of the splits, such as '181 train, 40 test'."""
    return ", ".join(f"{n} {part}" for part, n in split.items())
