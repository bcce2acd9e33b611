"""Chat templates that are read off once: only where they put the same words around every plain text."""

from __future__ import annotations

import pytest

from knowgate.models.tokenization import extract_plain_turn_template, is_plain_text

SPECIAL = ("<|end|>",)


def framed(text):
    return f"<|user|>{text}<|end|>"


def test_a_template_that_frames_a_text_is_read_off_once():
    turn = extract_plain_turn_template(framed, SPECIAL, "{{ content }}")
    assert turn is not None
    assert turn.render("Who?\n\nWhat? ") == framed("Who?\n\nWhat? ")


@pytest.mark.parametrize(
    ("render", "template"),
    [
        (lambda text: framed(text.strip()), "{{ content | trim }}"),
        (lambda text: framed(text.replace("\n\n", "\n")), "{{ content }}"),
        (lambda text: framed(text + text), "{{ content }}{{ content }}"),
        (framed, "{{ strftime_now('%d %b') }}{{ content }}"),
    ],
)
def test_a_template_that_changes_texts_or_tells_the_date_is_run_each_time(render, template):
    assert extract_plain_turn_template(render, SPECIAL, template) is None


@pytest.mark.parametrize("text", ["<think>", "a | b", "{x}", "[INST]", "a > b"])
def test_a_text_with_marks_is_not_plain(text):
    assert not is_plain_text(text)
    assert is_plain_text("Who wrote 'Faust'? (a play, 1808)\n")


@pytest.mark.model
def test_the_embedded_model_renders_plain_and_other_texts_as_its_template_does(smollm):
    for text in ("Who?", " two\n\nlines \n", "a <|im_end|> b", "谁写了《浮士德》?", "a | b"):
        assert smollm.render(text) == smollm._render(text)
    assert smollm._turn is not None
