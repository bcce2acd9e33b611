"""The arbiters, which choose between two answers after retrieval. To add one: a file here and a line in the table.

From outside the package: an entry point in the group 'knowgate.arbiters'. Importing this loads none of them.
"""

from __future__ import annotations

from typing import Any

from knowgate.core.registry import RegistryEntry, load_entry, parse_options, split_spec
from knowgate.errors import BadSetting
from knowgate.gates.arbiters.fitted_arbiter import is_arbiter_folder, read_arbiter_artifact
from knowgate.types import Arbiter

ARBITERS = {
    "rules": RegistryEntry(
        "knowgate.gates.arbiters.abstention:RulesArbiter",
        "an answer with passages that says it cannot tell gives way to the one from memory",
        cost="nothing",
    ),
}

# arbiters that must be fitted first, each with the function that does it; a folder made by `knowgate fit arbiter` names
# one, and so does its option --mode
FITTED_ARBITERS = {
    "features": RegistryEntry(
        "knowgate.gates.arbiters.features:FeaturesArbiter",
        "log-probabilities, lengths, agreement and passages, weighed together",
        cost="nothing",
        extra="train",
        fit="knowgate.training.arbiter_features:fit_features_arbiter",
    ),
    "lora": RegistryEntry(
        "knowgate.gates.arbiters.lora:LoraArbiter",
        "a fine-tuned judge sees both answers and is asked of each whether it is right",
        cost="two prefills of the judge of 100 tokens; none where the answers agree",
        extra="train",
        fit="knowgate.training.arbiter_lora:fit_lora_arbiter",
    ),
}


def load_arbiter(spec: str, *, plug_in: bool = False) -> Arbiter:
    """The arbiter a spec names: 'rules', 'rules:words=FILE', or the folder of a fitted one.

    plug_in: let a fitted arbiter judge answers of another LLM than it was fitted on.
    """
    if is_arbiter_folder(spec):
        artifact = read_arbiter_artifact(spec)
        name = str(artifact.manifest["arbiter"])
        fitted: Any = load_entry(FITTED_ARBITERS, "fitted arbiter", name, "knowgate.fitted_arbiters")
        arbiter: Arbiter = fitted.opened(artifact, plug_in)
        return arbiter
    name, options = split_spec(spec)
    if name in FITTED_ARBITERS:
        raise BadSetting(
            f"the arbiter '{name}' must be fitted first: knowgate fit arbiter --mode {name} --labels RUN --out DIR; "
            "then use --arbiter DIR."
        )
    cls: Any = load_entry(ARBITERS, "arbiter", name, "knowgate.arbiters")
    plain: Arbiter = cls(**parse_options(cls, options, f"arbiter '{name}'"))
    return plain
