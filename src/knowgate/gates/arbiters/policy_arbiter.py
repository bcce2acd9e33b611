"""The arbiter of a policy: a gate folder that `knowgate fit` wrote without a gate name says which arbiter follows it.

A policy is a folder of a fitted gate whose manifest has the field `policy`. Its arbiter is used wherever the caller
names no other one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from knowgate.core.validation import expand_path, read_json
from knowgate.gates.arbiters import load_arbiter
from knowgate.gates.artifacts.gate_folder import GATE_MANIFEST, parse_fitted_spec
from knowgate.gates.fitted_gate import FittedGate
from knowgate.types import Arbiter, Gate

ARBITER_FOLDER = "arbiter"  # folder inside the policy that holds a fitted arbiter
NO_ARBITER = "none"


def get_policy_arbiter(gate: str | Gate) -> str | None:
    """Return the spec of the arbiter that belongs to a policy: a gate that was fitted together with an arbiter.

    Args:
        gate: A gate, or its spec or folder.

    Returns:
        'none', a spec such as 'rules', or the folder of a fitted arbiter; None if the gate is not a policy.
    """
    folder, manifest = _read_policy(gate)
    policy = manifest.get("policy")
    if folder is None or policy is None:
        return None
    arbiter = str(policy["arbiter"])
    return str(folder / ARBITER_FOLDER) if arbiter == ARBITER_FOLDER else arbiter


def load_policy_arbiter(gate: Gate, default: Arbiter | None) -> Arbiter | None:
    """Load the arbiter that belongs to a policy; return `default` if the gate is not a policy."""
    spec = get_policy_arbiter(gate)
    if spec is None:
        return default
    plug_in = isinstance(gate, FittedGate) and gate.plug_in
    return None if spec == NO_ARBITER else load_arbiter(spec, plug_in=plug_in)


def _read_policy(gate: str | Gate) -> tuple[Path | None, Mapping[str, Any]]:
    """Return the folder and the manifest of a fitted gate; None and {} for other gates."""
    if isinstance(gate, FittedGate):
        return gate.artifact.path, gate.artifact.manifest
    spec = parse_fitted_spec(gate) if isinstance(gate, str) else None
    if spec is None:
        return None, {}
    folder = expand_path(spec.folder)
    return folder, read_json(folder / GATE_MANIFEST)
