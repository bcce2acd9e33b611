from pathlib import Path

import pytest

from knowgate.errors import BadSetting
from knowgate.models.prompts.answers import load_answer_prompts
from knowgate.models.prompts.templates import (
    TemplateSet,
    detect_language,
    detect_question_language,
    load_packaged_templates,
    load_templates,
)
from knowgate.types import Question


@pytest.fixture
def file(tmp_path):
    def write(text: str):
        path = tmp_path / "mine.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_the_fingerprint_does_not_depend_on_the_order_of_templates():
    one = TemplateSet("x", {"en": {"a": "1", "b": "2"}, "zh": {"a": "3"}})
    two = TemplateSet("x", {"zh": {"a": "3"}, "en": {"b": "2", "a": "1"}})
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize(
    "templates",
    [
        {"en": {"a": "1!", "b": "2"}},
        {"en": {"a": "1", "c": "2"}},
        {"zh": {"a": "1", "b": "2"}},
        {"en": {"a": "1"}},
        {"en": {"a": "2", "b": "1"}},
    ],
)
def test_the_fingerprint_changes_with_any_template_name_or_language(templates):
    assert TemplateSet("x", templates).fingerprint != TemplateSet("x", {"en": {"a": "1", "b": "2"}}).fingerprint


def test_the_packaged_sets_have_the_same_templates_in_both_languages():
    for name in ("answer", "judge", "self"):
        templates = load_packaged_templates(name).templates
        assert templates["en"].keys() == templates["zh"].keys()


def test_the_packaged_sets_have_different_fingerprints():
    assert len({load_packaged_templates(name).fingerprint for name in ("answer", "judge", "self")}) == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is the capital of France?", "en"),
        ("法国的首都是哪里?", "zh"),
        ("NBA 的全称是什么?", "zh"),
        ("What does 你好 mean in English?", "en"),
        ("12 + 30 = ?", "en"),
        ("", "en"),
    ],
)
def test_the_language_is_detected_by_characters_and_words(text, expected):
    assert detect_language(text) == expected


@pytest.mark.parametrize(("lang", "expected"), [("zh", "zh"), (None, "en"), ("fr", "en")])
def test_the_language_of_a_question_is_used_if_there_are_templates_for_it(lang, expected):
    assert detect_question_language(Question("Who?", lang=lang)) == expected


def test_braces_inside_a_value_are_left_alone():
    assert TemplateSet("x", {"en": {"a": "Q: {query}"}}).fill("a", "en", query="what is {x} or {{y}}?") == (
        "Q: what is {x} or {{y}}?"
    )


def test_a_custom_template_replaces_only_its_namesake(file):
    own = load_templates(file('[en]\nclosed = "Q: {query} A:"\n'), like="answer")
    assert own.fill("closed", "en", query="Who?") == "Q: Who? A:"
    assert own.templates["zh"] == load_packaged_templates("answer").templates["zh"]
    assert own.templates["en"]["open"] == load_packaged_templates("answer").templates["en"]["open"]
    assert own.fingerprint != load_packaged_templates("answer").fingerprint


def test_an_empty_file_is_the_packaged_set(file):
    assert load_templates(file(""), like="answer").fingerprint == load_packaged_templates("answer").fingerprint


def test_doubled_braces_become_braces(file):
    own = load_templates(file("""[en]\nclosed = 'JSON {{"q": "{query}"}}'\n"""), like="answer")
    assert own.fill("closed", "en", query="Who?") == 'JSON {"q": "Who?"}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[en]\nclosed = "no question here"',
            r"en\.closed has the wrong placeholders \[\]\. Use exactly these: \['query'\]",
        ),
        (
            '[en]\nclosed = "{query} {evidence}"',
            r"has the wrong placeholders \['evidence', 'query'\]\. Use exactly these: \['query'\]",
        ),
        (
            '[zh]\nopen = "{query}"',
            r"zh\.open has the wrong placeholders \['query'\]\. Use exactly these: \['evidence', 'query'\]",
        ),
        ('[en]\nclosed = "{}"', r"placeholders \[''\]"),
        ('[en]\nclose = "{query}"', "unknown template 'close'. Use one of: closed, open, choice_closed, choice_open"),
        ('[fr]\nclosed = "{query}"', r"unknown section \[fr\]. Use one of: en, zh"),
        ('[en]\nclosed = "{query"', "unbalanced braces"),
        ('[en]\nclosed = "{query}}"', "unbalanced braces"),
        ('closed = "{query}"', r"in a section \[en\] or \[zh\]"),
        ("[en]\nclosed = 3", r"in a section \[en\] or \[zh\]"),
        ("[en", "the prompt file .* is not valid TOML"),
    ],
)
def test_an_invalid_prompt_file_is_refused_with_the_reason(file, text, message):
    with pytest.raises(BadSetting, match=message):
        load_templates(file(text), like="answer")


def test_a_missing_prompt_file_is_named(tmp_path):
    with pytest.raises(BadSetting, match=r"none\.toml"):
        load_templates(tmp_path / "none.toml", like="answer")


def test_the_free_variant_does_not_ask_for_a_concise_answer():
    free, usual = load_answer_prompts(Path("free")), load_answer_prompts()
    asked = free.closed(Question("Why?")).text
    assert "concise" not in asked
    assert "question: Why?" in asked
    assert "简洁" not in free.closed(Question("为什么?", lang="zh")).text
    assert free.fingerprint != usual.fingerprint
    choice = Question("Which?", choices=("a", "b"))
    assert free.closed(choice) == usual.closed(choice)
