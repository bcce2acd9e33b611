"""Named presets of `ask`: a paper's whole way of answering as one word. Knows settings; builds nothing."""

from __future__ import annotations

from knowgate.errors import BadSetting
from knowgate.gates import fitted_spec, read_artefact
from knowgate.pipeline.settings import Settings
from knowgate.rerank import is_aligned

PRESETS = ("cbdr",)
FIT = "knowgate fit probe --target known --balanced --labels RUN --out DIR"
BETA = 0.95  # CBDR 4.3: answers directly above it; keeps 83.3 % of the retrievals in the paper


def with_preset(settings: Settings) -> Settings:
    """The settings a preset stands for; without one, they stay as they are."""
    if settings.preset is None:
        if settings.beta is not None:
            raise BadSetting("--beta belongs to --preset cbdr; other gates take --threshold.")
        return settings
    if settings.preset not in PRESETS:
        raise BadSetting(f"--preset is '{settings.preset}'; allowed: {', '.join(PRESETS)}.")
    return _cbdr(settings)


def _cbdr(settings: Settings) -> Settings:
    """Probe, beta, aligned reranker, top k: where Conf, the probe's raw softmax, is above beta, the LLM answers
    directly. The calibrated need would not do: beta belongs to the score of a probe trained on balanced classes."""
    folder = _probe(settings.gate)
    if settings.rerank is None or not is_aligned(settings.rerank):
        given = f"is '{settings.rerank}'" if settings.rerank else "is missing"
        raise BadSetting(
            f"--preset cbdr takes an aligned reranker; --rerank {given}. "
            "Make one: knowgate prefer, then knowgate fit reranker --pref PREF --out DIR"
        )
    if settings.beta is not None and settings.threshold is not None:
        raise BadSetting("give --beta or --threshold (which is 1 - beta), not both.")
    beta = BETA if settings.beta is None else settings.beta
    if not 0 <= beta <= 1:
        raise BadSetting(f"--beta is {beta}; it must be between 0 and 1.")
    threshold = round(1 - beta, 12) if settings.threshold is None else settings.threshold
    return settings.model_copy(update={"threshold": threshold, "gate": f"{folder},verdict=own"})


def _probe(gate: str) -> str:
    """The folder of a probe of knowing."""
    spec = fitted_spec(gate)
    made = read_artefact(spec.folder).manifest if spec else {}
    if spec is None or made["gate"] != "probe":
        raise BadSetting(f"--preset cbdr decides by a fitted probe; --gate is '{gate}'. Fit one: {FIT}")
    if made.get("target", "known") != "known":
        raise BadSetting(
            f"--preset cbdr takes a probe of whether the LLM knows; '{gate}' was fitted on '{made['target']}'. "
            f"Fit one: {FIT}"
        )
    return spec.folder
