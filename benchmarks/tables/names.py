"""Names of recorded gates in the tables. A gate has one name, whatever spec it was recorded under.

`dhicl:k=20,words=true/false,sign=paper` and `dhicl:runs/log.db` are both named `dhicl`. A gate folder is named by its last
part. A suffix marks gates that decide by their own verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from knowgate.data.runs import records

DEFAULT_OPTIONS = {
    "dhicl": {"k=20", "words=true/false", "sign=paper", "cold=false", "time_sensitive=true"},
    "skr": {"mode=smooth"},
}  # default options of gates that read a log
DISPLAY_NAMES = {
    "dhicl:sign=code": "dhicl, code's sign",
    "dhicl:sign=none": "dhicl, not calibrated",
    "skr:mode=vote": "skr, vote",
}
OWN_VERDICT = ", own verdict"
PLUG_IN_NOTE = "plug-in, fitted on "  # note of a gate that decides for an LLM on which it was not fitted
OTHER_LLM = ", of "
VERDICT_GATES = ("kbm", "ik", "probe, balanced")  # gates whose raw score is the verdict of the paper


def recorded_name(spec: str) -> str:
    """Return the name of a gate in the tables.

    Example:
        >>> recorded_name("gates/kbm-mastery,verdict=own")
        'kbm-mastery, own verdict'
        >>> recorded_name("dhicl:log.db,k=5")
        'dhicl:k=5'
    """
    head, *rest = spec.split(",")
    kind, _, first = head.partition(":")
    if kind in DEFAULT_OPTIONS:
        options = [option for option in (first, *rest) if "=" in option and option not in DEFAULT_OPTIONS[kind]]
        name = (
            f"{kind}:{','.join(options)}"
            if options
            else ",".join([kind, *(option for option in rest if "=" not in option)])
        )
        return DISPLAY_NAMES.get(name, name) if kind == "skr" else name
    folder_name = ",".join([Path(head).name, *rest])
    return folder_name.replace(records.OWN_VERDICT, OWN_VERDICT)


def name_source_llm(about: str) -> str:
    """Return the suffix ', of LLM' for a gate that was fitted on another LLM, else ''."""
    return f"{OTHER_LLM}{Path(about.removeprefix(PLUG_IN_NOTE)).name}" if about.startswith(PLUG_IN_NOTE) else ""


def display_name(gate: str) -> str:
    """Return the name of a gate as readers see it."""
    return DISPLAY_NAMES.get(gate, gate)


def is_main_gate(gate: str) -> bool:
    """Return whether a gate belongs in the main tables. Variants of DH-ICL have tables of their own."""
    return not gate.startswith("dhicl") or gate == "dhicl" or gate in DISPLAY_NAMES


def rename_gates(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded needs by the names of the tables. Judges with raw scores also appear with their own verdict."""
    renamed = {}
    for spec, record in recorded.items():
        name = recorded_name(spec)
        renamed[name] = replace(record, gate=name)
    own = {
        f"{name}{OWN_VERDICT}": record
        for name, record in renamed.items()
        if record.raw is not None and len(record.raw) and _is_judge(name)
    }
    for name, record in own.items():
        renamed.setdefault(name, replace(record, gate=name, needs=record.raw, raw=None, threshold=0.5))
    return renamed


def _is_judge(name: str) -> bool:
    return name.startswith(VERDICT_GATES) and not name.endswith(OWN_VERDICT) and name != "ik, text"
