"""Prompt templates, English and Chinese, kept as data files. Each set has a fingerprint that artefacts are bound to.

Knows how to fill a template; not what any of them is for.
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

UNESCAPED_PLACEHOLDERS = frozenset(
    {"draft"}
)  # the LLM's own answer so far: it goes on as it began, whatever it looks like
CHAT_MARKER_PATTERN = re.compile(r"<(?=[|｜][\w▁ -]{1,40}[|｜]>|/?s>|(?:start|end)_of_turn>|</?SYS>>)|\[(?=/?INST\])")
MIN_LABEL_LETTERS = 2  # a sign of a template has at least so many: a dash or a number begins many a line


def escape_values(template: str, values: Mapping[str, str]) -> dict[str, str]:
    """The values of a template's placeholders, each kept in its place."""
    return {name: _kept(template, name, text) for name, text in values.items()}


def _kept(template: str, name: str, text: str) -> str:
    text = CHAT_MARKER_PATTERN.sub(lambda found: found[0] + " ", text)
    signs = _signs(template)
    if name in UNESCAPED_PLACEHOLDERS or not any(sign in text for sign in signs):
        return text
    first, *rest = re.split(r"(?<=[\n\r\v\f\x1c-\x1e\x85\u2028\u2029])", text)
    begins_a_line = re.search(rf"^[ \t]*\{{{name}\}}", template, re.MULTILINE) is not None
    return "".join([_quoted(first, signs) if begins_a_line else first, *(_quoted(line, signs) for line in rest)])


def _quoted(line: str, signs: tuple[str, ...]) -> str:
    return f"> {line}" if line.lstrip().startswith(signs) else line


@functools.cache
def _signs(template: str) -> tuple[str, ...]:
    """How the template's own lines begin, up to a placeholder."""
    begun = [line.partition("{")[0].strip() for line in template.splitlines()]
    return tuple(sign for sign in begun if sum(char.isalpha() for char in sign) >= MIN_LABEL_LETTERS)


LANGUAGES = ("en", "zh")
MAX_TEMPLATE_BYTES = 1 << 20  # bytes of a file of templates
HAN_PATTERN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
LATIN_WORD_PATTERN = re.compile(r"[A-Za-z]+")


def detect_language(text: str) -> str:
    """'zh' if Chinese characters outnumber Latin words, else 'en'."""
    return "zh" if len(HAN_PATTERN.findall(text)) > len(LATIN_WORD_PATTERN.findall(text)) else "en"


def detect_question_language(question: Question) -> str:
    """The language of the templates for a question: its own where there are templates for it, else by its script."""
    return question.lang if question.lang in LANGUAGES else detect_language(question.text)


@dataclass(frozen=True)
class TemplateSet:
    """Templates by language and name."""

    name: str
    templates: Mapping[str, Mapping[str, str]]

    @property
    def fingerprint(self) -> str:
        """Identity of the wording: changes when any template of the set changes."""
        parts = [
            f"{lang}.{key}={text}"
            for lang, texts in sorted(self.templates.items())
            for key, text in sorted(texts.items())
        ]
        return sha256_text(*parts)[:16]

    def fill(self, key: str, lang: str, /, **values: str) -> str:
        """The template with its placeholders filled; braces inside the values are left alone, its own lines quoted."""
        template = self.templates[lang][key]
        return template.format(**escape_values(template, values))


@functools.cache
def load_packaged_templates(name: str) -> TemplateSet:
    """One of the sets that come with knowgate: answer, judge, self."""
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return TemplateSet(name, _strip(tomllib.loads(text)))


def load_templates(path: Path, like: str) -> TemplateSet:
    """A user's own set from a TOML file; templates it leaves out are the packaged ones of `like`."""
    base = load_packaged_templates(like)
    path = expand_path(path)
    try:
        own = _strip(parse_toml(read_text(path, maximum=MAX_TEMPLATE_BYTES), f"the prompt file {path}"))
    except OSError as error:
        raise BadSetting(f"cannot read the prompt file {path}: {error.strerror}. Check --prompts.") from None
    except BadInput as error:
        raise BadSetting(str(error)) from None
    except AttributeError:
        raise BadSetting(f'{path}: write templates as name = "text" below [en] or [zh].') from None
    for lang, texts in own.items():
        _check(path, lang, texts, base)
    return _over(base, path.stem, own)


@functools.cache
def load_template_variant(name: str, like: str) -> TemplateSet:
    """Another wording of a packaged set, by its name; templates it leaves out are those of `like`."""
    return _over(load_packaged_templates(like), name, load_packaged_templates(name).templates)


def _over(base: TemplateSet, name: str, own: Mapping[str, Mapping[str, str]]) -> TemplateSet:
    merged = {lang: {**texts, **own.get(lang, {})} for lang, texts in base.templates.items()}
    return TemplateSet(name, merged)


def _check(path: Path, lang: str, texts: Mapping[str, str], base: TemplateSet) -> None:
    if lang not in base.templates:
        raise BadSetting(f"{path}: unknown section [{lang[:80]}]. Known: {', '.join(base.templates)}.")
    for key, text in texts.items():
        if key not in base.templates[lang]:
            raise BadSetting(f"{path}: unknown template {format_value(key)}. Known: {', '.join(base.templates[lang])}.")
        where = f"{path}: template {lang}.{key}"
        expected, found = _placeholders(base.templates[lang][key], where), _placeholders(text, where)
        if found != expected:
            raise BadSetting(f"{where} has the placeholders {format_value(sorted(found))}, needs {sorted(expected)}.")


def _placeholders(text: str, where: str) -> set[str]:
    """The names in braces. Nothing but names: codes ('{query!r}', '{query:>9}') could fail or fill memory later."""
    try:
        parts = [part for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise BadSetting(f"{where} has unbalanced braces ({error}); write {{{{ for a brace.") from None
    coded = [name for _, name, code, conversion in parts if code or conversion]
    if coded:
        raise BadSetting(f"{where} has a format code after '{format_value(coded[0])}'; placeholders are names only.")
    return {str(name) for _, name, _, _ in parts}


def _strip(data: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """TOML multi-line strings start after the opening quotes' line break; what ends them is kept."""
    return {lang: {key: text.lstrip("\n") for key, text in texts.items()} for lang, texts in data.items()}
