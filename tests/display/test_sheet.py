from knowgate.display.sheet import Sheet, markdown_tables, points_with_interval, share_with_interval
from knowgate.statistics import Estimate

SHEET = Sheet("Answers", ("gate", "right"), (("always", "5"), ("a", "12")))


def test_text_has_its_cells_under_each_other():
    assert SHEET.text() == "gate    right\nalways  5\na       12"


def test_a_remark_does_not_widen_a_column():
    sheet = Sheet("t", ("gate", "right"), (("a", "1"), ("nothing was found here",)))
    assert sheet.text() == "gate  right\na     1\nnothing was found here"


def test_what_could_steer_a_terminal_is_replaced():
    assert Sheet("t", ("a",), (("\x1b[31mred",),)).text() == "a\n\ufffd[31mred"


def test_markdown_has_the_title_and_keeps_its_columns():
    sheet = Sheet("Answers", ("gate", "right"), (("a|b", "1"),))
    assert sheet.markdown() == "### Answers\n\n| gate | right |\n| --- | --- |\n| a/b | 1 |\n"


def test_several_tables_are_one_file():
    assert markdown_tables([SHEET, SHEET]) == SHEET.markdown() + "\n" + SHEET.markdown()


def test_html_escapes_what_the_cells_say():
    shown = Sheet("<t>", ("gate",), (("<script>",),)).html()
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert "<caption>&lt;t&gt;</caption>" in shown


def test_shares_and_differences_with_their_intervals():
    assert share_with_interval(Estimate(0.5, 0.25, 0.75)) == "50.0 % [25.0, 75.0]"
    assert share_with_interval(Estimate(0.5)) == "50.0 %"
    assert points_with_interval(Estimate(0.05, -0.01, 0.11)) == "+5.0 [-1.0, +11.0]"
    assert points_with_interval(Estimate(None)) == "–"
