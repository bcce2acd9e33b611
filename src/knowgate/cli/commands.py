"""Table of all commands, and command groups that import a command only when it is used.

The help page is made from the table without importing any command, so it appears quickly. Renamed options still work
under their old names.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from knowgate.core.registry import load_target

# Base class of usage errors. typer has its own copy of click, so this is not the class that `import click` gives.
CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]  # BadParameter < UsageError < ClickException


@dataclass(frozen=True)
class CommandEntry:
    """A command that is imported on first use.

    Attributes:
        target: Where the command is defined: "module:function", or "module:app" for a group of commands. If the
            function has to be made first, a function without arguments that makes and returns it.
        summary: One line that the list of commands shows, or a function that returns it.
        panel: Heading under which the list of commands shows it.
        renamed: New names of renamed options, keyed by their old names, which still work.
    """

    target: str | Callable[[], Callable[..., None]]
    summary: str | Callable[[], str]
    panel: str
    renamed: Mapping[str, str]

    def describe(self) -> str:
        """Return the line that the list of commands shows."""
        return self.summary if isinstance(self.summary, str) else self.summary()

    def load(self, name: str) -> Any:
        """Import or make the command, and return it as a typer command or group."""
        from knowgate.cli.option_flags import expand_options

        source = self.target  # an import path, or a function that makes the command
        target: Any = load_target(source, f"knowgate {name}", extra="") if isinstance(source, str) else source()
        if isinstance(target, typer.Typer):
            group = typer.main.get_group(target)
            group.name = name
            return group
        app = typer.Typer(add_completion=False)
        app.command(name, cls=RenamedOptionsCommand)(expand_options(target))
        command: Any = typer.main.get_command(app)
        command.renamed = self.renamed
        return command


class RenamedOptionsCommand(TyperCommand):
    """Command that also accepts the old names of options. An old name prints a note on stderr."""

    renamed: Mapping[str, str] = {}  # new name of each renamed option, by its old name

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line, after replacing old names of options by new ones."""
        end = args.index("--") if "--" in args else len(args)  # words after "--" are not options
        renamed = [self._rename(word) for word in args[:end]]
        return list(super().parse_args(ctx, renamed + args[end:]))

    def _rename(self, word: str) -> str:
        """Replace the old name of an option by the new name. Example: `--kind=bm25` becomes `--retriever=bm25`."""
        name, equals, value = word.partition("=")
        if name not in self.renamed:
            return word
        typer.echo(f"Note: {name} is now called {self.renamed[name]}.", err=True)
        return f"{self.renamed[name]}{equals}{value}"


class LazyCommands(Mapping[str, Any]):
    """Mapping from names to commands that imports each command on first access."""

    def __init__(self, entries: Mapping[str, CommandEntry]) -> None:
        self.entries = entries
        self.load = functools.cache(lambda name: entries[name].load(name))

    def __getitem__(self, name: str) -> Any:
        """Return a command. The first use imports it."""
        return self.load(name)

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class LazyGroup(TyperGroup):
    """Group of commands from a table. A command is imported on first use."""

    def __init__(self, **settings: Any) -> None:
        # Plain-text help: importing rich, which draws boxes, would double the time to list the commands.
        super().__init__(**{**settings, "rich_markup_mode": None})
        self.commands: Any = LazyCommands(self.get_entries())

    def get_entries(self) -> Mapping[str, CommandEntry]:
        """Return the table entries of the commands, keyed by name. Subclasses have tables of their own."""
        return COMMANDS

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands, with a heading for each group of them."""
        entries = self.get_entries()
        for panel in dict.fromkeys(entry.panel for entry in entries.values()):
            rows = [(name, entry.describe()) for name, entry in entries.items() if entry.panel == panel]
            with formatter.section(panel):
                formatter.write_dl(rows)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the name of a command.

        A copy of this group is completed. Its commands have only a name and a help text, because importing the real ones
        is slow.
        """
        ctx.command = group = copy.copy(self)
        entries = self.get_entries().items()
        group.commands = {name: TyperCommand(name=name, help=entry.describe()) for name, entry in entries}
        return TyperGroup.shell_complete(group, ctx, incomplete)


RENAMED_OPTIONS = {
    "index": {"--kind": "--retriever"},
    "import-answers": {"--llm": "--model"},
    "eval-rerank": {"--margin": "--rerank-margin"},
    "eval": {"--price-retrieval": "--price-search"},
    "replay": {"--price-retrieval": "--price-search"},
    "serve": {"--price-retrieval": "--price-search", "--max-loss": "--max-changed"},
}
_TABLE = {  # heading -> name of the command -> (module and function below knowgate.cli, summary)
    "Begin here": {"start": ("start:start", "Guided first run: measure a gate on your documents with your LLM.")},
    "Ask": {
        "ask": ("ask:ask", "Answer questions; retrieve only if the gate decides to."),
        "decide": ("ask:decide", "Decide for each question whether to retrieve, without answering."),
        "serve": ("serve:serve", "Run an OpenAI-compatible server that retrieves only if needed."),
        "mcp": ("mcp:mcp", "Run a server with tools for agents (Model Context Protocol)."),
        "index": ("index:index", "Build or update a retrieval index."),
    },
    "Measure": {
        "label": ("label:label", "Sample and grade answers, to measure what the LLM knows."),
        "import-answers": ("label:import_answers", "Make a label run from answers recorded elsewhere."),
        "report": ("report:report", "Show what the LLM knows and where retrieval helps, from label runs."),
        "eval-self": ("sweep:eval_self", "Measure how well the LLM judges its own knowledge (KB-SAT)."),
        "prefer": ("reranker:prefer", "Measure how each passage changes the LLM's answers."),
    },
    "Fit": {
        "fit": ("fit:app", "Fit a gate to your LLM from label runs, or an arbiter or reranker."),
        "calibrate": ("calibrate:calibrate_command", "Choose a gate's threshold, with evidence."),
        "export-judge": ("hub:export_judge_command", "Export a gate's judge as a GGUF file for llama.cpp."),
        "refit": ("start:refit", "Fit a gate again, on current traffic from the server's log."),
    },
    "Prove": {
        "eval": ("eval:eval_", "Compare gates on the same questions."),
        "compare": ("eval:compare", "Compare two evaluations; can fail a CI job if one is worse."),
        "eval-rerank": ("eval_rerank:eval_rerank", "Compare rerankers on preference data they were not trained on."),
        "sweep": ("sweep:app", "Show how results change with one setting, from recorded answers."),
        "replay": ("replay:replay_command", "Show what other thresholds would save on logged traffic."),
        "cost": ("replay:cost_command", "Compare the cost of always, never and gated retrieval."),
    },
    "Tools": {
        "demo": ("demo:demo", "Show in three minutes what a gate does."),
        "push": ("hub:push", "Upload a fitted gate to the Hugging Face hub or a shared folder."),
        "pull": ("hub:pull", "Download a fitted gate from the Hugging Face hub or a shared folder."),
        "gates": ("catalog:list_gates", "List the gates."),
        "models": ("catalog:models_app", "List LLM backends and cached weights; download weights."),
        "rules": ("rules:app", "List and test the routing rules, which decide before the gate."),
        "keys": ("keys:app", "Manage the API keys of the server."),
        "history": ("history:app", "Manage the log of questions that the gates dhicl and skr learn from."),
        "doctor": ("doctor:doctor", "Check the installation, and say how to fix what is missing."),
    },
}
COMMANDS = {
    name: CommandEntry(f"knowgate.cli.{target}", summary, panel, RENAMED_OPTIONS.get(name, {}))
    for panel, commands in _TABLE.items()
    for name, (target, summary) in commands.items()
}
