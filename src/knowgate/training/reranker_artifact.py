"""The folder of a fitted reranker: weights, manifest and model card."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from knowgate.core.artifacts import compute_digests
from knowgate.core.display import escape_markdown
from knowgate.core.files import atomic_folder, check_replaceable, sha256_file, write_json, write_text
from knowgate.data.preferences import RANK_METRIC_NAMES
from knowgate.retrieval.rerankers import cross_encoder
from knowgate.stats.bootstrap import Estimate, estimate_mean
from knowgate.training.model_card import format_facts, format_usage, join_card
from knowgate.training.reranker import AlignedReranker, RelevanceReranker, save_cross_encoder
from knowgate.training.reranker_trainer import PASSAGE_TOKENS, QUERY_TOKENS, TrainingLog

RELEVANCE_MANIFEST = "relevance.json"  # the manifest of a cross-encoder that was trained on relevance only
# Settings of the preferences that say what a reranker is aligned to.
LLM_SETTINGS = ("model", "model_fingerprint", "prompts_fingerprint")
ALIGNMENT_SETTINGS = (*LLM_SETTINGS, "source", "probe", "retriever", "retriever_fingerprint")


def measure_ranking_gains(fitted: AlignedReranker) -> dict[str, dict[str, Estimate]]:
    """Average the ranking metrics over the test questions, before and after alignment.

    Returns:
        For each of 'before', 'after' and 'gain' (after minus before), the mean of each metric with its confidence
        interval. The gain is averaged over the differences of single questions.
    """
    gain = {name: fitted.after[name] - fitted.before[name] for name in fitted.after}
    parts = {"before": fitted.before, "after": fitted.after, "gain": gain}
    return {part: {name: estimate_mean(values) for name, values in metrics.items()} for part, metrics in parts.items()}


def save_reranker(
    fitted: AlignedReranker, out: Path, *, settings: Mapping[str, Any], data_hash: str, command: str = ""
) -> dict[str, Any]:
    """Write the folder of a reranker and return its manifest.

    Args:
        fitted: The reranker.
        out: Folder to write; an earlier reranker there is replaced.
        settings: Settings of the preferences, which say what the reranker is aligned to.
        data_hash: Hash of the preferences.
        command: The command line that the card shows.
    """
    manifest = build_reranker_manifest(fitted, settings, data_hash)
    check_replaceable(out, cross_encoder.RERANKER_MANIFEST, "a reranker of ours")
    with atomic_folder(out) as folder:
        save_cross_encoder(fitted.model, folder)
        if fitted.base is not None:
            save_cross_encoder(fitted.base, folder / cross_encoder.RERANKER_BASE)
        manifest["weights_sha256"] = sha256_file(folder / cross_encoder.RERANKER_WEIGHTS)
        write_text(folder / cross_encoder.RERANKER_CARD, render_reranker_card(manifest, command))
        without_digest = [cross_encoder.RERANKER_MANIFEST, cross_encoder.RERANKER_CARD]
        manifest["files"] = compute_digests(folder, exclude=without_digest)
        write_json(folder / cross_encoder.RERANKER_MANIFEST, manifest)
    return manifest


def save_relevance(fitted: RelevanceReranker, out: Path, *, data: str, command: str = "") -> dict[str, Any]:
    """Write the folder of a cross-encoder trained on relevance, and return its manifest.

    Args:
        fitted: The cross-encoder.
        out: Folder to write.
        data: Name of the training data, for the manifest.
        command: The command line that made it, for the manifest.
    """
    check_replaceable(out, RELEVANCE_MANIFEST, "a reranker trained on relevance")
    manifest = {
        "version": cross_encoder.RERANKER_VERSION,
        "base": fitted.spec,
        "data": data,
        "training": asdict(fitted.training),
        "cut": fitted.log.cut,
        "losses": _summarize_losses(fitted.log),
        "command": command,
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    with atomic_folder(out) as folder:
        save_cross_encoder(fitted.model, folder)
        digest = sha256_file(folder / cross_encoder.RERANKER_WEIGHTS)
        write_json(folder / RELEVANCE_MANIFEST, {**manifest, "weights_sha256": digest})
    return manifest


def build_reranker_manifest(fitted: AlignedReranker, settings: Mapping[str, Any], data_hash: str) -> dict[str, Any]:
    """Build the manifest of a reranker, with its training and metrics."""
    logs = {"relevance": fitted.relevance, "alignment": fitted.alignment}
    selection = fitted.alignment.selection
    gains = measure_ranking_gains(fitted)
    return {
        "version": cross_encoder.RERANKER_VERSION,
        "base": fitted.spec,
        "aligned_to": {key: settings[key] for key in ALIGNMENT_SETTINGS if settings.get(key) is not None},
        "reads_question": fitted.reads_question,
        "data": settings.get("data"),
        "data_hash": data_hash,
        "training": asdict(fitted.training),
        "limits": {"question_tokens": QUERY_TOKENS, "passage_tokens": PASSAGE_TOKENS},
        "cut": fitted.alignment.cut,
        "losses": {stage: _summarize_losses(log) for stage, log in logs.items() if log},
        "selection": asdict(selection) if selection else None,
        "tested": len(fitted.tested),
        "metrics": {part: {name: asdict(mean) for name, mean in means.items()} for part, means in gains.items()},
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _summarize_losses(log: TrainingLog) -> dict[str, Any]:
    """Summarize a training by the mean loss of its first and last tenth."""
    tenth = max(1, len(log.losses) // 10)
    return {
        "groups": log.groups,
        "first": round(sum(log.losses[:tenth]) / tenth, 6) if log.losses else None,
        "last": round(sum(log.losses[-tenth:]) / tenth, 6) if log.losses else None,
        "seconds": round(log.seconds, 1),
    }


def render_reranker_card(manifest: Mapping[str, Any], command: str) -> str:
    """Render the model card of a reranker from its manifest."""
    aligned = manifest["aligned_to"]
    training = manifest["training"]
    cut = manifest["cut"]
    losses = [
        (f"{stage} loss", f"{loss['first']} at the start, {loss['last']} at the end, {loss['groups']} groups")
        for stage, loss in manifest["losses"].items()
    ]
    facts = [
        ("aligned to", f"{aligned['model']} ({aligned['model_fingerprint']}), by {aligned['source']}"),
        ("prompts", aligned["prompts_fingerprint"]),
        ("probe", aligned.get("probe", {}).get("name")),
        ("preferences", f"{manifest['data']} (hash {manifest['data_hash']})"),
        ("base", manifest["base"]),
        (
            "loss",
            f"InfoNCE, temperature {training['temperature']}, rate {training['rate']}, weight decay "
            f"{training['weight_decay']}, {training['epochs']} epoch(s), batch {training['batch']}",
        ),
        *losses,
        ("weights", _format_selection(manifest["selection"])),
        ("question", None if manifest["reads_question"] else "not read: a control"),
        ("cut to the limit", f"{cut['questions']} questions, {cut['passages']} passages"),
    ]
    parts = [
        f"# Reranker aligned to {escape_markdown(aligned['model'])}",
        f"A cross-encoder that ranks passages this LLM can use first (CBDR). knowgate, {manifest['created']}.",
        format_usage(rerank="THIS_FOLDER", docs="FOLDER"),
        format_facts(facts),
        f"## Measured on {manifest['tested']} held-out questions\n\n" + _format_ranking_metrics(manifest["metrics"]),
    ]
    return join_card(parts, command=command)


def _format_selection(selection: Mapping[str, Any] | None) -> str:
    """Describe which weights were kept. Without dev questions, `selection` is None."""
    if selection is None:
        return "weights of the last update"
    values = f"P@1 {selection['chosen']:.3f} on {selection['questions']} dev questions, base {selection['base']:.3f}"
    if not selection["share"]:
        return f"weights of the base, because no other weights rank the dev questions better; {values}"
    return f"weights after update {selection['update']}, averaged with the base (share {selection['share']}); {values}"


def _format_ranking_metrics(metrics: Mapping[str, Any]) -> str:
    """Format the ranking metrics before and after alignment as a Markdown table."""
    if not metrics["after"]:
        return "No question was held out: measure with `knowgate eval-rerank`."
    lines = ["| measure | before | after | gain, 95 % interval |", "|---|---|---|---|"]
    for name in RANK_METRIC_NAMES:
        gain = metrics["gain"][name]
        lines.append(
            f"| {name} | {metrics['before'][name]['value']:.3f} | {metrics['after'][name]['value']:.3f} "
            f"| {gain['value']:+.3f} [{gain['low']:+.3f}, {gain['high']:+.3f}] |"
        )
    return "\n".join(lines)
