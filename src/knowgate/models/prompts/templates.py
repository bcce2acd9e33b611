"""Prompt templates, stored in TOML files by language. Each set has a fingerprint that artifacts are bound to.

Values cannot break out of a template. A passage with a line such as `question: ...` could otherwise end the background
and ask a question of its own, so that line is quoted (`> question: ...`), as in an e-mail. Markers of chat turns
(`<|im_end|>`) get a space inside, so that tokenizers read them as text. All other text stays unchanged.
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
HAN_PATTERN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
LATIN_WORD_PATTERN = re.compile(r"[A-Za-z]+")
UNESCAPED_PLACEHOLDERS = frozenset({"draft"})  # the LLM's own answer so far, which must be continued exactly as it is
CHAT_MARKER_PATTERN = re.compile(r"<(?=[|｜][\w▁ -]{1,40}[|｜]>|/?s>|(?:start|end)_of_turn>|</?SYS>>)|\[(?=/?INST\])")
MIN_LABEL_LETTERS = 2  # of the label that begins a template line; ordinary lines often begin with a dash or a number
LINE_END_PATTERN = re.compile(r"(?<=[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])")


def detect_language(text: str) -> str:
    """Return 'zh' if Chinese characters outnumber Latin words, else 'en'."""
    return "zh" if len(HAN_PATTERN.findall(text)) > len(LATIN_WORD_PATTERN.findall(text)) else "en"


def detect_question_language(question: Question) -> str:
    """Return the question's own language if there are templates for it, else the detected one."""
    return question.lang if question.lang in LANGUAGES else detect_language(question.text)


@dataclass(frozen=True)
class TemplateSet:
    """Templates by language and name.

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
        """Return a template with its placeholders filled; the values are escaped."""
        template = self.templates[lang][key]
        return template.format(**escape_values(template, values))


@functools.cache
def load_packaged_templates(name: str) -> TemplateSet:
    """Load a template set of the package, such as 'answer', 'judge' or 'self'."""
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return TemplateSet(name, _strip_line_breaks(tomllib.loads(text)))


@functools.cache
def load_template_variant(name: str, like: str) -> TemplateSet:
    """Load a packaged variant of the set `like`, whose templates fill what the variant leaves out."""
    return _override(load_packaged_templates(like), name, load_packaged_templates(name).templates)


def load_templates(path: Path, like: str) -> TemplateSet:
    """Load a user's templates from a TOML file.

    Args:
        path: The file, with sections [en] and [zh].
        like: Name of the packaged set whose templates fill what the file leaves out.

    Raises:
        BadSetting: The file cannot be read, or a template is unknown or has other placeholders.
    """
    base = load_packaged_templates(like)
    path = expand_path(path)
    try:
        templates = _strip_line_breaks(
            parse_toml(read_text(path, maximum=MAX_TEMPLATE_BYTES), f"the prompt file {path}")
        )
    except OSError as error:
        raise BadSetting(f"cannot read the prompt file {path}: {error.strerror}. Check `prompts`.") from None
    except BadInput as error:
        raise BadSetting(str(error)) from None
    except AttributeError:
        raise BadSetting(f'{path}: write templates as name = "text" below [en] or [zh].') from None
    for lang, texts in templates.items():
        _check_templates(path, lang, texts, base)
    return _override(base, path.stem, templates)


def _override(base: TemplateSet, name: str, templates: Mapping[str, Mapping[str, str]]) -> TemplateSet:
    merged = {lang: {**texts, **templates.get(lang, {})} for lang, texts in base.templates.items()}
    return TemplateSet(name, merged)


def _check_templates(path: Path, lang: str, texts: Mapping[str, str], base: TemplateSet) -> None:
    """Raise BadSetting unless all templates exist in `base` and have the same placeholders there."""
    if lang not in base.templates:
        raise BadSetting(f"{path}: unknown section [{lang[:80]}]. Known: {', '.join(base.templates)}.")
    for key, text in texts.items():
        if key not in base.templates[lang]:
            raise BadSetting(f"{path}: unknown template {format_value(key)}. Known: {', '.join(base.templates[lang])}.")
        where = f"{path}: template {lang}.{key}"
        expected, actual = _find_placeholders(base.templates[lang][key], where), _find_placeholders(text, where)
        if actual != expected:
            raise BadSetting(f"{where} has the placeholders {format_value(sorted(actual))}, needs {sorted(expected)}.")


def _find_placeholders(text: str, where: str) -> set[str]:
    """Return the names in braces.

    Conversions and format codes ('{query!r}', '{query:>9}') are refused: they could fail, or fill the memory.
    """
    try:
        fields = [field for field in string.Formatter().parse(text) if field[1] is not None]
    except ValueError as error:
        raise BadSetting(f"{where} has unbalanced braces ({error}); write {{{{ for a brace.") from None
    coded = [name for _, name, code, conversion in fields if code or conversion]
    if coded:
        raise BadSetting(f"{where} has a format code after '{format_value(coded[0])}'; placeholders are names only.")
    return {str(name) for _, name, _, _ in fields}


def _strip_line_breaks(data: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Remove the line break after the opening quotes of TOML strings."""
    return {lang: {key: text.lstrip("\n") for key, text in texts.items()} for lang, texts in data.items()}


def escape_values(template: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return values that cannot be mistaken for parts of the template or for chat markers."""
    return {name: _escape_value(template, name, text) for name, text in values.items()}


def _escape_value(template: str, name: str, text: str) -> str:
    """Escape chat markers, and quote lines that begin like lines of the template."""
    text = CHAT_MARKER_PATTERN.sub(lambda match: match[0] + " ", text)
    labels = _find_line_labels(template)
    if name in UNESCAPED_PLACEHOLDERS or not any(label in text for label in labels):
        return text
    first, *others = LINE_END_PATTERN.split(text)
    begins_line = re.search(rf"^[ \t]*\{{{name}\}}", template, re.MULTILINE) is not None
    lines = [_quote_line(first, labels) if begins_line else first, *(_quote_line(line, labels) for line in others)]
    return "".join(lines)


def _quote_line(line: str, labels: tuple[str, ...]) -> str:
    return f"> {line}" if line.lstrip().startswith(labels) else line


@functools.cache
def _find_line_labels(template: str) -> tuple[str, ...]:
    """Return how the template's lines begin, up to a placeholder, such as 'Question:'."""
    beginnings = [line.partition("{")[0].strip() for line in template.splitlines()]
    return tuple(text for text in beginnings if sum(char.isalpha() for char in text) >= MIN_LABEL_LETTERS)
