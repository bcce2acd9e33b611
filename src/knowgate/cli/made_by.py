"""The command that was typed, as a card shows it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path


def made_by() -> str:
    """The card travels: it names folders, not where they lie on this machine."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:] if word != "--debug"]
    return shlex.join(["knowgate", *words])
