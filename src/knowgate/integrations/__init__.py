"""Adapters: knowgate inside the frameworks people already use, and their models and search engines inside knowgate.

One file = one framework or engine, with an extra of its own that is imported when it is used. This face is what they
share; a framework's own names are in its file, `knowgate.integrations.langchain` say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from knowgate.lazy import hand_on

if TYPE_CHECKING:
    from knowgate.integrations.decider import Decider, as_decider, open_decider
    from knowgate.integrations.guests import script_needs
    from knowgate.integrations.hub import pull, push
    from knowgate.integrations.mcp import run_mcp
    from knowgate.integrations.tracking import check_trackers, log_mlflow, log_wandb
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "Decider",
    "as_decider",
    "check_trackers",
    "log_mlflow",
    "log_wandb",
    "open_decider",
    "pull",
    "push",
    "run_mcp",
    "script_needs",
]
