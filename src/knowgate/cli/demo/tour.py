"""The tour of `knowgate demo`, part by part. Every figure is measured now or comes out of records."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from knowgate.cli.demo.comparison import (
    ALWAYS,
    GATED,
    MODES,
    NEVER,
    PAIR_FILE,
    DelayedRetriever,
    DemoConversation,
    DemoOutcome,
    OutcomesByMode,
    OutcomeTotals,
    build_mode_pipelines,
    demo_folder,
    demo_messages,
    sum_outcomes,
)
from knowgate.cli.progress import show_waiting
from knowgate.core.display import sanitize_line
from knowgate.core.schema import read_record
from knowgate.core.validation import read_json
from knowgate.evaluation.cost import DEFAULT_SEARCH_SECONDS, SAVINGS_QUESTIONS
from knowgate.gates import DEFAULT_GATE, default_gate, load_gate
from knowgate.gates.rules.rule_set import load_rules
from knowgate.models import load_model
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.pipeline.adaptive_rag import AdaptiveRAG
from knowgate.pipeline.builder import build_cached_index
from knowgate.pipeline.conversation import Conversation
from knowgate.retrieval import load_retriever
from knowgate.types import Decision, Question

PAGE_WIDTH, INDENT = 80, 2
MESSAGE_WIDTH, MARK_WIDTH, NAME_WIDTH = (
    40,
    7,
    16,
)  # columns of a message, a mark, and of what stands before a wrapped text
MARKS = {True: ("right", "green"), False: ("wrong", "red"), None: ("-", "dim")}
PAIR_MODES = {NEVER: "from memory", ALWAYS: "after a search"}
SLOWER_NOTE = (
    "Gated took longer than always here: a search was cheaper than the draft that decides. Try --search-seconds 1."
)


@dataclass(frozen=True)
class DemoPage:
    """Where the demo is told."""

    console: Console

    @property
    def block(self) -> str:
        """What bars are made of."""
        return "#" if self.console.options.ascii_only else "█"

    def title(self, text: str) -> None:
        self.console.print()
        self.console.print(Text(text, "bold"))

    def say(self, text: str, name: str = "", style: str = "") -> None:
        """A text within the columns; name: stands before it, in a column of its own."""
        before = " " * INDENT + (f"{name:{NAME_WIDTH}}" if name else "")
        rest = " " * len(before)
        for line in textwrap.wrap(sanitize_line(text), PAGE_WIDTH, initial_indent=before, subsequent_indent=rest):
            self.console.print(Text(line, style))

    # --- one question, two ways ---------------------------------------------------------------------

    def say_both(self, question: Question, outcomes: OutcomesByMode) -> None:
        self.say(question.text, style="bold")
        for way, name in PAIR_MODES.items():
            mark, style = MARKS[outcomes[way].is_right]
            self.say(f"{outcomes[way].answer.text} ({mark})", name, style)
        decision = outcomes[GATED].answer.decision
        self.say(f"{_verdict(decision)}: {decision.reason}", "the gate says")

    # --- row by row -------------------------------------------------------------------------------

    def head(self) -> None:
        self.console.print(Text(f"{_row('message', MODES)}the gate", "dim"))

    def begin(self, message: Question) -> None:
        *lines, last = textwrap.wrap(sanitize_line(message.text), MESSAGE_WIDTH - 1) or [""]
        for line in lines:
            self.console.print(Text(f"{'':{INDENT}}{line}"))
        self.console.print(Text(f"{'':{INDENT}}{last:{MESSAGE_WIDTH}}"), end="")

    def mark(self, outcome: DemoOutcome) -> None:
        words, style = MARKS[outcome.is_right]
        self.console.print(Text(f"{words:{MARK_WIDTH}}", style), end="")

    def finish(self, outcomes: OutcomesByMode) -> None:
        decision, question = outcomes[GATED].answer.decision, outcomes[GATED].answer.question
        said = (
            f"{_verdict(decision)}, {decision.rule}" if decision.rule else f"{_verdict(decision)}, {decision.need:.2f}"
        )
        self.console.print(Text(said, "yellow" if decision.retrieve else "green"))
        if "asked" in question.meta:
            self.say(f"understood as: {question.text}", style="dim")

    # --- in sum -----------------------------------------------------------------------------------

    def table(self, sums: Mapping[str, OutcomeTotals]) -> None:
        rows = {
            f"right answers, of {sums[GATED].graded}": [f"{sums[way].right}" for way in MODES],
            "searches": [f"{sums[way].searches}" for way in MODES],
            "tokens of passages and answers": [f"{sums[way].tokens:,}" for way in MODES],
            "seconds": [f"{sums[way].seconds:.1f}" for way in MODES],
        }
        self.console.print(Text(_row("in sum", MODES).rstrip(), "dim"))
        for name, cells in rows.items():
            self.console.print(Text(_row(name, cells).rstrip(), "bold"))


def _row(name: str, cells: Sequence[str]) -> str:
    return f"{'':{INDENT}}{name:{MESSAGE_WIDTH}}" + "".join(f"{cell:{MARK_WIDTH}}" for cell in cells)


def _verdict(decision: Decision) -> str:
    return "search" if decision.retrieve else "skip"


def summarize_totals(sums: Mapping[str, OutcomeTotals]) -> str:
    """What to conclude, whichever way it went."""
    always, gated = sums[ALWAYS], sums[GATED]
    saved, change = always.searches - gated.searches, gated.right - always.right
    answers = "as many" if not change else f"{abs(change)} {'more' if change > 0 else 'fewer'}"
    said = f"The gate saved {saved} of {always.searches} searches, with {answers} right answers"
    if gated.seconds > always.seconds:
        return f"{said}. {SLOWER_NOTE}"
    return f"{said}, in {gated.seconds:.0f} s instead of {always.seconds:.0f}."


MAX_BAR_WIDTH = 54  # characters of a bar
POINT_STEP = 2  # every so many of the points


@dataclass(frozen=True)
class RecordedPoint:
    """The gate at one threshold. gain, low, high: right answers against always searching, with the 95 % interval."""

    searched: float
    right: float
    gain: float
    low: float
    high: float


@dataclass(frozen=True)
class DemoRecord:
    """Shares of right answers. weighed: always searching, and an arbiter gives the better answer; oracle: of somebody
    who always knew which of both to give.
    """

    predictions: str
    questions: int
    never: float
    always: float
    weighed: float
    oracle: float
    points: tuple[RecordedPoint, ...]


def read_demo_record() -> DemoRecord:
    file = demo_folder() / "judge.json"
    return read_record(DemoRecord, read_json(file), str(file))


def render_chart(record: DemoRecord, block: str) -> Iterator[str]:
    """A bar for each way, all from 0. block: the character bars are made of."""
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
    """What the gate does at its fewest searches, and at the fewest where it is surely better than always searching."""
    few, surely = record.points[0], [point for point in record.points if point.low > 0]
    said = [_against(point) for point in dict.fromkeys((few, *surely[:1]))]
    saved = round((1 - few.searched) * SAVINGS_QUESTIONS, -3)
    return (
        f"Against always searching, in points of right answers: {'; '.join(said)} (95 % intervals). The first saves "
        f"about {saved:,.0f} of {SAVINGS_QUESTIONS:,} searches."
    )


def _against(point: RecordedPoint) -> str:
    gain, low, high = (f"{100 * value:+.1f}" for value in (point.gain, point.low, point.high))
    return f"{gain} [{low}, {high}] with {point.searched:.0%} of the searches"


NEXT_STEPS = {
    "all of it": "knowgate start --docs FOLDER",
    "your documents": "knowgate ask -i --docs FOLDER",
    "your LLM": "knowgate ask -i --docs FOLDER --model openai:NAME@URL",
    "your questions": "knowgate label --data jsonl:FILE --index DIR --out RUN",
    "a gate for them": "knowgate fit fusion --labels RUN --out GATE",
    "only text back?": "knowgate fit judge --labels RUN --out GATE",
    "and the proof": "knowgate eval --labels RUN --gates GATE --out REPORT",
}


@dataclass(frozen=True)
class DemoTour:
    """What is shown, and on what. None: as everywhere else in knowgate."""

    model: str
    gate: str = DEFAULT_GATE
    threshold: float | None = None
    limit: int | None = None
    search_seconds: float | None = None

    def give(self, console: Console) -> None:
        page, messages = DemoPage(console), demo_messages(self.limit)
        with show_waiting(f"Loading {self.model} (takes longest the first time)"):
            talk = self._open()
        page.title(f"1. One question, two ways ({self.model}, on this machine)")
        for question in demo_messages(name=PAIR_FILE):
            page.say_both(question, talk.answer(question))
        page.title(f"2. A stream of {len(messages)} messages, as people write them")
        page.say(
            "Picked by hand, as the embedded LLM is small and knows little: a picture, no proof; that is part 3. Each "
            f"search waits {self._wait:g} s, about what a hosted one takes (--search-seconds). always: one for every "
            "message. gated: by a rule, or where need is high (0: the LLM knows, 1: it must look up). An answer that "
            "two ways share is made once and counted in both."
        )
        _stream(page, talk, messages)
        _records(page)
        page.title("4. Next")
        for name, line in NEXT_STEPS.items():
            page.say(line, name)

    @property
    def _wait(self) -> float:
        return DEFAULT_SEARCH_SECONDS if self.search_seconds is None else self.search_seconds

    def _open(self) -> DemoConversation:
        """Everything loaded, and one question decided, so that no clock counts the start."""
        retriever = DelayedRetriever(
            load_retriever(str(build_cached_index(demo_folder() / "handbook", "bm25"))), self._wait
        )
        llm = load_model(self.model)
        gate = default_gate(llm, AnswerPrompts().fingerprint) if self.gate == DEFAULT_GATE else load_gate(self.gate)
        rag = AdaptiveRAG(llm, gate, retriever, threshold=self.threshold, k=2, rules=load_rules())
        rag.decide("Who is there?")
        return DemoConversation(build_mode_pipelines(rag), Conversation(rag))


def _stream(page: DemoPage, talk: DemoConversation, messages: Sequence[Question]) -> None:
    """Rows that grow while they are answered, then the sums."""
    page.head()
    answered = []
    for message in messages:
        page.begin(message)
        answered.append(talk.answer(message, page.mark))
        page.finish(answered[-1])
    sums = sum_outcomes(answered)
    page.table(sums)
    page.say(summarize_totals(sums))


def _records(page: DemoPage) -> None:
    record = read_demo_record()
    page.title("3. An 8B LLM behind an API, which gives nothing but text (from records)")
    page.say(
        f"Llama-3.1-8B-Instruct on {record.questions:,} questions. Gated: a small judge reads its draft and decides, "
        "and after a search an arbiter gives the better answer. Arbiter: it does so after every search."
    )
    for line in render_chart(record, page.block):
        page.console.print(f"  {line}")
    page.say(summarize_record(record))
