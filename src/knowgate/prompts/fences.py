"""What is put into a template stays in its place: it cannot pass for the template's own lines or for a chat's marks.

A passage that holds a line such as `question: ...` would end the background and ask a question of its own; that line is
quoted (`> question: ...`), as in a mail. Marks with which chat models begin and end a turn (`<|im_end|>`) are written
with a space inside, which tokenizers read as text. Any other text is left alone, so the prompts of ordinary documents
are what they always were. Knows no model: its own special tokens are its tokenizer's affair.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

OWN_WORDS = frozenset({"draft"})  # the LLM's own answer so far: it goes on as it began, whatever it looks like
TURNS = re.compile(r"<(?=[|｜][\w▁ -]{1,40}[|｜]>|/?s>|(?:start|end)_of_turn>|</?SYS>>)|\[(?=/?INST\])")
LETTERS = 2  # a sign of a template has at least so many: a dash or a number begins many a line


def fence(template: str, values: Mapping[str, str]) -> dict[str, str]:
    """The values of a template's placeholders, each kept in its place."""
    return {name: _kept(template, name, text) for name, text in values.items()}


def _kept(template: str, name: str, text: str) -> str:
    text = TURNS.sub(lambda found: found[0] + " ", text)
    signs = _signs(template)
    if name in OWN_WORDS or not any(sign in text for sign in signs):
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
    return tuple(sign for sign in begun if sum(char.isalpha() for char in sign) >= LETTERS)
