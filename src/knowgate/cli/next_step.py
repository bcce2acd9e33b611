"""What to type after an error: messages say it themselves; to those that do not, the help of their command is added.

Knows words, not errors. Many messages are made deep in the library, where nobody knows which command is running.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

DEEDS = (
    "Add|Ask|Build|Check|Choose|Convert|Correct|Delete|Fetch|Fill|Fit|Give|Install|Label|Leave|Let|Look|Make|Mark|Mend|"
    "Move|Name|Put|Record|Rename|Repair|Run|Save|Set|Shorten|Split|Take|Try|Type|Use|Write"
)
COMMAND = r"\bknowgate [a-z]|\bpip install\b|(^|[\s'(])--[a-z]"  # a command or an option, to be typed as it stands
CHOICES = r"\b[Aa]llowed\b|\b[Kk]nown( options)?: |\bmust (be|begin|hold|have)\b|\bat (least|most)\b"
DEED = rf"(^|[.;:,]\s|\bor\s)({DEEDS}|{DEEDS.lower()})\b"
WAY_OUT = re.compile(f"{COMMAND}|{CHOICES}|{DEED}")


def names_a_next_step(message: str) -> bool:
    """Whether it has a command, an option, what is allowed, or says what to do."""
    return WAY_OUT.search(message) is not None


def with_next_step(message: str, arguments: Sequence[str], commands: Mapping[str, Any]) -> str:
    if names_a_next_step(message):
        return message
    return f"{message.rstrip()} See: {' '.join(['knowgate', *_verbs(arguments, commands)])} --help"


def _verbs(arguments: Sequence[str], commands: Mapping[str, Any]) -> Iterator[str]:
    """The names of the command that is running: 'fit', 'fusion'."""
    for word in arguments:
        if word in commands:
            yield word
            commands = getattr(commands[word], "commands", {})
        elif not word.startswith("-"):
            return
