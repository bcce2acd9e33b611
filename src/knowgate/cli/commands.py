"""The commands of the command line: a table of where each one is, and groups that load them when they are used.

The help page is made from the table, without importing any command. Renamed options still work under their old names.
"""

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
    """One line of a table of commands.

    Attributes:
        target: Where the command is: "module:function", or "module:app" for a group.
        summary: What it does, for the list of commands.
        panel: Heading in the list of commands.
        renamed: New names of renamed options, by their old names.
    """

    target: str
    summary: str
    panel: str = ""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def describe(self, name: str) -> str:
        """Return the text for the list of commands."""
        return self.summary

    def load(self, name: str) -> Any:
        """Import the command."""
        target = load_target(self.target, f"knowgate {name}", "")
        if isinstance(target, typer.Typer):
            group = typer.main.get_group(target)
            group.name = name
            return group
        return create_command(name, target, self.renamed)


def create_command(name: str, function: Callable[..., None], renamed: Mapping[str, str] | None = None) -> Any:
    """Make a command from a function. Its option models become flags, and old names of options still work."""
    from knowgate.cli.option_flags import expand_options  # imports pydantic, which is slow

    app = typer.Typer(add_completion=False)
    app.command(name, cls=RenamedOptionsCommand)(expand_options(function))
    command: Any = typer.main.get_command(app)
    command.renamed = renamed or {}
    return command


class RenamedOptionsCommand(TyperCommand):
    """Command that accepts options under their old names, with a note on stderr."""

    renamed: Mapping[str, str] = {}

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        rest: list[str] = super().parse_args(ctx, [*(self._rename(word) for word in args[:end]), *args[end:]])
        return rest

    def _rename(self, word: str) -> str:
        """Replace the old name of a renamed option."""
        name, equals, value = word.partition("=")
        if name not in self.renamed:
            return word
        typer.echo(f"Note: {name} is now called {self.renamed[name]}.", err=True)
        return f"{self.renamed[name]}{equals}{value}"


class LazyCommands(Mapping[str, Any]):
    """Commands by name, each loaded on first access."""

    def __init__(self, entries: Mapping[str, CommandEntry]) -> None:
        self.entries = entries
        self.loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self.loaded:
            self.loaded[name] = self.entries[name].load(name)
        return self.loaded[name]

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class LazyGroup(TyperGroup, abc.ABC):
    """Group whose commands come from a table and are loaded when they are used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = LazyCommands(self.get_entries())

    @abc.abstractmethod
    def get_entries(self) -> Mapping[str, CommandEntry]:
        """Return the table of commands, by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        TyperGroup.format_help(self._with_placeholders(), ctx, formatter)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        ctx.command = self._with_placeholders()
        return TyperGroup.shell_complete(ctx.command, ctx, incomplete)

    def _with_placeholders(self) -> LazyGroup:
        """Return a copy of the group whose commands only have their summaries, so that none is loaded."""
        group = copy.copy(self)
        group.commands = {
            name: TyperCommand(name=name, help=entry.describe(name), rich_help_panel=entry.panel or None)
            for name, entry in self.get_entries().items()
        }
        return group


START_PANEL, ASK_PANEL, MEASURE_PANEL = "Begin here", "Ask", "Measure"
FIT_PANEL, PROVE_PANEL, TOOLS_PANEL = "Fit", "Prove", "Tools"
RENAMED_OPTIONS = {
    "index": {"--kind": "--retriever"},
    "import-answers": {"--llm": "--model"},
    "eval-rerank": {"--margin": "--rerank-margin"},
}
_TABLE = {  # panel -> command -> (where it is below knowgate.cli, summary)
    START_PANEL: {"start": ("start:start", "A guided first run: your documents, your LLM, a proof.")},
    ASK_PANEL: {
        "ask": ("ask:ask", "Answer questions, retrieving only where the gate decides to."),
        "decide": ("ask:decide", "Decide for each question whether to retrieve, without answering."),
        "serve": ("serve:serve", "An OpenAI-compatible server that retrieves only where it must."),
        "mcp": ("mcp:mcp", "Tools for agents (Model Context Protocol): decide, search, ask."),
        "index": ("index:index", "Build or update a retrieval index."),
    },
    MEASURE_PANEL: {
        "label": ("label:label", "Sample and grade answers: what does the LLM know?"),
        "import-answers": ("import_answers:import_answers", "Make a label run from answers recorded elsewhere."),
        "report": ("report:report", "Show the knowledge boundary of label runs."),
        "eval-self": ("eval_self:eval_self", "Does the LLM know what it knows? (KB-SAT)"),
        "prefer": ("prefer:prefer", "Measure what each passage does to the LLM."),
    },
    FIT_PANEL: {
        "fit": ("fit:app", "Fit a gate to your LLM from label runs, or an arbiter or reranker."),
        "calibrate": ("calibrate:calibrate_command", "Choose a gate's threshold, with evidence."),
        "export-judge": ("export_judge:export_judge_command", "Export a gate's judge as a GGUF file for llama.cpp."),
        "refit": ("refit:refit", "Fit a gate to current traffic, from the server's log."),
    },
    PROVE_PANEL: {
        "eval": ("eval:eval_", "Compare gates on the same questions."),
        "compare": ("compare:compare", "Compare two evaluations, also in CI."),
        "eval-rerank": ("eval_rerank:eval_rerank", "Compare rerankers on held-out preferences."),
        "sweep": ("sweep:app", "Vary one setting over recorded rows."),
        "replay": ("replay:replay_command", "What other thresholds would save on logged traffic."),
        "cost": ("cost:cost_command", "What always, never and gated retrieval cost."),
    },
    TOOLS_PANEL: {
        "demo": ("demo:demo", "Shows in three minutes what a gate is worth."),
        "push": ("hub:push", "Upload a fitted gate to the Hugging Face hub or a shared folder."),
        "pull": ("hub:pull", "Download a fitted gate from the Hugging Face hub or a shared folder."),
        "gates": ("catalog:list_gates", "List the gates."),
        "models": ("catalog:models_app", "List LLM backends and cached weights; download weights."),
        "rules": ("rules:app", "Rules that decide before the gate: small talk, recent events."),
        "keys": ("keys:app", "API keys of the server."),
        "history": ("history:app", "The log of questions that the gates dhicl and skr learn from."),
        "doctor": ("doctor:doctor", "Check the installation, and say what to type if something is missing."),
    },
}
COMMANDS = {
    name: CommandEntry(f"knowgate.cli.{target}", summary, panel, RENAMED_OPTIONS.get(name, {}))
    for panel, commands in _TABLE.items()
    for name, (target, summary) in commands.items()
}


class RootGroup(LazyGroup):
    """All commands of `knowgate`."""

    def get_entries(self) -> Mapping[str, CommandEntry]:
        return COMMANDS
