"""The arbiter of a policy: a gate folder that `knowgate fit` wrote without a gate name says which arbiter follows it.

A policy is a folder of a fitted gate whose manifest has the field `policy`. Its arbiter is used wherever the caller
names no other one.
"""

from __future__ import annotations

from typing import Any

from knowgate.core.validation import expand_path, read_json
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.artifacts.gate_folder import GATE_MANIFEST
from knowgate.gates.fitted_gate import FittedGate, get_gate_folder
from knowgate.types import Arbiter, Gate

ARBITER_FOLDER = "arbiter"  # folder inside the policy that holds a fitted arbiter
NO_ARBITER = "none"


def get_policy_arbiter(gate: str | Gate) -> str | None:
    """Return the spec of the arbiter of a policy. A policy is a gate fitted together with an arbiter.

    Args:
        gate: A gate, or its spec or folder.

    Returns:
        'none', a spec such as 'rules', or the folder of a fitted arbiter; None if the gate is not a policy.
    """
    folder = get_gate_folder(gate)
    if folder is None:
        return None
    path = expand_path(folder)
    manifest: Any = gate.artifact.manifest if isinstance(gate, FittedGate) else read_json(path / GATE_MANIFEST)
    if manifest.get("policy") is None:
        return None
    arbiter = str(manifest["policy"]["arbiter"])
    return str(path / ARBITER_FOLDER) if arbiter == ARBITER_FOLDER else arbiter


def load_policy_arbiter(gate: Gate, default: Arbiter | None) -> Arbiter | None:
    """Load the arbiter of a policy (a gate fitted with an arbiter).

    Other gates get `default`. None means no arbiter.
    """
    spec = get_policy_arbiter(gate)
    if spec is None:
        return default
    plug_in = isinstance(gate, FittedGate) and gate.plug_in
    return None if spec == NO_ARBITER else load_arbiter(spec, plug_in=plug_in)
