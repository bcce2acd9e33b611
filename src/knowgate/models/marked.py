"""Tokens of a prompt and the places in them where a label is expected. Plain numbers; no torch.

Knows tokenisation in place: text up to a label and the label itself are tokenised apart, because some tokenizers
merge 'Answer:' and 'true' into other tokens when they stand together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from knowgate.errors import BadSetting
from knowgate.types import LabelPrompt


@dataclass(frozen=True)
class MarkedTokens:
    """A tokenised prompt: from the positions `marks` labels are predicted; `prefix` tokens are shared by many."""

    ids: list[int]
    marks: list[int]
    prefix: int = 0


class InPlace(Protocol):
    """A model on this machine, whose tokenizer and chat template are at hand."""

    @property
    def has_template(self) -> bool: ...

    def tokenise(self, text: str, *, special: bool = False) -> list[int]: ...

    def tokenise_all(self, texts: Sequence[str], *, special: bool = False) -> list[list[int]]: ...

    def render(self, text: str) -> str: ...

    def check_length(self, n_tokens: int, room: int) -> None: ...


def label_ids(model: InPlace, labels: Sequence[str]) -> list[int]:
    """First token of each label as it stands in place; labels that begin alike cannot be told apart."""
    ids = [model.tokenise(label)[0] for label in labels if label]
    if len(ids) < len(labels) or len(set(ids)) < len(ids):
        raise BadSetting(f"the labels {', '.join(map(repr, labels))} do not begin with different tokens.")
    return ids


def cut_prompts(model: InPlace, prompts: Sequence[LabelPrompt], labels: Sequence[int]) -> list[MarkedTokens]:
    """Token ids of the prefix and of each part, tokenised apart; `labels` are the tokens that may begin a part.

    The texts of all prompts go to the tokenizer together: it takes many on as many cores as there are.
    """
    chats = [not prompt.raw and model.has_template for prompt in prompts]
    if any(chat and (len(prompt.parts) > 1 or prompt.prefix) for chat, prompt in zip(chats, prompts, strict=True)):
        raise BadSetting("a user turn has one label position, at its end; use raw=True for several.")
    beginnings = list({prompt.prefix for chat, prompt in zip(chats, prompts, strict=True) if not chat})
    begun = dict(zip(beginnings, model.tokenise_all(beginnings, special=True), strict=True))
    parts = [
        [model.render(prompt.parts[0])] if chat else list(prompt.parts)
        for chat, prompt in zip(chats, prompts, strict=True)
    ]
    pieces = iter(model.tokenise_all([part for some in parts for part in some]))
    cut = []
    for chat, prompt, some in zip(chats, prompts, parts, strict=True):
        ids = [] if chat else begun[prompt.prefix]
        cut.append(_joined(ids, [(part, next(pieces)) for part in some], labels))
        model.check_length(len(cut[-1].ids), 1)
    return cut


def _joined(prefix: list[int], parts: Sequence[tuple[str, list[int]]], labels: Sequence[int]) -> MarkedTokens:
    """The prompt that begins like this and goes on with these parts, each a text and its tokens."""
    ids, marks = list(prefix), list[int]()
    for number, (part, piece) in enumerate(parts):
        if number and piece[0] not in labels:
            raise BadSetting(f"the label at the start of '{part[:20]}' is not one token in place; choose other labels.")
        ids += piece
        marks.append(len(ids) - 1)
    return MarkedTokens(ids, marks, len(prefix))
