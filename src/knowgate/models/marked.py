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

    def render(self, text: str) -> str: ...

    def check_length(self, n_tokens: int, room: int) -> None: ...


def label_ids(model: InPlace, labels: Sequence[str]) -> list[int]:
    """First token of each label as it stands in place; labels that begin alike cannot be told apart."""
    ids = [model.tokenise(label)[0] for label in labels if label]
    if len(ids) < len(labels) or len(set(ids)) < len(ids):
        raise BadSetting(f"the labels {', '.join(map(repr, labels))} do not begin with different tokens.")
    return ids


def cut_prompt(model: InPlace, prompt: LabelPrompt, labels: Sequence[int]) -> MarkedTokens:
    """Token ids of the prefix and of each part, tokenised apart; `labels` are the tokens that may begin a part."""
    chat = not prompt.raw and model.has_template
    if chat and (len(prompt.parts) > 1 or prompt.prefix):
        raise BadSetting("a user turn has one label position, at its end; use raw=True for several.")
    ids = [] if chat else model.tokenise(prompt.prefix, special=True)
    prefix, marks = len(ids), list[int]()
    for number, part in enumerate([model.render(prompt.parts[0])] if chat else prompt.parts):
        piece = model.tokenise(part)
        if number and piece[0] not in labels:
            raise BadSetting(f"the label at the start of '{part[:20]}' is not one token in place; choose other labels.")
        ids += piece
        marks.append(len(ids) - 1)
    model.check_length(len(ids), 1)
    return MarkedTokens(ids, marks, prefix)
