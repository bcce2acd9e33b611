"""Fit the fusion gate: a logistic regression that combines all recorded signals.

Hidden states enter through probes: one linear classifier per recorded layer and position, whose score is a signal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from knowgate.data.signals.features import COSTLY_FEATURES, available_features, feature_matrix
from knowgate.data.signals.samples import SEAKR, SEAKR_END, SEAKR_SAMPLES
from knowgate.data.signals.vectors import stack_hidden_states
from knowgate.errors import BadSetting
from knowgate.gates.artifacts.networks import apply_network
from knowgate.gates.fusion import GAIN_HEADS, TEXT_SIGNAL, WORDING_SIGNAL, combine_heads, embed_drafts, hash_drafts
from knowgate.retrieval.embeddings import SentenceEmbedder
from knowgate.stats.metrics import FloatArray, logit
from knowgate.training import classifiers
from knowgate.training.examples import LABEL_MORE_ADVICE, MIN_ROWS_PER_CLASS, Examples, require_both_classes
from knowgate.training.fit_function import ExampleRequirements, FitResult
from knowgate.training.probe import DRAFT_TOKENS, predict_out_of_fold
from knowgate.types import Embedder, Sampling, Signal, SignalRequest, Vector


def split_into_heads(examples: Examples) -> dict[str, Examples]:
    """Return the training data of the two classifiers (heads) for the target 'gain', by name.

    The head "closed" predicts whether the answer without passages is wrong, the head "open" whether the answer with
    passages is wrong.

    Raises:
        BadInput: The training split has too few right or too few wrong answers of one kind.
    """
    table = examples.table
    heads = {}
    for name, right in zip(GAIN_HEADS, (table.closed_book_right, table.retrieved_right), strict=True):
        is_wrong = ~right.astype(bool)
        what = (f"wrong {name}-book answers", f"right {name}-book answers")
        require_both_classes(is_wrong[examples.split.train], MIN_ROWS_PER_CLASS, what, LABEL_MORE_ADVICE)
        heads[name] = replace(examples, needed=is_wrong)  # classifiers predict the field `needed`
    return heads


def fit_calibrated_linear(rows: classifiers.LabeledFeatures, texts: Sequence[str]) -> classifiers.Tensors:
    """Fit a logistic regression with calibrated probabilities.

    The regularization is chosen, and the calibration is fitted, on out-of-fold predictions of a cross-validation.

    Args:
        rows: Training data with few columns.
        texts: The question of each row; equal questions share a fold.
    """
    predictions = {c: predict_out_of_fold(rows, texts, c) for c in classifiers.C_GRID}
    strength = min(classifiers.C_GRID, key=lambda c: compute_log_loss(rows, predictions[c]))
    tensors = classifiers.fit_linear(rows.features, rows.needed, strength)
    platt = classifiers.fit_platt_scaling(predictions[strength], rows.needed)
    # Platt scaling of a linear model is again a linear model, so it is folded into the weights.
    if platt["kind"] == "platt":
        tensors["0.0.weight"] = (platt["a"] * tensors["0.0.weight"]).astype(np.float32)
        tensors["0.0.bias"] = (platt["a"] * tensors["0.0.bias"] + platt["b"]).astype(np.float32)
    return tensors


def compute_log_loss(rows: classifiers.LabeledFeatures, needs: FloatArray) -> float:
    """Return the mean log loss of the predicted probabilities `needs`."""
    likelihood = np.clip(np.where(rows.needed, needs, 1 - needs), 1e-12, 1.0)
    return float(-np.log(likelihood).mean())


FIRST_TOKEN_FEATURES = ("first", "question_length")  # available with the first answer token
DISPERSION_FEATURES = {SEAKR, SEAKR_END}
TOKEN_FEATURES = {"first", "mean", "min", "mean_surprisal", "min_surprisal", "entropy", "margin"}
SAMPLE_FEATURES = {"certainty", "agreement"}
HEAD_NOTES = {"": "", "closed.": "right from memory, ", "open.": "right with passages, "}


def fit_fusion(
    examples: Annotated[Examples, ExampleRequirements(two_heads=True)],
    *,
    cheap: Annotated[bool, "Use cheap signals only: no sampled answers and no extra forward passes."] = False,
    early: Annotated[
        bool, "Use only signals that are available with the first answer token, for fast decisions."
    ] = False,
    text: Annotated[bool | None, "Also read question and draft as text. Default: only without hidden states."] = None,
    embedder: Embedder | None = None,
    judge_margins: Mapping[str, Vector] | None = None,
) -> FitResult:
    """Fit the fusion gate: a logistic regression over all recorded signals.

    For the target 'gain', two regressions are fitted: for answers without passages, and with passages.

    Args:
        examples: The training data.
        cheap: Leave out signals that need sampled answers or extra passes of the LLM.
        early: Use only signals that are available with the first answer token, so that the decision to retrieve costs
            only one short prefill.
        text: Add two classifiers of text: one of sentence embeddings of question and draft, one of the character n-grams
            of the draft. Default: only if there are no hidden states, as with LLMs behind an API.
        embedder: The sentence embedder of `text`. Default: the packaged model.
        judge_margins: Log-odds of judges as further signals, by name: one value per question. Training questions must be
            scored by a judge that was not trained on them.
    """
    if cheap and early:
        raise BadSetting("cheap=True and early=True are mutually exclusive. Use one of them: `early` computes less.")
    inputs = replace(_collect_inputs(examples, cheap, early), judge_margins=judge_margins or {})
    options = {"features": inputs.names, "probes": [], "cheap": cheap, "early": early}
    if text is None:
        text = not (examples.readings[0].hidden or early)
    if text:
        encoder = embedder or SentenceEmbedder()
        embeddings = embed_drafts(encoder, examples.questions, examples.readings)
        text_vectors = {TEXT_SIGNAL: embeddings, WORDING_SIGNAL: hash_drafts(examples.readings)}
        inputs = replace(inputs, text_vectors=text_vectors)
        options |= {"embedder": getattr(encoder, "spec", "own"), "embedder_fingerprint": encoder.fingerprint}
        options["wording"] = True
    heads = _fit_heads(examples, inputs)
    probes = next(iter(heads.values())).probes
    options["probes"] = probes
    if examples.target == "gain":
        options["heads"] = list(GAIN_HEADS)
    needs = _list_needed_signals(inputs, probes)
    request = _build_request(inputs.names, probes, examples)
    tensors, notes = _merge_heads(heads)

    def score_rows(indices: Sequence[int]) -> FloatArray:
        return combine_heads([head.predict(indices) for head in heads.values()])

    return FitResult("fusion", options, frozenset(needs), request, tensors, score_rows, notes=notes)


def _collect_inputs(examples: Examples, cheap: bool, early: bool) -> FusionInputs:
    """Collect the recorded features that the options allow.

    Args:
        examples: The label rows.
        cheap: Leave out features that need sampled answers or extra passes of the LLM.
        early: Leave out features of the draft, for a decision at the first answer token.
    """
    names = _select_features(examples, cheap, early)
    features = feature_matrix(names, examples.questions, examples.readings)
    classifiers.check_finite(features)
    positions = ("pre",) if early else ("pre", "post")  # hidden states before the answer, and after the draft
    return FusionInputs(names, features, positions)


def _merge_heads(heads: Mapping[str, FusionHead]) -> tuple[classifiers.Tensors, list[str]]:
    """Merge the weights of all regressions, and collect the notes for the model card."""
    tensors: classifiers.Tensors = {}
    notes: list[str] = []
    for prefix, head in heads.items():
        tensors |= {prefix + key: value for key, value in head.tensors.items()}
        notes += [HEAD_NOTES[prefix] + line for line in describe_contributions(head)]
    return tensors, notes


def _fit_heads(examples: Examples, inputs: FusionInputs) -> dict[str, FusionHead]:
    """Fit the regressions of a fusion gate: two for the target 'gain', else one.

    Returns:
        The regressions, by the prefix of their weights in the gate's file: '', or 'closed.' and 'open.'.
    """
    if examples.target != "gain":
        return {"": fit_head(examples, inputs)}
    return {f"{name}.": fit_head(part, inputs) for name, part in split_into_heads(examples).items()}


@dataclass(frozen=True)
class FusionInputs:
    """The inputs of a fusion gate.

    Probes (linear classifiers) are trained later. They turn hidden states and text vectors into further signals.

    Attributes:
        names: Names of the features.
        features: One row of features per question.
        positions: Where probes read hidden states: before the answer ("pre"), after the draft ("post"), or both.
        text_vectors: Vectors of question and draft, one row per question, by the name of the probe that reads them. Empty
            if no text is read.
        judge_margins: Log-odds of judges, by name: one value per question.
    """

    names: list[str]
    features: Vector
    positions: Sequence[str]
    text_vectors: Mapping[str, Vector] = field(default_factory=dict)
    judge_margins: Mapping[str, Vector] = field(default_factory=dict)


@dataclass
class FusionHead:
    """A logistic regression over signals. A gate with the target 'gain' has two heads.

    Attributes:
        examples: The training data.
        names: Name of each signal.
        signals: The values of the signals, one row per question and one column per signal.
        tensors: Weights of the regression, and of the probes behind some of the signals.
        probes: Name, layer and position of each probe of hidden states.
    """

    examples: Examples
    names: list[str]
    signals: Vector
    tensors: classifiers.Tensors = field(default_factory=dict)
    probes: list[dict[str, Any]] = field(default_factory=list)

    def add_probes(self, positions: Sequence[str]) -> None:
        """Train and add a probe for each recorded layer and each position."""
        for layer in sorted(self.examples.readings[0].hidden):
            for position in positions:
                name = f"probe-{position}-{layer}"
                self.add_probe(name, stack_hidden_states(self.examples.readings, layer, position))
                self.probes.append({"name": name, "layer": layer, "position": position})

    def add_probe(self, name: str, features: Vector) -> None:
        """Train a linear classifier (probe) on features and add its scores as a signal.

        Scores of training questions come from cross-validation.
        """
        classifiers.check_finite(features)
        train, dev = classifiers.select_train_and_dev(features, self.examples)
        tuned = classifiers.tune_linear(train, dev)
        column = logit(apply_network(tuned.tensors, features))
        indices = self.examples.split.train
        texts = [self.examples.questions[index].text for index in indices]
        # Replace the scores of training questions by those of the cross-validation.
        column[indices] = logit(predict_out_of_fold(train, texts, tuned.strength))
        self.tensors |= {f"{name}.{key}": value for key, value in tuned.tensors.items()}
        self.add(name, column)

    def add(self, name: str, column: Vector) -> None:
        """Add a signal, one value per question."""
        self.names.append(name)
        self.signals = np.column_stack([self.signals, column.astype(np.float32)])

    def fit_regression(self) -> None:
        """Fit the regression that combines the signals."""
        train, dev = classifiers.select_train_and_dev(self.signals, self.examples)
        if self.examples.target == "gain":
            texts = [self.examples.questions[index].text for index in self.examples.split.train]
            weights = fit_calibrated_linear(train, texts)
        else:
            weights = classifiers.tune_linear(train, dev).tensors
        self.tensors |= {f"fusion.{key}": value for key, value in weights.items()}

    def predict(self, indices: Sequence[int]) -> FloatArray:
        """Return the uncalibrated need of the questions with the given indices."""
        return apply_network(self.tensors, self.signals[list(indices)], "fusion.")


def fit_head(examples: Examples, inputs: FusionInputs) -> FusionHead:
    """Fit a logistic regression over all signals.

    Hidden states and texts are vectors, so a classifier (probe) turns each vector into a score first.

    Args:
        examples: The training data.
        inputs: Features, text vectors and log-odds of judges, and the positions at which hidden states are read.

    Raises:
        BadSetting: There are no signals to learn from.
    """
    head = FusionHead(examples, list(inputs.names), inputs.features.astype(np.float32))
    head.add_probes(inputs.positions)
    for name, vectors in inputs.text_vectors.items():
        head.add_probe(name, vectors)
    for name, margin in inputs.judge_margins.items():
        head.add(name, margin)
    if not head.names:
        raise BadSetting(
            "the label runs (recorded answers) contain no signals such as log-probabilities. Label again with a model that "
            "returns log-probabilities."
        )
    head.fit_regression()
    return head


def _select_features(examples: Examples, cheap: bool, early: bool) -> list[str]:
    """Return the names of the recorded features that the options allow.

    Args:
        examples: The label rows.
        cheap: Leave out features that need sampled answers or extra passes of the LLM.
        early: Use only features of the first answer token.
    """
    names = available_features(examples.questions, examples.readings)
    if cheap:
        names = [name for name in names if name not in COSTLY_FEATURES]
    if early:
        names = [name for name in names if name in FIRST_TOKEN_FEATURES]
    if not _has_seakr_samples(examples.settings):
        names = [name for name in names if name not in DISPERSION_FEATURES]
    return names


def _has_seakr_samples(settings: Mapping[str, Any]) -> bool:
    """Return whether SeaKR's features (differences between sampled answers) can be used.

    The setting `seakr` of a label run is the number of samples behind SeaKR's features, and `samples` is the number
    behind all other features. A gate draws samples only once, for all features. So the other features must use either
    no samples or at least as many as SeaKR.
    """
    n_samples = int(settings.get("samples", 0))
    return settings.get("seakr") == SEAKR_SAMPLES and (n_samples == 0 or n_samples >= SEAKR_SAMPLES)


def describe_contributions(head: FusionHead) -> list[str]:
    """Describe how much each signal contributes to the fusion, one line each.

    Example: "entropy: alone 0.712, without it -0.020" means that the AUROC falls by 0.02 without this signal.
    """
    columns = range(len(head.names))
    total = _measure_dev_auroc(head, columns)
    lines = [f"all signals: dev AUROC {total:.3f}"]
    for column, name in enumerate(head.names):
        alone = _measure_dev_auroc(head, [column])
        without = _measure_dev_auroc(head, [other for other in columns if other != column])
        lines.append(f"{name}: alone {alone:.3f}, without it {without - total:+.3f}")
    cheap = [column for column, name in enumerate(head.names) if name not in COSTLY_FEATURES]
    if cheap and len(cheap) < len(columns):
        cheap_auroc = _measure_dev_auroc(head, cheap)
        costly = ", ".join(COSTLY_FEATURES)
        lines.append(f"cheap fusion, without {costly}: {cheap_auroc:.3f} ({cheap_auroc - total:+.3f})")
    return lines


def _measure_dev_auroc(head: FusionHead, columns: Sequence[int]) -> float:
    """Fit a regression on some of the signals, and measure it on held-out questions."""
    if not columns:
        return 0.5  # the AUROC of chance
    split, needed = head.examples.split, head.examples.needed
    dev = np.concatenate([split.dev, split.calibration])
    signals = head.signals[:, list(columns)]
    tensors = classifiers.fit_linear(signals[split.train], needed[split.train], strength=0.1)
    return classifiers.auroc_or_half(needed[dev], apply_network(tensors, signals[dev]))


def _list_needed_signals(inputs: FusionInputs, probes: Sequence[dict[str, Any]]) -> set[Signal]:
    """Return the signals that the model must provide to compute these inputs and probes."""
    used = set(inputs.names)
    conditions = {
        Signal.LOGPROBS: bool(used & TOKEN_FEATURES),
        Signal.HIDDEN: bool(probes or used & DISPERSION_FEATURES),
        Signal.LABELS: "self_assessment" in used,
        Signal.SAMPLES: bool(used & (SAMPLE_FEATURES | DISPERSION_FEATURES)),
        Signal.DRAFT: bool(inputs.text_vectors),
    }
    return {signal for signal, is_needed in conditions.items() if is_needed}


def _build_request(names: Sequence[str], probes: Sequence[dict[str, Any]], examples: Examples) -> SignalRequest:
    """Build the request for the signals from which the features and the probes' scores are computed.

    Lengths and sampling parameters are those with which the training rows were labeled.

    Args:
        names: Names of the features.
        probes: Layer of each probe, and its position: hidden states before the answer ("pre") or after the draft ("post").
        examples: The training rows.
    """
    settings = examples.settings
    max_tokens = int(settings.get("max_tokens", DRAFT_TOKENS))
    reads_first_token_only = set(names) <= set(FIRST_TOKEN_FEATURES)
    request = SignalRequest(
        draft_tokens=1 if reads_first_token_only else max_tokens,
        layers=tuple(sorted({probe["layer"] for probe in probes})),
        after_draft=any(probe["position"] == "post" for probe in probes),
        sample_tokens=max_tokens,
    )
    n_samples = _count_samples(names, settings)
    if n_samples:
        # A fixed seed, so that a question always gets the same score.
        request = replace(request, samples=n_samples, sampling=_read_sampling(settings), seed=0)
    if DISPERSION_FEATURES & set(names):  # SeaKR's features compare the hidden states of the samples at one layer
        request = replace(request, sample_layer=settings["seakr_layer"], sample_end=SEAKR_END in names)
    return request


def _count_samples(names: Sequence[str], settings: Mapping[str, Any]) -> int:
    """Return the number of sampled answers that the features need, SeaKR's features (dispersion) included."""
    n_for_agreement = int(settings["samples"]) if SAMPLE_FEATURES & set(names) else 0
    n_for_dispersion = SEAKR_SAMPLES if DISPERSION_FEATURES & set(names) else 0
    return max(n_for_agreement, n_for_dispersion)


def _read_sampling(settings: Mapping[str, Any]) -> Sampling:
    """Return the sampling parameters of the label runs, with defaults for missing ones."""
    recorded = {key: settings[key] for key in asdict(Sampling()) if settings.get(key) is not None}
    return Sampling(**recorded)
