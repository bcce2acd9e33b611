"""`knowgate rules`: what is decided without a gate, and what that does to questions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from knowgate.cli.console import WORDS, plain_console, print_json
from knowgate.cli.options import Json
from knowgate.cli.paths import path
from knowgate.cli.questions import read_arguments, read_file
from knowgate.display import harmless
from knowgate.rules import RuleBook, load_rules

app = typer.Typer(help="Rules above the score: list them, try them on questions.")
RulesFile = Annotated[
    Path | None,
    typer.Option("--rules", parser=path, metavar="FILE", help="Your own rules (TOML), before the packaged ones."),
]


@app.callback(invoke_without_command=True)
def rules(context: typer.Context, rules: RulesFile = None) -> None:
    """List the rules in the order they are tried: the first that fits decides."""
    if context.invoked_subcommand:
        return
    table = Table("rule", "does", "because", box=None)
    for rule in load_rules(rules).rules:
        ruling = rule.ruling
        table.add_row(harmless(ruling.rule), ruling.action, harmless(ruling.reason))
    plain_console(soft_wrap=False).print(table)
    WORDS.print("Try them: knowgate rules test QUESTIONS.txt")
    WORDS.print("Your own: knowgate ask --rules FILE; none: knowgate ask --no-rules")


@app.command("test")
def try_them(
    file: Annotated[
        Path | None,
        typer.Argument(
            parser=path,
            metavar="FILE",
            help="Text, one question per line, or JSONL with question, text or messages. Default: standard input.",
        ),
    ] = None,
    rules: RulesFile = None,
    as_json: Json = False,
) -> None:
    """Say for each line of a file what a rule decides, or that the gate is asked; then count."""
    book, counts = load_rules(rules), Counter[str]()
    for question in read_arguments(None) if file is None else read_file(file):
        counts[_show(book, question.text, as_json)] += 1
    for name, count in counts.most_common():
        WORDS.print(f"{count:6,}  {harmless(name) or 'left to the gate'}")


def _show(book: RuleBook, question: str, as_json: bool) -> str:
    """Print one line; the name of the rule."""
    ruling = book.judge(question)
    if as_json:
        found = {"rule": ruling.rule, "action": ruling.action, "reason": ruling.reason} if ruling else {"rule": None}
        print_json({"question": question, **found})
    else:
        said = f"{ruling.action:8}  {ruling.rule:18}" if ruling else f"{'gate':8}  {'':18}"
        plain_console().print(f"{said}  {harmless(question)}", markup=False)
    return ruling.rule if ruling else ""
