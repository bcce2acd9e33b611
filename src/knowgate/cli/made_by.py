"""The command that was typed, as a card shows it."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from knowgate.servers import without_secrets


def made_by() -> str:
    """The card travels: it names folders, not where they lie on this machine, and no login or key of an address."""
    words = sys.argv[1:]
    words = [
        Path(word).name if Path(word).is_absolute() else without_secrets(word) for word in words if word != "--debug"
    ]
    return shlex.join(["knowgate", *words])
