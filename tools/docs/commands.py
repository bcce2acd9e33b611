"""The page of the command line: every command with its arguments and options, read from the commands themselves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from knowgate.cli.main import app
from tools.docs.markdown import code, table

PLAIN = "Commands"


@dataclass(frozen=True)
class Command:
    """A command of the command line: the words that are typed, and typer's object for it."""

    path: str
    node: Any
    context: Any
    panel: str = PLAIN

    @property
    def help(self) -> str:
        """The help text of the command."""
        return (self.node.help or "").replace("\b", "").split("\f")[0].strip()

    def children(self) -> Iterator[Command]:
        """The commands of a group that are not hidden."""
        listed = getattr(self.node, "list_commands", None)
        for name in listed(self.context) if listed else ():
            node = self.node.get_command(self.context, name)
            if not node.hidden:
                context = self.context.__class__(node, info_name=name, parent=self.context)
                yield Command(f"{self.path} {name}", node, context, self._panel(name, node))

    def _panel(self, name: str, node: Any) -> str:
        """The heading of the help page that a command is listed under."""
        verbs = getattr(self.node, "verbs", dict)()
        panel = getattr(verbs.get(name), "panel", None) or getattr(node, "rich_help_panel", None)
        return panel if isinstance(panel, str) and panel else PLAIN

    def params(self) -> list[Any]:
        """Arguments, then options; hidden options are deprecated names and are left out."""
        shown = [param for param in self.node.params if not getattr(param, "hidden", False)]
        return sorted(shown, key=lambda param: param.param_type_name != "argument")


def root() -> Command:
    """The command `knowgate` itself."""
    node: Any = typer.main.get_command(app)
    return Command("knowgate", node, node.context_class(node, info_name="knowgate"))


def walk(command: Command) -> Iterator[Command]:
    """A command and everything below it, depth first."""
    yield command
    for child in command.children():
        yield from walk(child)


def markdown() -> str:
    """An overview by topic, then a section for each command."""
    top = root()
    return "\n\n".join([_overview(top), *(_section(command) for command in walk(top))])


def _overview(top: Command) -> str:
    panels: dict[str, list[Command]] = {}
    for command in top.children():
        panels.setdefault(command.panel, []).append(command)
    parts = []
    for panel, commands in panels.items():
        rows = [(f"[`{command.path}`](#{_anchor(command)})", _first(command.help)) for command in commands]
        parts.append(table((panel, "does"), rows))
    return "\n\n".join(parts)


def _first(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _anchor(command: Command) -> str:
    return command.path.replace(" ", "-")


def _section(command: Command) -> str:
    level = "##" if command.path.count(" ") < 2 else "###"
    heading = f"{level} `{command.path}` {{ #{_anchor(command)} }}"
    usage = " ".join([command.path, *command.node.collect_usage_pieces(command.context)])
    rows = [_row(param, command.context) for param in command.params()]
    options = table(("option", "meaning"), rows) if rows else ""
    about = command.help.replace("<", "&lt;")
    return "\n\n".join(part for part in (heading, about, f"```text\n{usage}\n```", options) if part)


def _row(param: Any, context: Any) -> tuple[str, str]:
    """One row of the options table: the option with its value, and its help with its default."""
    record = param.get_help_record(context)
    meaning = record[1] if record else param.help or ""
    is_option = record and param.param_type_name == "option"
    return code(record[0] if is_option else " ".join(param.get_usage_pieces(context))), meaning
