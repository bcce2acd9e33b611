"""The tour of `knowgate demo`. Every number is either measured during the tour or read from recorded results.

The output fits a terminal of 80 columns.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from knowgate.cli.console import inform
from knowgate.cli.demo import DemoOptions, comparison
from knowgate.core.display import sanitize_line
from knowgate.core.schema import read_record
from knowgate.core.validation import read_json
from knowgate.errors import MissingExtra
from knowgate.evaluation.cost import DEFAULT_SEARCH_SECONDS, SAVINGS_QUESTIONS
from knowgate.gates import DEFAULT_GATE, default_gate, load_gate
from knowgate.models import load_model
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.builder import build_cached_index
from knowgate.pipeline.conversation import Conversation
from knowgate.retrieval import load_retriever
from knowgate.types import Answer, Decision, Question

PAGE_WIDTH, INDENT = 80, 2
MESSAGE_WIDTH, MARK_WIDTH, NAME_WIDTH = 40, 7, 16  # columns of a message, a mark, and a name before a paragraph
MARKS = {True: ("right", "green"), False: ("wrong", "red"), None: ("-", "dim")}
PAIR_MODES = {comparison.NEVER: "from memory", comparison.ALWAYS: "after a search"}
SLOWER_NOTE = "It took longer: a search was faster than the draft that decides. Try --search-seconds 1."
STREAM_INTRODUCTION = (
    "These messages are chosen by hand, because the embedded LLM is small and knows little. They illustrate; part 3 "
    "measures. Each search waits {wait:g} s, about what a hosted search takes (--search-seconds). always: retrieves for "
    "every message. gated: a routing rule decides, or the gate retrieves if the need is high (0: the LLM knows, 1: it "
    "must search). An answer that two modes share is generated once and counted in both."
)
MAX_BAR_WIDTH = 54  # characters
POINT_STEP = 2  # the chart shows every second recorded threshold
NEXT_STEPS = {
    "all of it": "knowgate start --docs FOLDER",
    "your documents": "knowgate ask -i --docs FOLDER",
    "your LLM": "knowgate ask -i --docs FOLDER --model openai:NAME@URL",
    "your questions": "knowgate label --data jsonl:FILE --index DIR --out RUN",
    "and a policy": "knowgate fit --labels RUN --out POLICY",
    "and the proof": "knowgate eval --labels TEST_RUN --gates POLICY --out REPORT",
}


def print_title(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, "bold"))


def print_paragraph(console: Console, text: str, name: str = "", style: str = "") -> None:
    """Print an indented paragraph, with an optional name in a column before it."""
    prefix = " " * INDENT + (f"{name:{NAME_WIDTH}}" if name else "")
    indent = " " * len(prefix)
    for line in textwrap.wrap(sanitize_line(text), PAGE_WIDTH, initial_indent=prefix, subsequent_indent=indent):
        console.print(Text(line, style))


def print_pair(console: Console, question: Question, answers: comparison.AnswersByMode) -> None:
    """Print a question with its answers without and with passages, and the decision of the gate."""
    print_paragraph(console, question.text, style="bold")
    for mode, name in PAIR_MODES.items():
        mark, style = MARKS[comparison.is_right(answers[mode])]
        print_paragraph(console, f"{answers[mode].text} ({mark})", name, style)
    decision = answers[comparison.GATED].decision
    print_paragraph(console, f"{_format_verdict(decision)}: {decision.reason}", "the gate says")


def print_row(console: Console, message: Question, answers: comparison.AnswersByMode) -> None:
    """Print a message, a mark for the answer of each mode, and the gate's decision."""
    *first_lines, last_line = textwrap.wrap(sanitize_line(message.text), MESSAGE_WIDTH - 1) or [""]
    for line in first_lines:
        console.print(Text(f"{'':{INDENT}}{line}"))
    row = Text(f"{'':{INDENT}}{last_line:{MESSAGE_WIDTH}}")
    for mode in comparison.MODES:
        mark, style = MARKS[comparison.is_right(answers[mode])]
        row.append(f"{mark:{MARK_WIDTH}}", style)
    gated = answers[comparison.GATED]
    row.append(_format_decision(gated.decision))
    console.print(row)
    if "asked" in gated.question.meta:  # the original text of a question that was rewritten
        print_paragraph(console, f"understood as: {gated.question.text}", style="dim")


def print_totals(console: Console, totals: Mapping[str, comparison.AnswerTotals]) -> None:
    """Print right answers, searches and seconds of each mode as a table."""
    sums = totals.values()
    rows = {
        f"right answers, of {totals[comparison.GATED].graded}": [str(total.right) for total in sums],
        "searches": [str(total.searches) for total in sums],
        "seconds": [f"{total.seconds:.1f}" for total in sums],
    }
    console.print(Text(_format_row("in sum", totals).rstrip(), "dim"))
    for name, cells in rows.items():
        console.print(Text(_format_row(name, cells).rstrip(), "bold"))


def _format_row(name: str, cells: Iterable[str]) -> str:
    """Format a row of the table: a name, and one cell for each mode."""
    return f"{'':{INDENT}}{name:{MESSAGE_WIDTH}}" + "".join(f"{cell:{MARK_WIDTH}}" for cell in cells)


def _format_decision(decision: Decision) -> Text:
    """Format a decision with the rule that decided, or the need that the gate computed."""
    basis = decision.rule or f"{decision.need:.2f}"
    return Text(f"{_format_verdict(decision)}, {basis}", "yellow" if decision.retrieve else "green")


def _format_verdict(decision: Decision) -> str:
    return "search" if decision.retrieve else "skip"


def summarize_totals(totals: Mapping[str, comparison.AnswerTotals]) -> str:
    """Summarize the searches, seconds and right answers of the gate, compared with always searching."""
    always, gated = totals[comparison.ALWAYS], totals[comparison.GATED]
    saved = always.searches - gated.searches
    change = gated.right - always.right
    direction = "more" if change > 0 else "fewer"
    answers = f"{abs(change)} {direction}" if change else "as many"
    summary = f"The gate saved {saved} of {always.searches} searches, with {answers} right answers"
    if gated.seconds > always.seconds:
        return f"{summary}. {SLOWER_NOTE}"
    return f"{summary}, in {gated.seconds:.0f} s instead of {always.seconds:.0f}."


# --- recorded results -----------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordedPoint:
    """Recorded results of the gate at one threshold.

    Attributes:
        searched: Share of questions that were retrieved for.
        right: Share of right answers.
        gain: Share of right answers minus the share with always searching.
        low: Lower end of the 95 % interval of the gain.
        high: Upper end of the 95 % interval of the gain.
    """

    searched: float
    right: float
    gain: float
    low: float
    high: float


@dataclass(frozen=True)
class DemoRecord:
    """Recorded results of an 8B LLM, from `judge.json`.

    Attributes:
        predictions: File of predictions from which the results were computed.
        questions: Number of questions.
        never: Share of right answers without searching.
        always: Share of right answers if every question is retrieved for.
        weighed: Share of right answers if every question is retrieved for and an arbiter weighs the answers
            with and without passages.
        oracle: Share of right answers if the better of the two answers were always chosen.
        points: Results of the gate at several thresholds.
    """

    predictions: str
    questions: int
    never: float
    always: float
    weighed: float
    oracle: float
    points: tuple[RecordedPoint, ...]


def read_demo_record() -> DemoRecord:
    """Read the results of an 8B LLM that were recorded for the demo. They are a file in this package."""
    file = comparison.demo_folder() / "judge.json"
    return read_record(DemoRecord, read_json(file), str(file))


def render_chart(record: DemoRecord, block: str) -> Iterator[str]:
    """Yield the lines of a bar chart of right answers.

    A full bar is `oracle`: always choosing the better of both answers.

    Args:
        record: The recorded results.
        block: Character that bars are made of.
    """
    bars = [
        ("never", 0.0, record.never),
        *(("gated", point.searched, point.right) for point in record.points[::POINT_STEP]),
        ("always", 1.0, record.always),
        ("arbiter", 1.0, record.weighed),
    ]
    yield f"{'':8}{'searches':>8}  right answers"
    for name, searched, right in bars:
        bar = block * round(MAX_BAR_WIDTH * right / record.oracle)
        yield f"{name:8}{searched:8.0%}  {bar} {right:.1%}"


def summarize_record(record: DemoRecord) -> str:
    """Summarize the right answers gained and the searches saved by the gate, compared with always searching."""
    fewest_searches = record.points[0]  # points are sorted by their searches
    significant = [point for point in record.points if point.low > 0]
    described = [fewest_searches] if fewest_searches in significant else [fewest_searches, *significant[:1]]
    gains = "; ".join(_format_gain(point) for point in described)
    saved = round((1 - fewest_searches.searched) * SAVINGS_QUESTIONS, -3)
    extra_calls = SAVINGS_QUESTIONS - saved  # after each search, the LLM answers a second time
    return (
        f"Against always searching, in points of right answers: {gains} (95 % intervals). The first saves "
        f"about {saved:,.0f} of {SAVINGS_QUESTIONS:,} searches for {extra_calls:,.0f} more LLM calls."
    )


def _format_gain(point: RecordedPoint) -> str:
    """Format a gain with its interval, as '+1.0 [-1.0, +3.0] with 50% of the searches'."""
    gain, low, high = (f"{100 * value:+.1f}" for value in (point.gain, point.low, point.high))
    return f"{gain} [{low}, {high}] with {point.searched:.0%} of the searches"


# --- tour -----------------------------------------------------------------------------------------


def run_tour(options: DemoOptions, console: Console) -> None:
    """Load the LLM and print the tour."""
    messages = comparison.load_demo_messages(options.limit)
    conversation = _print_first_question(options, console)
    print_title(console, f"2. A stream of {len(messages)} messages, as people write them")
    print_paragraph(console, STREAM_INTRODUCTION.format(wait=_get_wait_seconds(options)))
    _print_stream(console, conversation, messages)
    _print_record(console)
    print_title(console, "4. Next")
    for name, command in NEXT_STEPS.items():
        print_paragraph(console, command, name)


def run_quick_tour(options: DemoOptions, console: Console) -> None:
    """Print the first question alone. Where no LLM can run, print the recorded results instead."""
    try:
        _print_first_question(options, console)
    except MissingExtra as error:
        _print_record(console)
        print_paragraph(console, f"Only recorded results are shown: {error}")


def _print_first_question(options: DemoOptions, console: Console) -> Conversation:
    """Load the LLM and print one question answered with and without a search.

    Returns:
        A conversation with the loaded LLM, for the rest of the tour.
    """
    inform(f"Loading {options.model} (takes longest the first time) ...")
    conversation = _load(options)
    print_title(console, f"1. One question, two ways ({options.model}, on this machine)")
    for question in comparison.load_demo_messages(name=comparison.PAIR_FILE):
        print_pair(console, question, comparison.answer_in_modes(conversation, question))
    return conversation


def _get_wait_seconds(options: DemoOptions) -> float:
    """Return how many seconds each search waits."""
    return DEFAULT_SEARCH_SECONDS if options.search_seconds is None else options.search_seconds


def _load(options: DemoOptions) -> Conversation:
    """Load the LLM, the gate and the index into a conversation. A first decision warms up the LLM."""
    index = load_retriever(str(build_cached_index(comparison.demo_folder() / "handbook", "bm25")))
    retriever = comparison.DelayedRetriever(index, _get_wait_seconds(options))
    llm = load_model(options.model)
    is_default = options.gate == DEFAULT_GATE
    gate = default_gate(llm, AnswerPrompts().fingerprint) if is_default else load_gate(options.gate)
    rag = AdaptiveRAG(llm, gate, retriever, threshold=options.threshold, k=2)
    rag.decide("Who is there?")
    return Conversation(rag)


def _print_stream(console: Console, conversation: Conversation, messages: Sequence[Question]) -> None:
    """Answer the messages and print a row for each, then the sums of all modes."""
    console.print(Text(f"{_format_row('message', comparison.MODES)}the gate", "dim"))
    answers: dict[str, list[Answer]] = {mode: [] for mode in comparison.MODES}
    for message in messages:
        by_mode = comparison.answer_in_modes(conversation, message)
        print_row(console, message, by_mode)
        for mode, answer in by_mode.items():
            answers[mode].append(answer)
    totals = {mode: comparison.sum_answers(answers[mode]) for mode in comparison.MODES}
    print_totals(console, totals)
    print_paragraph(console, summarize_totals(totals))


def _print_record(console: Console) -> None:
    """Print the recorded results of an 8B LLM, as a chart with a legend and a summary."""
    record = read_demo_record()
    print_title(console, "3. An 8B LLM behind an API that returns only text (recorded)")
    print_paragraph(
        console,
        f"Llama-3.1-8B-Instruct on {record.questions:,} questions. Gated: a small judge reads the draft and decides "
        "whether to search; after a search, an arbiter chooses an answer. Arbiter: always search, then the arbiter chooses. "
        "The models were selected by this result, so expect less. The policies in README were chosen on training "
        "questions; their test questions were not fresh.",
    )
    block = "#" if console.options.ascii_only else "█"
    for line in render_chart(record, block):
        console.print(f"  {line}")
    print_paragraph(console, summarize_record(record))
