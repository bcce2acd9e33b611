"""Tables on a narrow terminal: columns are left out and named; nothing is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from knowgate.core.display import TextTable
from knowgate.evaluation.report.terminal import TerminalTable

WIDE = TextTable(
    "Answers",
    ("gate", "accuracy", "gain over random", "what it does"),
    (
        (
            "logprob:mean",
            "61.0 % [55.1, 67.2]",
            "+9.9 [+7.0, +12.8]",
            "it looks at the draft, token by token, and then",
        ),
        ("never", "54.2 % [47.4, 60.9]", "0.0", "nothing"),
    ),
)


def shown(table: TextTable, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(TerminalTable(table))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_wide_terminal_has_every_cell_on_one_line():
    lines = shown(WIDE, 120)
    assert len(lines) == 3
    assert "61.0 % [55.1, 67.2]  +9.9 [+7.0, +12.8]  it looks at the draft, token by token, and then" in lines[1]


@pytest.mark.parametrize("width", range(30, 121, 5))
def test_no_line_is_wider_and_no_word_or_interval_is_cut(width: int):
    text = "\n".join(shown(WIDE, width))
    assert all(len(line) <= width for line in text.splitlines())
    for unit in ("logprob:mean", "[55.1, 67.2]", "accuracy"):
        assert unit in text


def test_an_interval_that_does_not_fit_goes_below_its_number():
    first, second = shown(WIDE, 46)[2:4]
    assert first.split() == ["logprob:mean", "61.0", "%", "+9.9"]
    assert second.split() == ["[55.1,", "67.2]", "[+7.0,", "+12.8]"]


def test_columns_that_do_not_fit_are_listed():
    assert shown(WIDE, 60)[-1] == "(no room for: what it does)"


def test_a_name_beside_a_remark_is_not_cut():
    table = TextTable("", ("run", "n", "share"), (("qwen2.5-coder-1.5b", "no open-book answers in this run"),))
    assert shown(table, 80)[1].startswith("qwen2.5-coder-1.5b  no")


def test_long_texts_wrap_at_a_readable_width():
    table = TextTable("", ("gate", "why"), (("a", "word " * 20),))
    assert len(shown(table, 40)) == 1 + 3


def test_a_remark_shorter_than_the_columns_is_shown():
    assert "none" in shown(TextTable("", ("a", "b", "c"), (("", "", "none"), ("x", "none"))), 80)[1]


def test_chinese_cells_count_two_columns_a_character():
    table = TextTable("", ("问题", "答"), (("法国的首都是哪里", "巴黎"),))
    assert shown(table, 40)[1].rstrip() == "法国的首都是哪里  巴黎"
