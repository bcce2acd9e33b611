"""The command line, read from the commands themselves: every command with its arguments and options."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import typer

from docs.from_code.tables import code, table
from knowgate.cli.main import app

PLAIN = "Commands"


@dataclass(frozen=True)
class Command:
    """A command as it is typed, with typer's own object, which has no class that could be named here."""

    path: str
    node: Any
    context: Any
    panel: str = PLAIN

    @property
    def help(self) -> str:
        return (self.node.help or "").replace("\b", "").split("\f")[0].strip()

    def children(self) -> Iterator[Command]:
        listed = getattr(self.node, "list_commands", None)
        for name in listed(self.context) if listed else ():
            node = self.node.get_command(self.context, name)
            if not node.hidden:
                context = self.context.__class__(node, info_name=name, parent=self.context)
                yield Command(f"{self.path} {name}", node, context, self._panel(name, node))

    def _panel(self, name: str, node: Any) -> str:
        """The heading a command stands under: its table's, where the group is made from one, or its own."""
        verbs = getattr(self.node, "verbs", dict)()
        panel = getattr(verbs.get(name), "panel", None) or getattr(node, "rich_help_panel", None)
        return panel if isinstance(panel, str) and panel else PLAIN

    def params(self) -> list[Any]:
        """What may be typed, arguments first; hidden options are old names."""
        shown = [param for param in self.node.params if not getattr(param, "hidden", False)]
        return sorted(shown, key=lambda param: param.param_type_name != "argument")


def root() -> Command:
    node: Any = typer.main.get_command(app)
    return Command("knowgate", node, node.context_class(node, info_name="knowgate"))


def walk(command: Command) -> Iterator[Command]:
    yield command
    for child in command.children():
        yield from walk(child)


def markdown() -> str:
    top = root()
    return "\n\n".join([_overview(top), *(_section(command) for command in walk(top))])


def _overview(top: Command) -> str:
    panels: dict[str, list[Command]] = {}
    for command in top.children():
        panels.setdefault(command.panel, []).append(command)
    parts = []
    for panel, commands in panels.items():
        rows = [(f"[`{one.path}`](#{_anchor(one)})", _first(one.help)) for one in commands]
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
    """As its own help says it: name with value, meaning with default."""
    record = param.get_help_record(context)
    meaning = record[1] if record else param.help or ""
    is_option = record and param.param_type_name == "option"
    return code(record[0] if is_option else " ".join(param.get_usage_pieces(context))), meaning
