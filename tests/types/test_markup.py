from knowgate.types.markup import escape_html, render_html_table


def test_markup_in_a_text_stays_a_text():
    assert escape_html("<b>&\"'") == "&lt;b&gt;&amp;&quot;&#x27;"


def test_a_lone_surrogate_is_written_as_an_escape():
    assert escape_html("a\ud800b") == "a\\ud800b"


def test_every_cell_and_the_caption_are_escaped():
    shown = render_html_table(("<h>", "<k>"), [("<a>", "<b>")], "<c>")
    assert "&lt;h&gt;" in shown
    assert all(f"<{letter}>" not in shown for letter in "hkabc")


def test_the_last_cell_of_a_short_row_spans_the_rest():
    assert 'colspan="3">nothing was found' in render_html_table(
        ("a", "b", "c", "d"), [("x", "nothing was found")]
    ).replace('"text-align:left" ', "")


def test_a_header_of_empty_cells_is_omitted():
    assert "<thead>" not in render_html_table(("", ""), [("model", "fake")])
