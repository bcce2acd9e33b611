"""An aligned reranker to disk: model files, `reranker.json`, a card; written whole or not at all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from knowgate.core.artifacts import compute_digests
from knowgate.core.display import escape_markdown, escape_markdown_code
from knowgate.core.files import atomic_folder, check_replaceable, sha256_file, write_json, write_text
from knowgate.data.preferences import RANK_METRIC_NAMES
from knowgate.retrieval.rerankers.cross_encoder import (
    RERANKER_BASE,
    RERANKER_CARD,
    RERANKER_MANIFEST,
    RERANKER_VERSION,
    RERANKER_WEIGHTS,
)
from knowgate.stats.bootstrap import Estimate, estimate_mean
from knowgate.stats.metrics import FloatArray
from knowgate.training.reranker import AlignedReranker, RelevanceReranker
from knowgate.training.reranker_trainer import PASSAGE_TOKENS, QUERY_TOKENS, TrainingLog, save_cross_encoder

RELEVANCE_MANIFEST = "relevance.json"  # of a base that was taught relevance alone
BOUND_SETTINGS = (
    "model",
    "model_fingerprint",
    "prompts_fingerprint",
    "source",
    "probe",
    "retriever",
    "retriever_fingerprint",
)


@dataclass(frozen=True)
class RankingGains:
    """Ranking measures on the test part: before alignment, after it, and the paired difference."""

    before: dict[str, Estimate]
    after: dict[str, Estimate]
    gain: dict[str, Estimate]


def measure_ranking_gains(fitted: AlignedReranker) -> RankingGains:
    difference = {name: fitted.after[name] - fitted.before[name] for name in fitted.after}
    return RankingGains(_means(fitted.before), _means(fitted.after), _means(difference))


def _means(values: Mapping[str, FloatArray]) -> dict[str, Estimate]:
    return {name: estimate_mean(numbers) for name, numbers in values.items()}


def save_reranker(
    fitted: AlignedReranker, out: Path, *, settings: Mapping[str, Any], data_hash: str, command: str = ""
) -> dict[str, Any]:
    """Write the folder; an earlier one in the same place is replaced as a whole. Gives the manifest back.

    settings: of the preference folder, which say what the reranker was aligned to.
    """
    manifest = build_reranker_manifest(fitted, settings, data_hash)
    check_replaceable(out, RERANKER_MANIFEST, "a reranker of ours")
    with atomic_folder(out) as folder:
        save_cross_encoder(fitted.model, folder)
        if fitted.base is not None:
            save_cross_encoder(fitted.base, folder / RERANKER_BASE)
        manifest["weights_sha256"] = sha256_file(folder / RERANKER_WEIGHTS)
        write_text(folder / RERANKER_CARD, render_reranker_card(manifest, command))
        manifest["files"] = compute_digests(folder, exclude=[RERANKER_MANIFEST, RERANKER_CARD])
        write_json(folder / RERANKER_MANIFEST, manifest)
    return manifest


def save_relevance(fitted: RelevanceReranker, out: Path, *, data: str, command: str = "") -> dict[str, Any]:
    """A plain cross-encoder folder; `relevance.json` says how it came about. An earlier one is replaced."""
    check_replaceable(out, RELEVANCE_MANIFEST, "a reranker trained on relevance")
    made = {
        "version": RERANKER_VERSION,
        "base": fitted.spec,
        "data": data,
        "training": asdict(fitted.training),
        "cut": asdict(fitted.cut),
        "losses": _losses(fitted.log),
        "command": command,
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    with atomic_folder(out) as folder:
        save_cross_encoder(fitted.model, folder)
        write_json(folder / RELEVANCE_MANIFEST, {**made, "weights_sha256": sha256_file(folder / RERANKER_WEIGHTS)})
    return made


def build_reranker_manifest(fitted: AlignedReranker, settings: Mapping[str, Any], data_hash: str) -> dict[str, Any]:
    """What the reranker was aligned to, and how."""
    gains = measure_ranking_gains(fitted)
    return {
        "version": RERANKER_VERSION,
        "base": fitted.spec,
        "aligned_to": {key: settings[key] for key in BOUND_SETTINGS if settings.get(key) is not None},
        "reads_question": fitted.reads_question,
        "data": settings.get("data"),
        "data_hash": data_hash,
        "training": asdict(fitted.training),
        "limits": {"question_tokens": QUERY_TOKENS, "passage_tokens": PASSAGE_TOKENS},
        "cut": asdict(fitted.cut),
        "losses": {
            stage: _losses(trained)
            for stage, trained in (("relevance", fitted.relevance), ("alignment", fitted.alignment))
            if trained
        },
        "tested": len(fitted.tested),
        "metrics": {name: {key: asdict(found) for key, found in part.items()} for name, part in list_gain_parts(gains)},
        "created": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def list_gain_parts(gains: RankingGains) -> list[tuple[str, dict[str, Estimate]]]:
    return [("before", gains.before), ("after", gains.after), ("gain", gains.gain)]


def _losses(trained: TrainingLog) -> dict[str, Any]:
    """Means of the first and last tenth of what was logged: single batches jump."""
    tenth = max(1, len(trained.losses) // 10)
    return {
        "groups": trained.groups,
        "first": round(sum(trained.losses[:tenth]) / tenth, 6) if trained.losses else None,
        "last": round(sum(trained.losses[-tenth:]) / tenth, 6) if trained.losses else None,
        "seconds": round(trained.seconds, 1),
    }


def render_reranker_card(manifest: Mapping[str, Any], command: str) -> str:
    """Markdown people can read."""
    aligned, training = manifest["aligned_to"], manifest["training"]
    rows = [
        ("aligned to", f"{aligned['model']} ({aligned['model_fingerprint']}), by {aligned['source']}"),
        ("prompts", aligned["prompts_fingerprint"]),
        ("probe", aligned.get("probe", {}).get("name")),
        ("preferences", f"{manifest['data']} (hash {manifest['data_hash']})"),
        ("base", manifest["base"]),
        ("loss", f"{training['loss']}, temperature {training['temperature']}, rate {training['rate']}, "
                 f"weight decay {training['weight_decay']}, {training['epochs']} epoch(s), batch {training['batch']}"),
        *((f"{stage} loss", f"{found['first']} at the start, {found['last']} at the end, {found['groups']} groups")
          for stage, found in manifest["losses"].items()),
        ("question", None if manifest["reads_question"] else "unread: a control"),
        ("cut to the limit", f"{manifest['cut']['questions']} questions, {manifest['cut']['passages']} passages"),
    ]  # fmt: skip
    parts = [
        f"# Reranker aligned to {escape_markdown(aligned['model'])}",
        f"A cross-encoder that puts first the passages this LLM can use (CBDR). knowgate, {manifest['created']}.",
        '```console\nknowgate ask --rerank THIS_FOLDER --docs FOLDER "a question"\n```',
        "| | |\n|---|---|\n"
        + "\n".join(f"| {name} | {escape_markdown(str(value))} |" for name, value in rows if value),
        f"## Measured on {manifest['tested']} held-out questions\n\n" + _measures(manifest),
    ]
    if command:
        parts.append(f"## Made by\n\n```console\n{escape_markdown_code(command)}\n```")
    return "\n\n".join(parts) + "\n"


def _measures(manifest: Mapping[str, Any]) -> str:
    metrics = manifest["metrics"]
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
