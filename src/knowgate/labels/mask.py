"""The MASK study (KBM section 3.1): gold answers inside passages are replaced by the word MASK."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from knowgate.text import CJK, tokens
from knowgate.types import Passage

MASK = "MASK"
LETTER = r"[A-Za-zÀ-ɏ0-9_]"


def mask_passages(passages: Sequence[Passage], golds: Sequence[str]) -> list[Passage]:
    """Every gold answer and alias, in any case, replaced in titles and texts; longest first."""
    pattern = _pattern(golds)
    if pattern is None:
        return list(passages)
    return [
        replace(passage, text=pattern.sub(MASK, passage.text), title=pattern.sub(MASK, passage.title))
        for passage in passages
    ]


def is_mask(answer: str) -> bool:
    """The answer is the word MASK, whatever stands around it in punctuation."""
    return tokens(answer) == [MASK.lower()]


def says_mask(answer: str) -> bool:
    """The answer holds the word MASK: it was copied."""
    return MASK.lower() in tokens(answer)


def _pattern(golds: Sequence[str]) -> re.Pattern[str] | None:
    found = sorted({gold.strip() for gold in golds if tokens(gold)}, key=len, reverse=True)
    if not found:
        return None
    return re.compile("|".join(_one(gold) for gold in found), flags=re.IGNORECASE)


def _one(gold: str) -> str:
    """Whole words for Latin script (so 'art' leaves 'party' alone), anywhere for Chinese. Any white space will do."""
    body = r"\s+".join(re.escape(part) for part in gold.split())
    # a plain \b would count Chinese characters as letters: 'NBA' between them is still a whole word
    before = "" if CJK.match(gold[0]) else rf"(?<!{LETTER})"
    after = "" if CJK.match(gold[-1]) else rf"(?!{LETTER})"
    return before + body + after
