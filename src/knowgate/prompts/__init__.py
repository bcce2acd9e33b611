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
from typing import TYPE_CHECKING

from knowgate.doors import parse_toml, read_text, shown, user_path
from knowgate.errors import BadInput, BadSetting
from knowgate.files import sha256_text
from knowgate.lazy import hand_on
from knowgate.prompts.fences import fence
from knowgate.types import Question

if TYPE_CHECKING:
    from knowgate.prompts.answer import AnswerPrompts, evidence, fit_all, fit_passages, load_answer_prompts
    from knowgate.prompts.assess import self_assessment
    from knowgate.prompts.condense import Exchange, condense_prompt, leans_on_before
    from knowgate.prompts.judge import ik_text, kbm_text
    from knowgate.prompts.right import SIDES, arbiter_text, right_text, search_text
    from knowgate.prompts.write import read_written, write_prompt
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "AnswerPrompts",
    "Exchange",
    "HAN",
    "LANGUAGES",
    "LARGEST",
    "SIDES",
    "TemplateSet",
    "WORD",
    "arbiter_text",
    "condense_prompt",
    "detect_language",
    "evidence",
    "fit_all",
    "fit_passages",
    "ik_text",
    "kbm_text",
    "leans_on_before",
    "load_answer_prompts",
    "load_templates",
    "packaged",
    "question_language",
    "read_written",
    "right_text",
    "search_text",
    "self_assessment",
    "wording",
    "write_prompt",
]

LANGUAGES = ("en", "zh")
LARGEST = 1 << 20  # bytes of a file of templates
HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
WORD = re.compile(r"[A-Za-z]+")


def detect_language(text: str) -> str:
    """'zh' if Chinese characters outnumber Latin words, else 'en'."""
    return "zh" if len(HAN.findall(text)) > len(WORD.findall(text)) else "en"


def question_language(question: Question) -> str:
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
        return template.format(**fence(template, values))


@functools.cache
def packaged(name: str) -> TemplateSet:
    """One of the sets that come with knowgate: answer, judge, self."""
    text = resources.files(__package__).joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return TemplateSet(name, _strip(tomllib.loads(text)))


def load_templates(path: Path, like: str) -> TemplateSet:
    """A user's own set from a TOML file; templates it leaves out are the packaged ones of `like`."""
    base = packaged(like)
    path = user_path(path)
    try:
        own = _strip(parse_toml(read_text(path, most=LARGEST), f"the prompt file {path}"))
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
def wording(name: str, like: str) -> TemplateSet:
    """Another wording of a packaged set, by its name; templates it leaves out are those of `like`."""
    return _over(packaged(like), name, packaged(name).templates)


def _over(base: TemplateSet, name: str, own: Mapping[str, Mapping[str, str]]) -> TemplateSet:
    merged = {lang: {**texts, **own.get(lang, {})} for lang, texts in base.templates.items()}
    return TemplateSet(name, merged)


def _check(path: Path, lang: str, texts: Mapping[str, str], base: TemplateSet) -> None:
    if lang not in base.templates:
        raise BadSetting(f"{path}: unknown section [{lang[:80]}]. Known: {', '.join(base.templates)}.")
    for key, text in texts.items():
        if key not in base.templates[lang]:
            raise BadSetting(f"{path}: unknown template {shown(key)}. Known: {', '.join(base.templates[lang])}.")
        where = f"{path}: template {lang}.{key}"
        expected, found = _placeholders(base.templates[lang][key], where), _placeholders(text, where)
        if found != expected:
            raise BadSetting(f"{where} has the placeholders {shown(sorted(found))}, needs {sorted(expected)}.")


def _placeholders(text: str, where: str) -> set[str]:
    """The names in braces. Nothing but names: codes ('{query!r}', '{query:>9}') could fail or fill memory later."""
    try:
        parts = [part for part in string.Formatter().parse(text) if part[1] is not None]
    except ValueError as error:
        raise BadSetting(f"{where} has unbalanced braces ({error}); write {{{{ for a brace.") from None
    coded = [name for _, name, code, conversion in parts if code or conversion]
    if coded:
        raise BadSetting(f"{where} has a format code after '{shown(coded[0])}'; placeholders are names only.")
    return {str(name) for _, name, _, _ in parts}


def _strip(data: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """TOML multi-line strings start after the opening quotes' line break; what ends them is kept."""
    return {lang: {key: text.lstrip("\n") for key, text in texts.items()} for lang, texts in data.items()}
