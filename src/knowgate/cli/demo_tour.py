"""The tour of `knowgate demo`, part by part. Every figure is measured now or comes out of records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

from knowgate.cli.demo_record import chart, conclusion, read_demo_record
from knowgate.cli.demo_shown import Page, verdict
from knowgate.cli.demo_traffic import (
    PAIR,
    Distant,
    Talk,
    demo_folder,
    demo_messages,
    three_ways,
    totals,
)
from knowgate.cli.waiting import waiting
from knowgate.evaluation import SEARCH_SECONDS
from knowgate.gates import DEFAULT, default_gate, load_gate
from knowgate.models import load_model
from knowgate.pipeline import AdaptiveRAG, Conversation, cached_index
from knowgate.prompts import AnswerPrompts
from knowgate.retrieval import load_retriever
from knowgate.rules import load_rules
from knowgate.types import Question

NEXT = {
    "all of it": "knowgate start --docs FOLDER",
    "your documents": "knowgate ask -i --docs FOLDER",
    "your LLM": "knowgate ask -i --docs FOLDER --model openai:NAME@URL",
    "your questions": "knowgate label --data jsonl:FILE --index DIR --out RUN",
    "a gate for them": "knowgate fit fusion --labels RUN --out GATE",
    "only text back?": "knowgate fit judge --labels RUN --out GATE",
    "and the proof": "knowgate eval --labels RUN --gates GATE --out REPORT",
}


@dataclass(frozen=True)
class Tour:
    """What is shown, and on what. None: as everywhere else in knowgate."""

    model: str
    gate: str = DEFAULT
    threshold: float | None = None
    limit: int | None = None
    search_seconds: float | None = None

    def give(self, console: Console) -> None:
        page, messages = Page(console), demo_messages(self.limit)
        with waiting(f"Loading {self.model} (takes longest the first time)"):
            talk = self._open()
        page.title(f"1. One question, two ways ({self.model}, on this machine)")
        for question in demo_messages(name=PAIR):
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
        for name, line in NEXT.items():
            page.say(line, name)

    @property
    def _wait(self) -> float:
        return SEARCH_SECONDS if self.search_seconds is None else self.search_seconds

    def _open(self) -> Talk:
        """Everything loaded, and one question decided, so that no clock counts the start."""
        retriever = Distant(load_retriever(str(cached_index(demo_folder() / "handbook", "bm25"))), self._wait)
        llm = load_model(self.model)
        gate = default_gate(llm, AnswerPrompts().fingerprint) if self.gate == DEFAULT else load_gate(self.gate)
        rag = AdaptiveRAG(llm, gate, retriever, threshold=self.threshold, k=2, rules=load_rules())
        rag.decide("Who is there?")
        return Talk(three_ways(rag), Conversation(rag))


def _stream(page: Page, talk: Talk, messages: Sequence[Question]) -> None:
    """Rows that grow while they are answered, then the sums."""
    page.head()
    answered = []
    for message in messages:
        page.begin(message)
        answered.append(talk.answer(message, page.mark))
        page.finish(answered[-1])
    sums = totals(answered)
    page.table(sums)
    page.say(verdict(sums))


def _records(page: Page) -> None:
    record = read_demo_record()
    page.title("3. An 8B LLM behind an API, which gives nothing but text (from records)")
    page.say(
        f"Llama-3.1-8B-Instruct on {record.questions:,} questions. Gated: a small judge reads its draft and decides, "
        "and after a search an arbiter gives the better answer. Arbiter: it does so after every search."
    )
    for line in chart(record, page.block):
        page.console.print(f"  {line}")
    page.say(conclusion(record))
