"""The page "paper element -> command": every table and figure is answered, by commands that can be typed."""

import re
import shlex

import pytest

from knowgate.training.examples import MIN_GRADED_ROWS, MIN_ROWS_PER_CLASS
from tests.support import command_lines
from tools.structure import ROOT

PAGE = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
SECTIONS = {
    "KBM": ("Figure 1", "Figure 2", "Figure 3", "Table 1", "Figure 5", "Table 2", "Table 3", "Figure 6", "Table 4",
            "Figure 8", "saved at a threshold"),
    "IK": ("draft tokens T", "training size", "whose labels", "thresholds", "histogram"),
    "CBDR": ("Table 1", "Table 2", "Table 3"),
    "DH-ICL": ("Table 1", "Table 2", "Table 3", "Figures 2, 3", "Figure 4", "Figures 8, 9", "Table 4", "Table 5",
               "Figure 6", "Table 6"),
}  # fmt: skip
COMMANDS = sorted(set(re.findall(r"`(knowgate [^`]+)`", PAGE)))


def lines_of(paper: str) -> list[list[str]]:
    """The table of one paper: the cells of each line."""
    section = re.split(r"^## ", PAGE.partition(f"\n## {paper}")[2], flags=re.MULTILINE)[0]
    return [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]


@pytest.fixture(scope="module")
def top():
    return command_lines.root()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_page_is_taken_as_it_is_written(command, top):
    command_lines.check(top, shlex.split(command)[1:])


@pytest.mark.parametrize(("paper", "element"), [(paper, one) for paper, all_ in SECTIONS.items() for one in all_])
def test_every_table_and_figure_is_answered_by_a_command(paper, element):
    answers = [command for named, command, _ in lines_of(paper) if element in named]
    assert answers
    assert all(command.startswith("`knowgate ") for command in answers)


def test_the_page_says_how_many_rows_a_fit_needs():
    assert f"at least {MIN_GRADED_ROWS} graded rows, {MIN_ROWS_PER_CLASS} of each kind" in PAGE
