"""Other packages' bars, warnings and log lines stay off the terminal of a command: what it says, it says itself.

Only for the process of a command; whoever imports knowgate keeps their own settings, and so does whoever set these.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
}


def quieten_libraries() -> None:
    """Before any of them is imported: they look once."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger().addHandler(logging.NullHandler())  # else Python prints what nobody handles
