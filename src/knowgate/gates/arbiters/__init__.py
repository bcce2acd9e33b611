"""The registry of arbiters: loads an arbiter by its name or from a folder.

After retrieval, an arbiter chooses between the answer without passages (closed-book) and the answer with passages
(open-book). To add one, write a file in this package and an entry in `ARBITERS`. Other packages use an entry point in
the group 'knowgate.arbiters'. Importing this module loads no arbiter.
"""

from __future__ import annotations

from typing import Any, cast

from knowgate.core.registry import RegistryEntry, load_entry, parse_options, split_spec
from knowgate.core.validation import expand_path, read_json
from knowgate.errors import BadSetting
from knowgate.gates.arbiters.fitted_arbiter import ARBITER_FORMAT, is_arbiter_folder
from knowgate.gates.artifacts.gate_folder import GATE_MANIFEST, read_artifact
from knowgate.gates.fitted_gate import FittedGate, get_gate_folder
from knowgate.types import Arbiter, Gate

ARBITER_FOLDER = "arbiter"  # folder inside a policy that holds a fitted arbiter
NO_ARBITER = "none"
ARBITERS = {
    "rules": RegistryEntry("knowgate.gates.arbiters.abstention:RulesArbiter",
        "uses the closed-book answer if the answer with passages says that it cannot tell", cost="nothing"),
}  # fmt: skip

# Arbiters that must be fitted first. `fit` names the training function.
FITTED_ARBITERS = {
    "features": RegistryEntry("knowgate.gates.arbiters.features:FeaturesArbiter",
        "two logistic regressions over log-probabilities, lengths, agreement and passages",
        cost="nothing", extra="train", fit="knowgate.training.arbiter:fit_features_arbiter"),
    "lora": RegistryEntry("knowgate.gates.arbiters.lora:LoraArbiter",
        "a fine-tuned judge sees both answers and says for each whether it is right",
        cost="two prefills of the judge of 100 tokens; none where the answers agree", extra="train",
        fit="knowgate.training.arbiter_lora:fit_lora_arbiter"),
    "fitted-rules": RegistryEntry("knowgate.gates.arbiters.fitted_arbiter:FittedRulesArbiter",
        "the arbiter `rules`, written as a folder because no trained arbiter was better",
        cost="nothing", extra="train", fit="knowgate.training.arbiter:fit_rules_arbiter"),
}  # fmt: skip


def load_arbiter(spec: str, *, plug_in: bool = False) -> Arbiter:
    """Load an arbiter by its spec.

    Args:
        spec: 'rules', 'rules:words=FILE', or the folder of a fitted arbiter.
        plug_in: Allow a fitted arbiter to judge answers of a different LLM than the one it was fitted on.

    Raises:
        UnknownName: No arbiter has this name.
        BadSetting: The arbiter must be fitted first, or an option is wrong.
        ArtifactError: The folder is damaged.

    Example:
        >>> load_arbiter("rules").name
        'rules'
    """
    if is_arbiter_folder(spec):
        return _load_fitted_arbiter(spec, plug_in)
    name, options = split_spec(spec)
    if name in FITTED_ARBITERS:
        raise BadSetting(
            f"arbiter '{name}' (chooses between two answers) must be fitted before use. Run `knowgate fit arbiter` with "
            f"mode={name}. Then pass the folder that it writes."
        )
    arbiter_class: Any = load_entry(ARBITERS, "arbiter", name, "knowgate.arbiters")
    arguments = parse_options(arbiter_class, options, f"arbiter '{name}'")
    return cast(Arbiter, arbiter_class(**arguments))


def _load_fitted_arbiter(folder: str, plug_in: bool) -> Arbiter:
    """Load a fitted arbiter from its folder. `plug_in` allows a different LLM."""
    artifact = read_artifact(folder, ARBITER_FORMAT)
    name = str(artifact.manifest["arbiter"])
    arbiter_class: Any = load_entry(FITTED_ARBITERS, "fitted arbiter", name, "knowgate.fitted_arbiters")
    return cast(Arbiter, arbiter_class.from_artifact(artifact, plug_in))


# --- policies: gate folders that `knowgate fit` wrote without a gate name; they say which arbiter follows the gate -


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
