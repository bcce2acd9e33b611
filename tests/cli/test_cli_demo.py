"""`knowgate demo`: what it tells, that it fits 80 columns, and where its figures come from."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from knowgate.cli.demo.comparison import (
    ALWAYS,
    GATED,
    MODES,
    PAIR_FILE,
    AnswerTotals,
    DelayedRetriever,
    demo_folder,
    extract_closed_book_answer,
    extract_open_book_answer,
    load_demo_messages,
    sum_answers,
)
from knowgate.cli.demo.tour import (
    MAX_BAR_WIDTH,
    MESSAGE_WIDTH,
    NEXT_STEPS,
    PAGE_WIDTH,
    SLOWER_NOTE,
    DemoRecord,
    RecordedPoint,
    read_demo_record,
    render_chart,
    summarize_record,
    summarize_totals,
)
from knowgate.types import Answer, ArbiterChoice, Completion, Decision, Passage, Question
from tests.cli.conftest import Call
from tests.support import command_lines

QUICK = ("demo", "--model", "fake", "--search-seconds", "0")


@pytest.fixture(scope="module")
def record() -> DemoRecord:
    return read_demo_record()


def outcome(*, retrieve: bool = False, right: bool | None = None, seconds: float = 1.0, **rest: object) -> Answer:
    asked = Question("q?", answers=() if right is None else ("yes",))
    decision = Decision(retrieve, 0.5, 0.5, "g", "")
    answer = Answer(asked, "yes" if right else "no", decision, seconds={"total": seconds})
    return replace(answer, **rest)  # type: ignore[arg-type]


STAGES = {"read": 1.0, "gate": 2.0, "retrieve": 4.0, "fit": 8.0, "answer": 16.0, "total": 31.0}


def searched(draft: Completion) -> Answer:
    """An answer that the gate had looked up."""
    decision = Decision(True, 0.9, 0.5, "g", "")
    return Answer(Question("q?"), "open", decision, (Passage("p", "t"),), seconds=STAGES, draft=draft)


# --- the tour -------------------------------------------------------------------------------------


def test_demo_tells_all_four_parts_in_order(call: Call):
    outcome = call(*QUICK, "--limit", "2")
    assert outcome.code == 0
    heads = [line for line in outcome.out.splitlines() if line[:2] in ("1.", "2.", "3.", "4.")]
    assert [head[0] for head in heads] == list("1234")


@pytest.mark.parametrize("is_slower", [False, True])
def test_demo_is_short_and_no_line_is_wider_than_80_columns(call: Call, monkeypatch, is_slower: bool):
    def summarize(totals: dict[str, AnswerTotals]) -> str:
        seconds = {ALWAYS: 1.0, GATED: 1.0 + is_slower}
        return summarize_totals({mode: replace(totals[mode], seconds=seconds[mode]) for mode in seconds})

    monkeypatch.setattr("knowgate.cli.demo.tour.summarize_totals", summarize)
    lines = call(*QUICK).out.splitlines()
    assert any("It took longer" in line for line in lines) == is_slower
    assert len(lines) <= 71
    assert [line for line in lines if len(line.rstrip()) > PAGE_WIDTH] == []


def test_every_message_has_a_row_with_three_marks(call: Call):
    lines = call(*QUICK).out.splitlines()
    for message in load_demo_messages():
        (row,) = [line for line in lines if line.startswith(f"  {message.text}") and "s" in line[MESSAGE_WIDTH:]]
        marks = row[MESSAGE_WIDTH + 2 :].split()[:3]
        assert set(marks) <= ({"right", "wrong"} if message.answers else {"-"})


def test_demo_says_how_long_a_search_waits(call: Call):
    out = call("demo", "--model", "fake", "--limit", "1", "--search-seconds", 0.01).out
    assert "search waits 0.01 s" in " ".join(out.split())


@pytest.mark.parametrize("seconds", ["-1", "nan", "11"])
def test_demo_refuses_a_wait_out_of_bounds(call: Call, seconds: str):
    outcome = call("demo", "--model", "fake", "--search-seconds", seconds)
    assert (outcome.code in (1, 2), outcome.out) == (True, "")
    assert "--search-seconds" in outcome.err


def test_demo_says_what_it_is_about_before_anything_heavy_loads():
    import subprocess
    import sys

    said = "import sys, knowgate.cli.demo; print([name for name in ('torch', 'numpy', 'bm25s') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", said], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("line", NEXT_STEPS.values(), ids=NEXT_STEPS)
def test_what_to_type_next_can_be_typed(line: str):
    (words,) = command_lines.programs(line)
    command_lines.check(command_lines.root(), words[1:])


# --- messages -------------------------------------------------------------------------------------


def test_the_stream_is_mixed_as_traffic_is():
    kinds = [message.meta["kind"] for message in load_demo_messages()]
    assert set(kinds) == {"small talk", "general", "handbook", "arithmetic", "follow-up"}
    assert kinds[kinds.index("follow-up") - 1] == "handbook"


def test_every_message_fits_its_column():
    assert [message.text for message in load_demo_messages() if len(message.text) >= MESSAGE_WIDTH] == []


@pytest.mark.parametrize("name", ["messages.jsonl", PAIR_FILE])
def test_what_the_handbook_is_asked_stands_in_it(name: str):
    for message in load_demo_messages(name=name):
        if doc := message.meta.get("doc"):
            text = (demo_folder() / "handbook" / doc).read_text(encoding="utf-8")
            assert any(gold in text for gold in message.answers), message.text


# --- counting -------------------------------------------------------------------------------------


def test_a_distant_search_waits_and_finds_the_same():
    class Near:
        name, fingerprint = "near", "f"

        def search(self, queries, k):
            return [[Passage("p", "text")] for _ in queries]

    start = time.perf_counter()
    assert DelayedRetriever(Near(), 0.05).search(["q"], 1) == [[Passage("p", "text")]]
    assert time.perf_counter() - start >= 0.05


def test_what_the_gate_skipped_is_the_answer_from_memory_without_the_gate():
    gated = Answer(Question("q?"), "yes", Decision(False, 0.1, 0.5, "g", ""), seconds=STAGES, draft=Completion("y"))
    shared = extract_closed_book_answer(gated, 32)
    assert shared is not None
    assert (shared.text, shared.seconds["total"], shared.draft) == ("yes", 1 + 16, None)
    assert extract_open_book_answer(gated) is None


def test_what_the_gate_searched_for_is_the_answer_after_a_search_without_draft_and_gate():
    gated = searched(Completion("from memory", n_tokens=3, finished=True))
    shared = extract_open_book_answer(gated)
    assert shared is not None
    assert (shared.text, shared.seconds["total"], shared.draft) == ("open", 4 + 8 + 16, None)


def test_a_whole_draft_is_the_answer_from_memory_and_half_a_draft_is_not():
    whole = extract_closed_book_answer(searched(Completion("from memory", n_tokens=3, finished=True)), 32)
    assert whole is not None
    assert (whole.text, whole.n_tokens, whole.passages, whole.decision.retrieve) == ("from memory", 3, (), False)
    assert whole.seconds["total"] == 1
    assert extract_closed_book_answer(searched(Completion("from", n_tokens=1, finished=False)), 32) is None


def test_after_a_search_counts_what_the_passages_gave_though_an_arbiter_gave_the_draft():
    choice = ArbiterChoice(True, "rules", "", closed="from memory", open="I cannot tell")
    shared = extract_open_book_answer(replace(searched(Completion("from memory")), text="from memory", choice=choice))
    assert shared is not None
    assert shared.text == "I cannot tell"


def test_small_talk_is_neither_right_nor_wrong():
    total = sum_answers([outcome(), outcome(right=True), outcome(right=False, retrieve=True)])
    assert (total.right, total.graded, total.searches) == (1, 2, 1)


def test_the_verdict_tells_searches_answers_and_seconds():
    always = sum_answers(
        [outcome(retrieve=True, right=False, seconds=9), outcome(retrieve=True, right=True, seconds=9)]
    )
    gated = sum_answers([outcome(right=True, seconds=2), outcome(retrieve=True, right=True, seconds=10)])
    sums = dict(zip(MODES, (gated, always, gated), strict=True))
    assert summarize_totals(sums) == "The gate saved 1 of 2 searches, with 1 more right answers, in 12 s instead of 18."


def test_the_verdict_says_why_gated_is_slower_where_it_is():
    always, gated = sum_answers([outcome(retrieve=True, seconds=1)]), sum_answers([outcome(seconds=2)])
    assert SLOWER_NOTE in summarize_totals(dict(zip(MODES, (gated, always, gated), strict=True)))


# --- records --------------------------------------------------------------------------------------


def test_the_chart_has_a_bar_for_every_way(record: DemoRecord):
    lines = list(render_chart(record, "#"))
    assert [line.split()[0] for line in lines[1:]] == ["never", "gated", "gated", "gated", "always", "arbiter"]
    assert f"{record.always:.1%}" in lines[-2]
    assert lines[-2].count("#") == round(MAX_BAR_WIDTH * record.always / record.oracle)
    assert f"{record.weighed:.1%}" in lines[-1]


def test_the_conclusion_names_the_fewest_searches_and_the_fewest_that_are_surely_better():
    points = (RecordedPoint(0.5, 0.4, 0.01, -0.01, 0.03), RecordedPoint(0.8, 0.42, 0.03, 0.01, 0.05))
    said = summarize_record(DemoRecord("p", 10, 0.3, 0.39, 0.41, 0.5, points))
    assert "+1.0 [-1.0, +3.0] with 50% of the searches; +3.0 [+1.0, +5.0] with 80% of the searches" in said
    assert said.endswith("The first saves about 50,000 of 100,000 searches for 50,000 more LLM calls.")
