"""Fitting the fusion gate: probes of the stored states, then a logistic regression over all signals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np

from knowgate.data.signals.features import COSTLY_FEATURES, available_features, feature_matrix
from knowgate.data.signals.samples import SEAKR, SEAKR_END, SEAKR_SAMPLES
from knowgate.data.signals.vectors import stack_hidden_states
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import apply_network
from knowgate.gates.fusion import TEXT_SIGNAL, embed_drafts
from knowgate.retrieval.embeddings import DEFAULT_EMBEDDER, SentenceEmbedder
from knowgate.stats.logistic import logit
from knowgate.stats.metrics import FloatArray
from knowgate.training.classifiers import Tensors, auroc_or_half, check_finite, fit_best_linear, fit_linear, tune_linear
from knowgate.training.examples import Examples
from knowgate.training.fit_function import ExampleRequirements, FitResult
from knowgate.training.probe import DRAFT_TOKENS, predict_out_of_fold
from knowgate.types import Embedder, Sampling, Signal, SignalRequest, Vector

FIRST_TOKEN_FEATURES = ("first", "question_length")  # known with the first answer token
DISPERSION_FEATURES = {SEAKR, SEAKR_END}
TOKEN_FEATURES = ("first", "mean", "min", "entropy", "margin")


def fit_fusion(
    examples: Annotated[Examples, ExampleRequirements(weighs=True)],
    *,
    cheap: Annotated[bool, "Without samples and extra passes."] = False,
    early: Annotated[bool, "Only what the first answer token shows; retrieving costs a prefill."] = False,
    text: Annotated[bool | None, "Read question and draft as text. Default: if there are no hidden states."] = None,
    embedder: str | Embedder = DEFAULT_EMBEDDER,
) -> FitResult:
    """Weigh whichever signals the label runs have.

    cheap: leave out samples and extra passes. early: only what is there with the first answer token, so that a question
    that is retrieved for pays one short prefill. text: also a head over sentence embeddings of question and draft; None
    for LLMs whose hidden states nobody has, where it is the best there is.
    """
    if cheap and early:
        raise BadSetting("early leaves out all that cheap does, and the draft; give one of them.")
    names = [
        name for name in available_features(examples.questions, examples.readings) if _is_wanted(name, cheap, early)
    ]
    if not _fits_seakr(examples.settings):
        names = [name for name in names if name not in DISPERSION_FEATURES]
    features = feature_matrix(names, examples.questions, examples.readings)
    check_finite(features)
    tensors: dict[str, Any] = {}
    probes: list[dict[str, Any]] = []
    columns = [features]
    for layer in sorted(examples.readings[0].hidden):
        for position in ("pre",) if early else ("pre", "post"):
            name = f"probe-{position}-{layer}"
            own, column = _probe(stack_hidden_states(examples.readings, layer, position), examples)
            tensors |= {f"{name}.{key}": value for key, value in own.items()}
            probes.append({"name": name, "layer": layer, "position": position})
            columns.append(column)
    reads_text = not (probes or early) if text is None else text
    encoded: dict[str, Any] = {}
    if reads_text:
        encoder = SentenceEmbedder(embedder) if isinstance(embedder, str) else embedder
        own, column = _probe(embed_drafts(encoder, examples.questions, examples.readings), examples)
        tensors |= {f"{TEXT_SIGNAL}.{key}": value for key, value in own.items()}
        columns.append(column)
        spec = embedder if isinstance(embedder, str) else "own"
        encoded = {"embedder": spec, "embedder_fingerprint": encoder.fingerprint}
    signals = np.hstack(columns).astype(np.float32)
    if signals.shape[1] == 0:
        raise BadSetting(
            "the label runs hold no signals to fuse. Label again with a backend that gives log-probabilities."
        )
    labels = [*names, *(probe["name"] for probe in probes), *[TEXT_SIGNAL] * reads_text]
    head = _head(signals, examples)
    tensors |= {f"fusion.{key}": value for key, value in head.items()}

    def raw(places: Sequence[int]) -> FloatArray:
        return apply_network(head, signals[list(places)])

    options = {"features": names, "probes": probes, "cheap": cheap, "early": early, **encoded}
    needs, want = _needs(names, probes) | _read(encoded), _want(names, probes, examples)
    notes = describe_contributions(labels, signals, head, examples)
    return FitResult("fusion", options, needs, want, tensors, raw, notes=notes)


def _fits_seakr(settings: Mapping[str, Any]) -> bool:
    """The gate draws one set of samples for all its signals: seakr looks at the first 20, the others at all of them."""
    return settings.get("seakr") == SEAKR_SAMPLES and not 0 < int(settings.get("samples", 0)) < SEAKR_SAMPLES


def _is_wanted(name: str, cheap: bool, early: bool) -> bool:
    return not (cheap and name in COSTLY_FEATURES) and not (early and name not in FIRST_TOKEN_FEATURES)


def _probe(features: Vector, examples: Examples) -> tuple[Tensors, Vector]:
    """A linear probe and its logit for every row; training rows get theirs from probes that did not see them."""
    check_finite(features)
    train, dev, needed = examples.split.train, examples.split.dev, examples.needed
    weights = examples.weights_of(train)
    tuned = tune_linear(features[train], needed[train], features[dev], needed[dev], weights)
    column = logit(apply_network(tuned.tensors, features))
    texts = [examples.questions[place].text for place in train]
    column[train] = logit(predict_out_of_fold(features[train], needed[train], texts, tuned.strength, weights))
    return tuned.tensors, column[:, None].astype(np.float32)


def _head(signals: Vector, examples: Examples) -> Tensors:
    split, needed = examples.split, examples.needed
    weights = examples.weights_of(split.train)
    return fit_best_linear(signals[split.train], needed[split.train], signals[split.dev], needed[split.dev], weights)


def describe_contributions(names: Sequence[str], signals: Vector, head: Tensors, examples: Examples) -> list[str]:
    """What each signal does alone, what is lost without it, and what a cheap fusion would lose. On the dev split."""
    split, needed = examples.split, examples.needed
    dev = np.concatenate([split.dev, split.calibration])

    def score(columns: list[int]) -> float:
        tensors = fit_linear(signals[split.train][:, columns], needed[split.train], 0.1)
        return auroc_or_half(needed[dev], apply_network(tensors, signals[dev][:, columns]))

    every = list(range(len(names)))
    whole = score(every)
    lines = [f"all signals: dev AUROC {whole:.3f}"]
    for place, name in enumerate(names):
        rest = [column for column in every if column != place]
        without = score(rest) if rest else 0.5
        lines.append(f"{name}: alone {score([place]):.3f}, without it {without - whole:+.3f}")
    cheap = [place for place, name in enumerate(names) if name not in COSTLY_FEATURES]
    if cheap and len(cheap) < len(names):
        lines.append(
            f"cheap fusion, without {', '.join(COSTLY_FEATURES)}: {score(cheap):.3f} ({score(cheap) - whole:+.3f})"
        )
    return lines


def _read(encoded: Mapping[str, Any]) -> frozenset[Signal]:
    return frozenset({Signal.DRAFT}) if encoded else frozenset()


def _needs(names: Sequence[str], probes: Sequence[dict[str, Any]]) -> frozenset[Signal]:
    needs = set()
    needs |= {Signal.LOGPROBS} if set(names) & set(TOKEN_FEATURES) else set()
    needs |= {Signal.HIDDEN} if probes or DISPERSION_FEATURES & set(names) else set()
    needs |= {Signal.LABELS} if "self_assessment" in names else set()
    needs |= {Signal.SAMPLES} if {"certainty", "agreement", *DISPERSION_FEATURES} & set(names) else set()
    return frozenset(needs)


def _drawn(settings: Mapping[str, Any]) -> Sampling:
    """As the samples of the run were: a gate that draws others would read something else than it was fitted on."""
    usual = asdict(Sampling())
    return Sampling(**{key: value if settings.get(key) is None else settings[key] for key, value in usual.items()})


def _want(names: Sequence[str], probes: Sequence[dict[str, Any]], examples: Examples) -> SignalRequest:
    sampled = bool({"certainty", "agreement"} & set(names))
    dispersed = DISPERSION_FEATURES & set(names)
    samples = [int(examples.settings["samples"])] * sampled + [SEAKR_SAMPLES] * len(dispersed)
    return SignalRequest(
        draft_tokens=1
        if set(names) <= set(FIRST_TOKEN_FEATURES)
        else int(examples.settings.get("max_tokens", DRAFT_TOKENS)),
        layers=tuple(sorted({probe["layer"] for probe in probes})),
        after_draft=any(probe["position"] == "post" for probe in probes),
        samples=max(samples, default=0),
        sample_tokens=int(examples.settings.get("max_tokens", DRAFT_TOKENS)),
        sampling=_drawn(examples.settings) if samples else Sampling(),
        seed=0 if samples else None,  # so that the same question gets the same need every time
        sample_layer=examples.settings["seakr_layer"] if dispersed else None,
        sample_end=SEAKR_END in names,
    )
