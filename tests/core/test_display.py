import pytest

from knowgate.core.display import (
    MISSING_VALUE,
    TextTable,
    format_number,
    format_percent,
    format_points,
    render_markdown_tables,
)
from knowgate.stats.bootstrap import Estimate
from knowgate.stats.proportions import (
    estimate_proportion,
    format_percent_estimate,
    format_points_estimate,
    format_proportion,
)

SHEET = TextTable("Answers", ("gate", "right"), (("always", "5"), ("a", "12")))


def test_text_output_has_aligned_columns():
    assert SHEET.text() == "gate    right\nalways  5\na       12"


def test_a_short_row_does_not_widen_a_column():
    sheet = TextTable("t", ("gate", "right"), (("a", "1"), ("nothing was found here",)))
    assert sheet.text() == "gate  right\na     1\nnothing was found here"


def test_characters_that_control_a_terminal_are_escaped():
    assert TextTable("t", ("a",), (("\x1b[31mred",),)).text() == "a\n\\x1b[31mred"


def test_markdown_has_the_title_and_keeps_its_columns():
    sheet = TextTable("Answers", ("gate", "right"), (("a|b", "1"),))
    assert sheet.markdown() == "### Answers\n\n| gate | right |\n| --- | --- |\n| a/b | 1 |\n"


def test_several_tables_are_one_file():
    assert render_markdown_tables([SHEET, SHEET]) == SHEET.markdown() + "\n" + SHEET.markdown()


def test_html_escapes_what_the_cells_say():
    shown = TextTable("<t>", ("gate",), (("<script>",),)).html()
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert "<caption>&lt;t&gt;</caption>" in shown


def test_shares_and_differences_with_their_intervals():
    assert format_percent_estimate(Estimate(0.5, 0.25, 0.75)) == "50.0 % [25.0, 75.0]"
    assert format_percent_estimate(Estimate(0.5)) == "50.0 %"
    assert format_points_estimate(Estimate(0.05, -0.01, 0.11)) == "+5.0 [-1.0, +11.0]"
    assert format_points_estimate(Estimate(None)) == "–"
    assert format_points_estimate(Estimate(-0.0, -0.0, 0.0004)) == "0.0 [0.0, 0.0]"
    assert format_percent(-0.0001) == "0.0 %"


@pytest.mark.parametrize(("value", "shown"), [(0.1234, "12.3 %"), (1.0, "100.0 %"), (None, MISSING_VALUE)])
def test_a_share_is_formatted_in_percent(value, shown):
    assert format_percent(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(0.012, "+1.2"), (-0.5, "-50.0"), (-0.0001, "0.0"), (0.0, "0.0")])
def test_a_difference_has_a_sign_unless_it_rounds_to_zero(value, shown):
    assert format_points(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(0.456, "0.46"), (-0.001, "0.00"), (None, MISSING_VALUE)])
def test_a_number_has_two_decimals_and_no_negative_zero(value, shown):
    assert format_number(value) == shown


def test_an_interval_follows_its_share():
    assert (
        format_proportion(estimate_proportion([True] * 26 + [False] * 34)) == "43.3 % [31.6, 55.9], n = 60"
    )  # Wilson, by hand


def test_an_undefined_proportion_is_formatted_as_missing():
    assert format_proportion(estimate_proportion([]), "none") == "none"
