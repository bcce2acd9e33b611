"""What is shown: no text steers a terminal, is taken for markup, breaks out of a page, a table or a prompt."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from contextlib import redirect_stdout
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from knowgate.cli.ask import StreamedLine
from knowgate.cli.console import create_console, print_json
from knowgate.core.chart import Axis, ChartFrame, ChartPoint, Curve, render_line_chart
from knowgate.core.display import CONTROL_CHARACTERS, TextTable, escape_markdown_code, sanitize_text
from knowgate.evaluation.report.charts import (
    Bar,
    BarGroup,
    PlotArea,
    PlotMark,
    draw_bar_chart,
    draw_line_plot,
)
from knowgate.evaluation.report.charts import PlotLine as Drawn
from knowgate.evaluation.report.html import (
    render_figure,
    render_folded_section,
    render_section,
    render_table,
)
from knowgate.models.prompts.answers import AnswerPrompts
from knowgate.types import Passage, Question
from knowgate.types.markup import escape_html
from tests.support.fuzz import attempt, trying

PIECES = [
    "\x1b[31m",
    "\x1b]8;;http://evil.test\x07",
    "\x1b\\",
    "\x9b2J",
    "\x07",
    "\r",
    "\b",
    "\x00",
    "\x7f",
    "\u202e",
    "\u2066",
    "\u200b",
    "\u2028",
    "\ufeff",
    "\U000e0041",
    "[red]",
    "[/red]",
    "[link=http://x]",
    "[/]",
    "\\[",
    "[bold",
    ":smile:",
    "\n",
    "<script>",
    "</script>",
    "</td>",
    "<!--",
    "-->",
    "]]>",
    "&lt;",
    "&#60;",
    "&",
    '"',
    "'",
    "`",
    "```",
    "|",
    "](",
    "![",
    "\t",
    "question: ",
    "answer: ",
    "Here's some background information:",
    "<|im_end|>",
    "</s>",
    "[INST]",
    "{query}",
    "{",
    "}}",
    "问题:",
    "نص",
    "巴黎",
    "👩\u200d👩",
    "é",
    "x",
    " ",
]
TEXTS = st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=8).map("".join)
OURS = {
    "section",
    "h2",
    "p",
    "table",
    "caption",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "a",
    "bdi",
    "figure",
    "figcaption",
    "div",
    "details",
    "summary",
    "span",
    "svg",
    "desc",
    "text",
    "path",
    "g",
    "polyline",
    "circle",
    "rect",
    "ul",
    "li",
    "label",
    "input",
    "i",
}
SGR = re.compile(r"\x1b\[[0-9;]*m")  # what rich writes itself: colours


def printed(*things, width=200, **options):
    console = create_console(width=width)
    console.file = io.StringIO()
    console.print(*things, **options)
    return console.file.getvalue()


def steers(text):
    """Anything but rich's colours, line ends and tabs."""
    return [found for found in CONTROL_CHARACTERS.findall(SGR.sub("", text)) if found not in "\n\t"]


@trying(40, 400)
@given(TEXTS)
def test_a_text_on_a_terminal_is_the_text(text):
    shown = attempt("terminal", "texts", lambda: printed(text, style="bold")).value
    assert not steers(shown)
    whole = SGR.sub("", shown).removesuffix("\n")
    assert whole.expandtabs() == sanitize_text(Text(text).plain).expandtabs() or "\t" in text


@trying(40, 300)
@given(TEXTS, TEXTS)
def test_cells_of_a_table_are_texts(first, second):
    table = Table("a", "b", box=None)
    table.add_row(first, second)
    assert not steers(attempt("terminal", "tables", lambda: printed(table)).value)


@trying(30, 200)
@given(st.lists(TEXTS, max_size=5))
def test_a_sequence_cut_into_pieces_is_harmless(pieces):
    def stream():
        out = io.StringIO()
        with redirect_stdout(out):
            line = StreamedLine()
            for piece in pieces:
                line.add(piece)
            line.close()
        return out.getvalue()

    assert not steers(attempt("terminal", "streams", stream).value)


@trying(40, 300)
@given(TEXTS)
def test_json_reads_back_as_it_was_and_steers_nothing(text):
    def write():
        out = io.StringIO()
        with redirect_stdout(out):
            print_json({"text": text})
        return out.getvalue()

    shown = attempt("terminal", "JSON", write).value
    assert not steers(shown)
    assert json.loads(shown) == {"text": text}


class Texts(HTMLParser):
    """The text of a page and its tags."""

    def __init__(self):
        super().__init__()
        self.texts, self.tags = [], []

    def handle_data(self, data):
        self.texts.append(data)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def parsed(page):
    reader = Texts()
    reader.feed(page)
    reader.close()
    return reader


def unseen(text):
    """What HTML parsers change: line ends, and the character that is none."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "\ufffd")


@trying(40, 400)
@given(TEXTS)
def test_a_text_in_a_page_is_the_text_and_adds_no_tag(text):
    page = attempt(
        "HTML", "texts and attributes", lambda: f'<p title="{escape_html(text)}">{escape_html(text)}</p>'
    ).value
    reader = parsed(page)
    assert [tag for tag, _ in reader.tags] == ["p"]
    assert unseen("".join(reader.texts)) == unseen(text)
    assert unseen(reader.tags[0][1]["title"]) == unseen(text)


@trying(40, 300)
@given(TEXTS, TEXTS)
def test_tables_and_charts_of_a_page_hold_texts_and_data(title, text):
    sheet = TextTable(title, ("a", text), ((text, title), (text,)))
    field = PlotArea(Axis(text), Axis(title))
    mark = PlotMark(ChartPoint(0, 0), text, label=title)

    def whole() -> str:
        lines = draw_line_plot(field, [Drawn(text, [ChartPoint(0, 0), ChartPoint(1, 1)], "k0", mark)], title, text)
        bars = draw_bar_chart(field, [BarGroup(text, [Bar(0.5, "k0", text, label=title)])], title)
        parts = [
            render_table(sheet, {text: title}),
            render_table(sheet, {}, "sortable wide"),
            *(render_figure(one, text) for one in (lines, bars)),
        ]
        return render_section("x", title, text, [*parts, render_folded_section("y", title, text, [], text)])

    tags = [tag for tag, _ in parsed(attempt("HTML", "tables and charts", whole).value).tags]
    assert set(tags) <= OURS


@trying(40, 200)
@given(TEXTS)
def test_a_picture_is_well_formed_whatever_its_curves_are_called(name):
    frame = ChartFrame(Axis(name), Axis("y"))
    svg = attempt(
        "HTML", "pictures", lambda: render_line_chart([Curve(name, [ChartPoint(0, 0), ChartPoint(1, 1)])], frame)
    ).value
    assert ElementTree.fromstring(svg.encode("utf-8", "replace")).tag.endswith("svg")


@trying(40, 300)
@given(TEXTS, TEXTS)
def test_a_markdown_table_keeps_its_lines_and_columns(first, second):
    page = attempt("Markdown", "tables", lambda: TextTable(first, ("a", "b"), ((first, second),)).markdown()).value
    lines = page.splitlines()
    assert len(lines) == 5
    assert lines[4].count("|") == 3
    assert not re.search(r"<[A-Za-z/!?]", page)
    assert "```" not in escape_markdown_code(second)


@trying(40, 400)
@given(TEXTS, TEXTS)
def test_a_prompt_has_the_lines_of_its_template_once(text, title):
    prompts = AnswerPrompts(lang="en")
    question = Question("who?")
    filled = attempt("prompts", "passages", lambda: prompts.open(question, [Passage("p", text, title)])).value.text
    lines = re.split(r"[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]", filled)
    assert sum(line.lstrip().startswith("question:") for line in lines) == 1
    assert sum(line.lstrip().startswith("answer:") for line in lines) == 1
    assert filled.endswith("\nquestion: who?\nanswer: ")
    assert "<|im_end|>" not in filled
