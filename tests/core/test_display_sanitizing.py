"""What steers a terminal is shown, everything else is left as it is."""

import json

import pytest

from knowgate.core.display import escape_markdown, escape_markdown_code, sanitize_json, sanitize_line, sanitize_text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x1b]8;;http://x\x07", r"\x1b]8;;http://x\x07"),
        ("a\rb", r"a\rb"),
        ("\x9b2J\x7f", r"\x9b2J\x7f"),
        ("abc\u202ecba", r"abc\u202ecba"),
        ("\U000e0041\u2028\ufeff", r"\U000e0041\u2028\ufeff"),
    ],
)
def test_control_characters_are_shown_as_escapes(text, shown):
    assert sanitize_text(text) == shown


@pytest.mark.parametrize(
    "text", ["a\n\tb", "巴黎", "نص", "👩\u200d👩\u200d👧", "می\u200cخواهم", "[red] :smile: \\x1b", "naïve – ½"]
)
def test_other_texts_stay_as_they_are(text):
    assert sanitize_text(text) == text


def test_a_line_is_one_line():
    assert sanitize_line(" a\r\n b\x85c\x1b") == "a b c\\x1b"


def test_sanitized_json_parses_to_the_same_value():
    value = {"a": "\x9b\u202e\U000e0041\x7f"}
    line = sanitize_json(json.dumps(value, ensure_ascii=False))
    assert line.isascii()
    assert json.loads(line) == value


def test_escaped_markdown_contains_no_active_markup():
    assert escape_markdown("a|b\n<script> ![x](http://y) 1 < 2") == "a/b &lt;script> ![x]\\(http://y) 1 < 2"
    assert escape_markdown_code("knowgate\n```\n# x") == "knowgate `` # x"
