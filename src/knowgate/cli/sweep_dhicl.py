"""`knowgate sweep dhicl` and `sweep latency`: the tables of DH-ICL."""

from __future__ import annotations

from typing import Annotated

import typer

from knowgate.cli.console import WORDS, plain_console
from knowgate.cli.gate_specs import split_specs
from knowgate.cli.options import Gates, Labels, Limit, PlugIn
from knowgate.cli.tables import print_sheets
from knowgate.datasets import load_questions
from knowgate.display import Sheet, markdown_tables
from knowgate.errors import BadSetting
from knowgate.evaluation import EXAMPLE_COUNTS, WORD_PAIRS, Variants, history_tables, latency_sheet, time_gates
from knowgate.models import load_model
from knowgate.prompts import load_answer_prompts

AsMarkdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]


def dhicl(
    labels: Labels,
    history: Annotated[str, typer.Option(help="The log, made by `knowgate history import`.")] = "history.db",
    model: Annotated[
        str | None, typer.Option(help="Model spec: it decides now, and the run keeps it. Default: what is on record.")
    ] = None,
    gates: Annotated[
        list[str] | None, typer.Option(help="Gates beside it in the first table: folders and specs, between commas.")
    ] = None,
    k: Annotated[int, typer.Option(min=1, help="Examples, where their number does not vary.")] = 20,
    counts: Annotated[str, typer.Option(help="Numbers of examples.")] = ",".join(map(str, EXAMPLE_COUNTS)),
    words: Annotated[str, typer.Option(help="Label words, known/unknown.")] = ",".join(WORD_PAIRS),
    embedder: Annotated[str | None, typer.Option(help="Embedding of the log, if not its own.")] = None,
    markdown: AsMarkdown = False,
) -> None:
    """DH-ICL's tables on label runs: accuracy (retrieval rate) beside never, always and matched random.

    Other gates, ablations (calibration, time-sensitive rows, no history), cold start, number of examples, label words.

    Example: knowgate sweep dhicl --labels runs/trivia --labels runs/web --history log.db --model smollm --gates my-uar
    """
    variants = Variants(history, k, _numbers(counts), _parts(words), embedder)
    llm = load_model(model) if model else None
    others = split_specs(gates, labels) if gates else []
    show(history_tables(labels, variants, model=llm, others=others, say=WORDS.print), markdown)


def latency(
    data: Annotated[str, typer.Option(help="Questions: jsonl:FILE, bench:NAME/SPLIT or hub:NAME?split=...")],
    gates: Gates = None,
    model: Annotated[str, typer.Option(help="Model spec.")] = "smollm",
    limit: Limit = 50,
    plug_in: PlugIn = False,
    markdown: AsMarkdown = False,
) -> None:
    """How long gates take to decide on one question at a time: median and 95th percentile, side by side.

    Example: knowgate sweep latency --data bench:triviaqa/test --gates dhicl:log.db,my-uar,logprob:mean
    """
    if not gates:
        raise BadSetting("name the gates to be timed: --gates dhicl:log.db,my-uar,logprob:mean")
    questions, llm = load_questions(data, limit), load_model(model)
    found = time_gates(split_specs(gates), questions, llm, load_answer_prompts(), plug_in=plug_in)
    show([latency_sheet(found)], markdown)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in _parts(text)]
    except ValueError:
        raise BadSetting(f"--counts is '{text}'; give numbers between commas, such as 5,10,20.") from None


def show(sheets: list[Sheet], markdown: bool) -> None:
    if markdown:
        plain_console().print(markdown_tables(sheets))
        return
    print_sheets(sheets)
