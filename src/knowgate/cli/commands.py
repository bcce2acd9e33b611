"""The verbs of the command line: where each lives, what it says of itself, and under which heading."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from knowgate.core.registry import load_target


@dataclass(frozen=True)
class CommandEntry:
    """One line of a table of commands. `target`: "module:function", or "module:app" of a group. renamed: old to new."""

    target: str
    summary: str
    panel: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def about(self, name: str) -> str:
        """The words of a list of commands."""
        return self.summary

    def load(self, name: str) -> Any:
        made = load_target(self.target, f"knowgate {name}", "")
        if isinstance(made, typer.Typer):
            group = typer.main.get_group(made)
            group.name = name
            return group
        return create_command(name, made, self.renamed)


def create_command(name: str, function: Callable[..., None], renamed: Mapping[str, str] | None = None) -> Any:
    """Make a command from a function. Its option models become flags, and old names of options still work."""
    from knowgate.cli.option_flags import expand_options  # here and not above: it loads pydantic

    holder = typer.Typer(add_completion=False)
    holder.command(name, cls=RenamedOptionsCommand)(expand_options(function))
    command: Any = typer.main.get_command(holder)
    command.renamed = renamed or {}
    return command


class RenamedOptionsCommand(TyperCommand):
    """Takes options under their old names too, with a note on stderr."""

    renamed: Mapping[str, str] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest: list[str] = super().parse_args(ctx, [*(self._new(word) for word in args[:end]), *args[end:]])
        return rest

    def _new(self, word: str) -> str:
        name, equals, value = word.partition("=")
        if name not in self.renamed:
            return word
        typer.echo(f"Note: {name} is called {self.renamed[name]} now.", err=True)
        return f"{self.renamed[name]}{equals}{value}"


class LazyCommands(Mapping[str, Any]):
    """Commands by name, each made when it is asked for."""

    def __init__(self, verbs: Mapping[str, CommandEntry]) -> None:
        self.verbs = verbs
        self.made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = self.verbs[name].load(name)
        return self.made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.verbs)

    def __len__(self) -> int:
        return len(self.verbs)


class LazyGroup(TyperGroup, abc.ABC):
    """A group made from a table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = LazyCommands(self.verbs())

    @abc.abstractmethod
    def verbs(self) -> Mapping[str, CommandEntry]:
        """The table: name -> where the command is and what it says of itself."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        TyperGroup.format_help(self._listed(), ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        ctx.command = self._listed()
        return TyperGroup.shell_complete(ctx.command, ctx, incomplete)

    def _listed(self) -> LazyGroup:
        """The same group with its commands as the table tells of them; none is loaded."""
        listed = copy.copy(self)
        listed.commands = {
            name: TyperCommand(name=name, help=verb.about(name), rich_help_panel=verb.panel or None)
            for name, verb in self.verbs().items()
        }
        return listed


START_PANEL, ASK_PANEL, MEASURE_PANEL, FIT_PANEL, PROVE_PANEL, TOOLS_PANEL = (
    "Begin here",
    "Ask",
    "Measure",
    "Fit",
    "Prove",
    "Tools",
)
COMMANDS = {
    "start": CommandEntry(
        "knowgate.cli.start:start", "A guided first run: your documents, your LLM, a proof.", START_PANEL
    ),
    "ask": CommandEntry("knowgate.cli.ask:ask", "Answer questions, retrieving only where the gate says so.", ASK_PANEL),
    "decide": CommandEntry(
        "knowgate.cli.ask:decide", "Say for each question whether to retrieve; answer nothing.", ASK_PANEL
    ),
    "serve": CommandEntry(
        "knowgate.cli.serve:serve", "An OpenAI-compatible server that retrieves only where it must.", ASK_PANEL
    ),
    "mcp": CommandEntry(
        "knowgate.cli.mcp:mcp", "Tools for agents (Model Context Protocol): decide, search, ask.", ASK_PANEL
    ),
    "index": CommandEntry(
        "knowgate.cli.index:index",
        "Build a retrieval index, or update one.",
        ASK_PANEL,
        renamed={"--kind": "--retriever"},
    ),
    "label": CommandEntry(
        "knowgate.cli.label:label", "Sample and grade answers: what does the LLM know?", MEASURE_PANEL
    ),
    "import-answers": CommandEntry(
        "knowgate.cli.import_answers:import_answers",
        "Make a label run from answers recorded elsewhere.",
        MEASURE_PANEL,
        renamed={"--llm": "--model"},
    ),
    "report": CommandEntry("knowgate.cli.report:report", "Show the knowledge boundary of label runs.", MEASURE_PANEL),
    "eval-self": CommandEntry(
        "knowgate.cli.eval_self:eval_self", "Does the LLM know what it knows? (KB-SAT)", MEASURE_PANEL
    ),
    "prefer": CommandEntry("knowgate.cli.prefer:prefer", "Measure what each passage does to the LLM.", MEASURE_PANEL),
    "fit": CommandEntry("knowgate.cli.fit:app", "Fit a gate to your LLM from label runs; or a reranker.", FIT_PANEL),
    "calibrate": CommandEntry(
        "knowgate.cli.calibrate:calibrate_command", "Choose a gate's threshold, with evidence.", FIT_PANEL
    ),
    "export-judge": CommandEntry(
        "knowgate.cli.export_judge:export_judge_command",
        "Write a gate's judge as a GGUF file, for llama.cpp.",
        FIT_PANEL,
    ),
    "eval": CommandEntry("knowgate.cli.eval:eval_", "Compare gates on the same questions.", PROVE_PANEL),
    "compare": CommandEntry(
        "knowgate.cli.compare:compare", "Hold two evaluations against each other; for CI too.", PROVE_PANEL
    ),
    "eval-rerank": CommandEntry(
        "knowgate.cli.eval_rerank:eval_rerank",
        "Compare rankers on held-out preferences.",
        PROVE_PANEL,
        renamed={"--margin": "--rerank-margin"},
    ),
    "sweep": CommandEntry("knowgate.cli.sweep:app", "Vary one setting over recorded rows.", PROVE_PANEL),
    "replay": CommandEntry(
        "knowgate.cli.replay:replay_command", "What other thresholds would save on logged traffic.", PROVE_PANEL
    ),
    "refit": CommandEntry(
        "knowgate.cli.refit:refit", "A gate for what is asked now, from the server's log.", FIT_PANEL
    ),
    "cost": CommandEntry("knowgate.cli.cost:cost_command", "What always, never and gated retrieval cost.", PROVE_PANEL),
    "demo": CommandEntry("knowgate.cli.demo:demo", "What a gate is worth, told in three minutes.", TOOLS_PANEL),
    "push": CommandEntry(
        "knowgate.cli.hub:push", "A fitted gate to the Hugging Face hub, or a shared folder.", TOOLS_PANEL
    ),
    "pull": CommandEntry(
        "knowgate.cli.hub:pull", "A fitted gate from the Hugging Face hub, or a shared folder.", TOOLS_PANEL
    ),
    "gates": CommandEntry("knowgate.cli.catalog:list_gates", "List the gates.", TOOLS_PANEL),
    "models": CommandEntry(
        "knowgate.cli.catalog:models_app", "List LLM backends and cached weights; fetch weights.", TOOLS_PANEL
    ),
    "rules": CommandEntry(
        "knowgate.cli.rules:app", "What is decided before the gate: small talk, fresh events.", TOOLS_PANEL
    ),
    "keys": CommandEntry("knowgate.cli.keys:app", "API keys of the server.", TOOLS_PANEL),
    "history": CommandEntry(
        "knowgate.cli.history:app", "The log of questions that dhicl and skr learn from.", TOOLS_PANEL
    ),
    "doctor": CommandEntry("knowgate.cli.doctor:doctor", "Is everything here, and what to type if not.", TOOLS_PANEL),
}


class RootGroup(LazyGroup):
    """All of them."""

    def verbs(self) -> Mapping[str, CommandEntry]:
        return COMMANDS
