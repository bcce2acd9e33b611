"""Options of a policy fit."""

from __future__ import annotations

from pydantic import Field

from knowgate.core.options import Seed
from knowgate.training.policy.choice import ChoiceOptions


class PolicyOptions(ChoiceOptions):
    """Options of `fit_policy`: what the policy may lose, what things cost, and which judge may be fine-tuned."""

    base: str | None = Field(
        default=None,
        description="Also try a judge that is fine-tuned from this model: small (no GPU needed, minutes per 1,000 "
        "rows), smollm, hf:NAME or gguf:FILE. Default: none on a CPU; on a GPU, the LLM that was labeled, or small.",
    )
    seed: Seed = Field(default=0, description="Random seed of splits and training.")
