import pytest

from knowgate.display import NOTHING, Sheet, markdown_tables, number, percent, points, with_interval
from knowgate.statistics import share


@pytest.mark.parametrize(("value", "shown"), [(0.1234, "12.3 %"), (1.0, "100.0 %"), (None, NOTHING)])
def test_a_share_is_shown_in_percent(value, shown):
    assert percent(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(0.012, "+1.2"), (-0.5, "-50.0"), (-0.0001, "0.0"), (0.0, "0.0")])
def test_a_difference_has_its_sign_unless_it_rounds_to_nothing(value, shown):
    assert points(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(0.456, "0.46"), (-0.001, "0.00"), (None, NOTHING)])
def test_a_number_has_two_digits_and_no_negative_zero(value, shown):
    assert number(value) == shown


def test_an_interval_stands_beside_its_share():
    assert with_interval(share([True] * 26 + [False] * 34)) == "43.3 % [31.6, 55.9], n = 60"  # Wilson, by hand


def test_a_share_of_nothing_is_missing():
    assert with_interval(share([]), "none") == "none"


def test_a_bar_in_a_cell_does_not_break_the_table():
    sheet = Sheet("Counts", ("what", "n"), (("a|b", "1"),))
    assert markdown_tables([sheet]) == "### Counts\n\n| what | n |\n| --- | --- |\n| a/b | 1 |\n"
