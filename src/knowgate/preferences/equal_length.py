"""Passages cut to one length in the LLM's tokens: a control for preferences that follow length alone.

Knows a tokenizer; not what the passages are wanted for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from knowgate.errors import NotOffered
from knowgate.prompts import evidence
from knowgate.types import Model, Passage, TokenisingModel


def cut_passages(model: Model, passages: Sequence[Passage], n_tokens: int) -> list[Passage]:
    """Each passage as it is shown, title first, cut to n tokens; those that are shorter are left out."""
    if not isinstance(model, TokenisingModel):
        raise NotOffered(f"{model.name} does not say how long a passage is in tokens; --cut needs hf, gguf or smollm.")
    cut = [(passage, cut_text(model, evidence([passage]), n_tokens)) for passage in passages]
    return [Passage(passage.id, text, score=passage.score) for passage, text in cut if text is not None]


def cut_text(model: TokenisingModel, text: str, n_tokens: int) -> str | None:
    """The longest beginning of at most n tokens; None where the whole has fewer."""
    if len(model.tokenise(text)) < n_tokens:
        return None
    # bisection: with every character a beginning has as many tokens or more, but for a merge at its very end
    end = bisect_right(range(len(text)), n_tokens, key=lambda last: len(model.tokenise(text[: last + 1])))
    return text[:end]
