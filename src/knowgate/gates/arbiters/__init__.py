"""The registry of arbiters: loads an arbiter by its name or from a folder.

After retrieval, an arbiter chooses between the answer without passages (closed-book) and the answer with passages
(open-book). To add one, write a file in this package and an entry in `ARBITERS`. Other packages use an entry point in
the group 'knowgate.arbiters'. Importing this module loads no arbiter.
"""

from __future__ import annotations

from typing import Any, cast

from knowgate.core.registry import RegistryEntry, load_entry, parse_options, split_spec
from knowgate.errors import BadSetting
from knowgate.gates.arbiters.fitted_arbiter import ARBITER_FORMAT, is_arbiter_folder
from knowgate.gates.artifacts.gate_folder import read_artifact
from knowgate.types import Arbiter

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
