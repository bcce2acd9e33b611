"""Groups whose commands are loaded when they are used: a help page is drawn from a table, without importing any.

Also here: options that were renamed. Their old names still work, and say the new one.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from knowgate.registry import load_target


@dataclass(frozen=True)
class Verb:
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
        return make_command(name, made, self.renamed)


def make_command(name: str, function: Callable[..., None], renamed: Mapping[str, str] | None = None) -> Any:
    """A command around a function, whose old option names are understood."""
    holder = typer.Typer(add_completion=False)
    holder.command(name, cls=RenamingCommand)(function)
    command: Any = typer.main.get_command(holder)
    command.renamed = renamed or {}
    return command


class RenamingCommand(TyperCommand):
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

    def __init__(self, verbs: Mapping[str, Verb]) -> None:
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
    def verbs(self) -> Mapping[str, Verb]:
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
