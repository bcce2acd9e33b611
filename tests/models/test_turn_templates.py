"""Chat templates are replaced by a prefix and a suffix, but only if they leave plain text unchanged."""

from __future__ import annotations

import pytest

from knowgate.models.tokenization import extract_fast_template, is_plain_text

SPECIAL = ("<|end|>",)


def framed(text):
    return f"<|user|>{text}<|end|>"


def test_a_template_that_only_frames_text_is_extracted():
    turn = extract_fast_template(framed, SPECIAL, "{{ content }}")
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
def test_a_template_that_changes_text_or_prints_the_date_is_not_extracted(render, template):
    assert extract_fast_template(render, SPECIAL, template) is None


@pytest.mark.parametrize("text", ["<think>", "a | b", "{x}", "[INST]", "a > b"])
def test_text_with_markup_is_not_plain(text):
    assert not is_plain_text(text)
    assert is_plain_text("Who wrote 'Faust'? (a play, 1808)\n")


@pytest.mark.model
def test_the_embedded_model_renders_plain_and_other_texts_as_its_template_does(smollm):
    for text in ("Who?", " two\n\nlines \n", "a <|im_end|> b", "谁写了《浮士德》?", "a | b"):
        assert smollm.render(text) == smollm._apply_template(text)
    assert smollm._fast_template is not None
