"""The arbiters, which choose between two answers after retrieval. To add one: a file here and a line in the table.

From outside the package: an entry point in the group 'knowgate.arbiters'. Importing this loads none of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from knowgate.arbiters.artefact import is_arbiter, read_arbiter
from knowgate.errors import BadSetting
from knowgate.lazy import hand_on
from knowgate.registry import Entry, parse_options, resolve, split_spec
from knowgate.types import Arbiter

if TYPE_CHECKING:
    from knowgate.arbiters.artefact import ARBITER_KIND, ARBITER_MANIFEST, write_arbiter
    from knowgate.arbiters.choosing import agree, believe_all, choose
    from knowgate.arbiters.features import OF_PASSAGES, SIDES, answer_features, answer_matrix, needs_of
    from knowgate.arbiters.fitted import FittedArbiter
    from knowgate.arbiters.lora import ARBITER_LABELS, ARBITER_PROMPTS, arbiter_cuts
    from knowgate.arbiters.recorded import ArbiterChoices, arbiter_folder, arbitrate, both_answers
    from knowgate.arbiters.rules import RULES, RulesArbiter
else:
    __getattr__, __dir__ = hand_on(__name__)
__all__ = [
    "ARBITERS",
    "ARBITER_KIND",
    "ARBITER_LABELS",
    "ARBITER_MANIFEST",
    "ARBITER_PROMPTS",
    "ArbiterChoices",
    "FITTED_ARBITERS",
    "FittedArbiter",
    "OF_PASSAGES",
    "RULES",
    "RulesArbiter",
    "SIDES",
    "agree",
    "answer_features",
    "answer_matrix",
    "arbiter_cuts",
    "arbiter_folder",
    "arbitrate",
    "believe_all",
    "both_answers",
    "choose",
    "load_arbiter",
    "needs_of",
    "write_arbiter",
]

ARBITERS = {
    "rules": Entry(
        "knowgate.arbiters.rules:RulesArbiter",
        "an answer with passages that says it cannot tell gives way to the one from memory",
        cost="nothing",
    ),
}

# arbiters that must be fitted first, each with the function that does it; a folder made by `knowgate fit arbiter` names
# one, and so does its option --mode
FITTED_ARBITERS = {
    "features": Entry(
        "knowgate.arbiters.features:FeaturesArbiter",
        "log-probabilities, lengths, agreement and passages, weighed together",
        cost="nothing",
        extra="train",
        fit="knowgate.fitting.arbiters.features:fit_features",
    ),
    "lora": Entry(
        "knowgate.arbiters.lora:LoraArbiter",
        "a fine-tuned judge sees both answers and is asked of each whether it is right",
        cost="two prefills of the judge of 100 tokens; none where the answers agree",
        extra="train",
        fit="knowgate.fitting.arbiters.lora:fit_lora",
    ),
}


def load_arbiter(spec: str, *, plug_in: bool = False) -> Arbiter:
    """The arbiter a spec names: 'rules', 'rules:words=FILE', or the folder of a fitted one.

    plug_in: let a fitted arbiter judge answers of another LLM than it was fitted on.
    """
    if is_arbiter(spec):
        artefact = read_arbiter(spec)
        name = str(artefact.manifest["arbiter"])
        fitted: Any = resolve(FITTED_ARBITERS, "fitted arbiter", name, "knowgate.fitted_arbiters")
        arbiter: Arbiter = fitted.opened(artefact, plug_in)
        return arbiter
    name, options = split_spec(spec)
    if name in FITTED_ARBITERS:
        raise BadSetting(
            f"the arbiter '{name}' must be fitted first: knowgate fit arbiter --mode {name} --labels RUN --out DIR; "
            "then use --arbiter DIR."
        )
    cls: Any = resolve(ARBITERS, "arbiter", name, "knowgate.arbiters")
    plain: Arbiter = cls(**parse_options(cls, options, f"arbiter '{name}'"))
    return plain
