"""What gates on record are called in the tables: the same name for one gate, however it was written when recorded.

`dhicl:k=20,words=true/false,sign=paper` and `dhicl:runs/log.db` are both plain `dhicl`; a folder is called by its last
part, and a gate that decided by its own verdict says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

USUAL = {
    "dhicl": {"k=20", "words=true/false", "sign=paper", "cold=false", "time_sensitive=true"},
    "skr": {"mode=smooth"},
}  # options that change nothing, of gates that read a log
SHOWN = {
    "dhicl:sign=code": "dhicl, code's sign",
    "dhicl:sign=none": "dhicl, not calibrated",
    "skr:mode=vote": "skr, vote",
}
OWN = ", own verdict"
PLUGGED = "plug-in, fitted on "  # what a gate says of itself that decides for another LLM than its own
ANOTHER = ", of "
VERDICTS = ("kbm", "ik", "probe, balanced")  # gates whose raw verdict is the paper's; IK over text has none


def recorded_name(spec: str) -> str:
    """'gates/kbm-mastery,verdict=own' -> 'kbm-mastery, own verdict'; 'dhicl:log.db,k=5' -> 'dhicl:k=5'."""
    head, *rest = spec.split(",")
    kind, _, first = head.partition(":")
    if kind in USUAL:
        options = [one for one in (first, *rest) if "=" in one and one not in USUAL[kind]]
        name = f"{kind}:{','.join(options)}" if options else ",".join([kind, *(one for one in rest if "=" not in one)])
        return SHOWN.get(name, name) if kind == "skr" else name
    called = ",".join([Path(head).name, *rest])
    return called.replace(",verdict=own", OWN)


def name_source_llm(about: str) -> str:
    """', of LLM' for a gate that was fitted on another LLM; it may have a sister fitted on this one."""
    return f"{ANOTHER}{Path(about.removeprefix(PLUGGED)).name}" if about.startswith(PLUGGED) else ""


def shown(gate: str) -> str:
    return SHOWN.get(gate, gate)


def is_main(gate: str) -> bool:
    """Variants of DH-ICL have tables of their own."""
    return not gate.startswith("dhicl") or gate == "dhicl" or gate in SHOWN


def with_names(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What is on record under the names of the tables; beside a judge that has raw scores, its own verdict."""
    found = {}
    for spec, said in recorded.items():
        name = recorded_name(spec)
        found[name] = replace(said, gate=name)
    own = {
        f"{name}{OWN}": said for name, said in found.items() if said.raw is not None and len(said.raw) and _judges(name)
    }
    for name, said in own.items():
        found.setdefault(name, replace(said, gate=name, needs=said.raw, raw=None, threshold=0.5))
    return found


def _judges(name: str) -> bool:
    return name.startswith(VERDICTS) and not name.endswith(OWN) and name != "ik, text"
