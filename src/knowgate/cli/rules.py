"""`knowgate rules`: list the rules that decide before the gate, and test them on questions.

A rule decides for simple cases, such as small talk, without asking the gate.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from knowgate.cli.console import create_console, inform, print_json, print_table
from knowgate.cli.options import JsonOption, path_argument, path_option
from knowgate.cli.questions import read_arguments, read_question_file
from knowgate.core.display import sanitize_text
from knowgate.gates.rules.rule_set import load_rules
from knowgate.gates.rules.topic_rule import RuleMatch

app = typer.Typer(help="List the routing rules, or test them on questions. Rules decide before the gate does.")
RulesFile = Annotated[Path | None, path_option("FILE", "TOML file of rules to try before packaged ones.", "--rules")]


@app.callback(invoke_without_command=True)
def list_rules(context: typer.Context, rules: RulesFile = None) -> None:
    """List the routing rules in order. The first matching rule decides."""
    if context.invoked_subcommand:
        context.obj = rules  # `knowgate rules --rules FILE test` tests these rules
        return
    rows = [(rule.name, rule.match.action, rule.match.reason) for rule in load_rules(rules).rules]
    print_table(("rule", "does", "because"), rows)
    inform("Try them: knowgate rules test QUESTIONS.txt")
    inform("To use your own rules: knowgate ask --rules FILE")
    inform("To use no rules: knowgate ask --no-rules")


@app.command("test")
def try_rules(
    context: typer.Context,
    file: Annotated[
        Path | None, path_argument("FILE", "Questions: one per line, or JSONL with question, text or messages.")
    ] = None,
    rules: RulesFile = None,
    as_json: JsonOption = False,
) -> None:
    """Show the rule for each question, or that the gate decides.

    Also counts the questions of each rule.
    """
    rule_set = load_rules(rules or context.obj)
    counts = Counter[str]()  # number of questions by rule
    questions = read_arguments(None) if file is None else read_question_file(file)
    for question in questions:
        match = rule_set.decide(question.text)
        counts[sanitize_text(match.rule) if match else "left to the gate"] += 1
        _print_match(question.text, match, as_json)
    for name, count in counts.most_common():
        inform(f"{count:6,}  {name}")


def _print_match(question: str, match: RuleMatch | None, as_json: bool) -> None:
    """Print a question with its rule. The gate decides if `match` is None."""
    if as_json:
        fields = {"rule": match.rule, "action": match.action, "reason": match.reason} if match else {"rule": None}
        print_json({"question": question, **fields})
    else:
        columns = f"{match.action:8}  {match.rule:18}" if match else f"{'gate':8}  {'':18}"
        create_console().print(f"{columns}  {sanitize_text(question)}", markup=False)
