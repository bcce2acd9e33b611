"""What somebody wrote as a user turn: the words a chat template puts around it, and nothing that ends it early.

Knows texts alone. A template is read off once; what runs without it needs no template engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from knowgate.errors import BadSetting

PLACE = "KNOWGATE-TEXT"  # stands for the text while a template is read off
SPECIMEN = f'\n {PLACE}: one, two?\n\n  three (3.5) - "four"\nfive\'s \n'  # lines, and blanks that might be cut off
CLOCK = "strftime_now"  # templates that tell the date


@dataclass(frozen=True)
class Turn:
    """What stands before and after the text of a user turn. special: tokens that end turns. chat: there is a template;
    without one the text stands bare, and the tokenizer adds its own beginning."""

    before: str
    after: str
    special: tuple[str, ...]
    chat: bool

    def render(self, text: str) -> str:
        return f"{self.before}{as_text(text, self.special) if self.chat else text}{self.after}"


def turn_of(render: Callable[[str], str], special: Sequence[str], *, chat: bool) -> Turn:
    """The turn that a model's own `render` makes."""
    before, found, after = render(PLACE).partition(PLACE)
    if not found or PLACE in after:
        raise BadSetting("the chat template does not give back the text of a turn as it is, once.")
    return Turn(before, after, tuple(special), chat)


def plain_turn(render: Callable[[str], str], special: Sequence[str], template: str) -> Turn | None:
    """The turn of every plain text, where the template puts the same words around any; else None."""
    try:
        turn = turn_of(render, special, chat=True)
    except BadSetting:
        return None
    return turn if CLOCK not in template and turn.render(SPECIMEN) == render(SPECIMEN) else None


def is_plain(text: str) -> bool:
    """Whether no template could see more in it than text: marks, thoughts, calls of tools."""
    return not any(sign in text for sign in "<>{}[]|")


def as_text(content: str, special_tokens: Sequence[str]) -> str:
    """What somebody wrote, without tokens that end the turn: a space inside makes them text."""
    for token in special_tokens:
        content = content.replace(token, f"{token[:1]} {token[1:]}") if len(token) > 1 else content
    return content
