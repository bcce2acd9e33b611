"""Prompt templates, stored in TOML files by language.

Each set of templates has a fingerprint. Fitted gates store it, because they are valid only for the prompts that they
were fitted with.

Values that are filled into a template are escaped against prompt injection. A passage with a line such as
`question: ...` could otherwise end the background section and ask its own question, so such a line is quoted as in an
e-mail (`> question: ...`), also if invisible characters are hidden in it. Markers of chat messages such as `<|im_end|>`
get a space inside, so that tokenizers read them as plain text. All other text stays unchanged.
"""

from __future__ import annotations

import functools
import re
import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from knowgate.core.files import sha256_text
from knowgate.core.validation import expand_path, format_value, parse_toml, read_text
from knowgate.errors import BadInput, BadSetting
from knowgate.types import Question

LANGUAGES = ("en", "zh")
MAX_TEMPLATE_BYTES = 1 << 20
HAN_PATTERN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]+")
LATIN_WORD_PATTERN = re.compile(r"[A-Za-z]+")
UNESCAPED_PLACEHOLDERS = frozenset({"draft"})  # the LLM's own answer so far, whose lines must stay as they are
CHAT_MARKER_PATTERN = re.compile(r"<(?=[|｜][\w▁ -]{1,40}[|｜]>|/?s>|(?:start|end)_of_turn>|</?SYS>>)|\[(?=/?INST\])")
# The beginning of a template line counts as a label, such as 'Question:', only if it has this many letters. Ordinary
# lines often begin with a dash or a number.
MIN_LABEL_LETTERS = 2
# Characters that are not displayed, such as control characters and zero-width spaces. A text could hide a label or a
# tag with them.
INVISIBLE_CHARACTERS = (
    "\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\ufff9-\ufffb\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f"
    "\ufeff\uffa0\U000e0000-\U000e0fff"
)
INVISIBLE_PATTERN = re.compile(f"[{INVISIBLE_CHARACTERS}]+")
LINE_END_PATTERN = re.compile(r"(?<=[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])")


def detect_language(text: str) -> str:
    """Return 'zh' if Chinese characters outnumber Latin words, else 'en'."""
    n_han = sum(map(len, HAN_PATTERN.findall(text)))
    return "zh" if n_han > len(LATIN_WORD_PATTERN.findall(text)) else "en"


def detect_question_language(question: Question) -> str:
    """Return the language that the question states if there are templates for it, else detect it from its text."""
    return question.lang if question.lang in LANGUAGES else detect_language(question.text)


@dataclass(frozen=True)
class TemplateSet:
    """A named set of prompt templates, by language and template name.

    Args:
        name: Name of the set.
        templates: Language -> template name -> text with placeholders such as {query}.
    """

    name: str
    templates: Mapping[str, Mapping[str, str]]

    @property
    def fingerprint(self) -> str:
        """Hash of all templates."""
        lines = [
            f"{lang}.{key}={text}"
            for lang, texts in sorted(self.templates.items())
            for key, text in sorted(texts.items())
        ]
        return sha256_text(*lines)[:16]

    def fill(self, key: str, lang: str, /, **values: str) -> str:
        """Fill the placeholders of a template and return the prompt text.

        Args:
            key: Name of the template.
            lang: Language of the template.
            values: Placeholder name -> text. The texts are escaped, so that they cannot pass for parts of the template.
        """
        template = self.templates[lang][key]
        return template.format(**escape_values(template, values))


@functools.cache
def load_packaged_templates(name: str) -> TemplateSet:
    """Load a set of templates that the package includes, such as 'answer', 'kbm' or 'self'."""
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return TemplateSet(name, _strip_line_breaks(tomllib.loads(text)))


def load_templates(path: Path, like: str) -> TemplateSet:
    """Load a user's templates from a TOML file.

    Args:
        path: The file, with sections [en] and [zh].
        like: Name of the packaged set. Templates that the file does not define are taken from it.

    Raises:
        BadSetting: The file cannot be read, or a template has an unknown name or the wrong placeholders.
    """
    base = load_packaged_templates(like)
    path = expand_path(path)
    try:
        data = parse_toml(read_text(path, maximum=MAX_TEMPLATE_BYTES), f"the prompt file {path}")
    except OSError as error:
        raise BadSetting(f"cannot read the prompt file {path}: {error.strerror}. Check its path (`prompts`).") from None
    except BadInput as error:
        raise BadSetting(str(error)) from None
    for lang, texts in data.items():
        _check_templates(path, lang, texts, base)
    templates = _strip_line_breaks(data)
    merged = {lang: {**texts, **templates.get(lang, {})} for lang, texts in base.templates.items()}
    return TemplateSet(path.stem, merged)


def _check_templates(path: Path, lang: str, texts: Mapping[str, str], base: TemplateSet) -> None:
    """Raise BadSetting unless the packaged templates `base` have the same names and placeholders."""
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise BadSetting(
            f'the prompt file {path} has a value that is not a text. Write name = "text" in a section [en] or [zh].'
        )
    if lang not in base.templates:
        raise BadSetting(f"{path} has the unknown section [{lang[:80]}]. Use one of: {', '.join(base.templates)}.")
    for name, text in texts.items():
        if name not in base.templates[lang]:
            known_names = ", ".join(base.templates[lang])
            raise BadSetting(f"{path} has the unknown template {format_value(name)}. Use one of: {known_names}.")
        _check_placeholders(text, base.templates[lang][name], f"{path}: template {lang}.{name}")


def _check_placeholders(text: str, packaged_text: str, where: str) -> None:
    """Raise BadSetting unless a template has the placeholders of the packaged one."""
    expected = _find_placeholders(packaged_text, where)
    actual = _find_placeholders(text, where)
    if actual != expected:
        raise BadSetting(
            f"{where} has the wrong placeholders {format_value(sorted(actual))}. Use exactly these: {sorted(expected)}."
        )


def _find_placeholders(text: str, where: str) -> set[str]:
    """Return the names in braces, such as 'query' for '{query}'.

    Format codes such as '{query:>9}' raise BadSetting.
    """
    names: set[str] = set()
    try:
        for _text_before, name, code, conversion in string.Formatter().parse(text):
            if code or conversion:
                raise BadSetting(
                    f"{where} has a format code in the placeholder '{format_value(name)}'. Write only the name in braces."
                )
            if name is not None:  # it is None for the text after the last placeholder
                names.add(name)
    except ValueError as error:
        raise BadSetting(f"{where} has unbalanced braces ({error}). To write a brace, double it: {{{{") from None
    return names


def _strip_line_breaks(data: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Remove line breaks at the start of each template, which come from multi-line strings in TOML."""
    return {lang: {key: text.lstrip("\n") for key, text in texts.items()} for lang, texts in data.items()}


def escape_values(template: str, values: Mapping[str, str]) -> dict[str, str]:
    """Escape values so that the LLM cannot mistake them for parts of the template or for chat markers."""
    return {name: _escape_value(template, name, text) for name, text in values.items()}


def _escape_value(template: str, name: str, text: str) -> str:
    """Escape a value against prompt injection. `name` is its placeholder in the template.

    Chat markers get a space inside. Lines that look like lines of the template are quoted, as in '> Question: ...'.
    """
    text = CHAT_MARKER_PATTERN.sub(lambda match: match[0] + " ", text)
    if name in UNESCAPED_PLACEHOLDERS:  # no lines are quoted
        return text
    labels = _find_line_labels(template)
    visible = INVISIBLE_PATTERN.sub("", text)
    if not any(label in visible for label in labels):  # as in most texts, which need not be split into lines
        return text
    lines = LINE_END_PATTERN.split(text)
    quoted = [_quote_line(line, labels) for line in lines]
    begins_line = re.search(rf"^[ \t]*\{{{name}\}}", template, re.MULTILINE) is not None
    if not begins_line:  # the first line of the value stands in the middle of a line of the template
        quoted[0] = lines[0]
    return "".join(quoted)


def _quote_line(line: str, labels: tuple[str, ...]) -> str:
    """Return the line with '> ' before it if it begins with a label of the template."""
    return f"> {line}" if INVISIBLE_PATTERN.sub("", line).lstrip().startswith(labels) else line


@functools.cache
def _find_line_labels(template: str) -> tuple[str, ...]:
    """Return the labels that begin the template's lines, such as 'Question:', up to the first placeholder."""
    beginnings = [line.partition("{")[0].strip() for line in template.splitlines()]
    return tuple(text for text in beginnings if sum(char.isalpha() for char in text) >= MIN_LABEL_LETTERS)
