"""`knowgate rules`: what is decided without a gate, and what that does to questions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from knowgate.cli.console import STDERR_CONSOLE, create_console, print_json
from knowgate.cli.options import JsonOption, parse_path
from knowgate.cli.questions import read_arguments, read_question_file
from knowgate.core.display import sanitize_text
from knowgate.gates.rules.rule_set import RuleSet, load_rules

app = typer.Typer(help="Rules above the score: list them, try them on questions.")
RulesFile = Annotated[
    Path | None,
    typer.Option("--rules", parser=parse_path, metavar="FILE", help="Your own rules (TOML), before the packaged ones."),
]


@app.callback(invoke_without_command=True)
def list_rules(context: typer.Context, rules: RulesFile = None) -> None:
    """List the rules in the order they are tried: the first that fits decides."""
    if context.invoked_subcommand:
        return
    table = Table("rule", "does", "because", box=None)
    for rule in load_rules(rules).rules:
        ruling = rule.ruling
        table.add_row(sanitize_text(ruling.rule), ruling.action, sanitize_text(ruling.reason))
    create_console(soft_wrap=False).print(table)
    STDERR_CONSOLE.print("Try them: knowgate rules test QUESTIONS.txt")
    STDERR_CONSOLE.print("Your own: knowgate ask --rules FILE; none: knowgate ask --no-rules")


@app.command("test")
def try_rules(
    file: Annotated[
        Path | None,
        typer.Argument(
            parser=parse_path,
            metavar="FILE",
            help="Text, one question per line, or JSONL with question, text or messages. Default: standard input.",
        ),
    ] = None,
    rules: RulesFile = None,
    as_json: JsonOption = False,
) -> None:
    """Say for each line of a file what a rule decides, or that the gate is asked; then count."""
    book, counts = load_rules(rules), Counter[str]()
    for question in read_arguments(None) if file is None else read_question_file(file):
        counts[_show(book, question.text, as_json)] += 1
    for name, count in counts.most_common():
        STDERR_CONSOLE.print(f"{count:6,}  {sanitize_text(name) or 'left to the gate'}")


def _show(book: RuleSet, question: str, as_json: bool) -> str:
    """Print one line; the name of the rule."""
    ruling = book.judge(question)
    if as_json:
        found = {"rule": ruling.rule, "action": ruling.action, "reason": ruling.reason} if ruling else {"rule": None}
        print_json({"question": question, **found})
    else:
        said = f"{ruling.action:8}  {ruling.rule:18}" if ruling else f"{'gate':8}  {'':18}"
        create_console().print(f"{said}  {sanitize_text(question)}", markup=False)
    return ruling.rule if ruling else ""
