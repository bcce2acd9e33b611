"""Export a fitted judge of answers for llama.cpp: adapters merged into the base, one GGUF file for each training.

Threshold and calibration of the gate are kept. A guarantee is not: it was proven for other weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knowgate.core.files import check_replaceable
from knowgate.errors import BadSetting, MissingExtra, require_extra
from knowgate.gates import load_fitted_gate
from knowgate.gates.artifacts.gate_folder import CARD_FILE, GATE_KIND, GATE_MANIFEST, revise_artifact
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.judges import causal_judge, encode_answers, load_answer_judge
from knowgate.models.gguf import check_exportable, find_gguf_file, write_gguf
from knowgate.models.tokenization import extract_turn_template
from knowgate.types import Question

if TYPE_CHECKING:
    from knowgate.models.gguf import GgufFormat
    from knowgate.models.hf.model import HFModel

JUDGE_PROMPTS = {"judge": "judge", "gain": "judge", "ik": "ik"}  # gates with a judge of answers, and their prompts
# Scored before and after the export: short and long, certain and uncertain, with numbers, not in English.
CHECK_QUESTIONS = (
    ("What is the capital of France?", "Paris"),
    ("Who wrote the novel Middlemarch, and in which year did it appear?", "George Eliot, in 1871"),
    ("How many moons does Mars have?", "17"),
    ("Which river flows through Vienna?", "I don't know."),
    ("谁写了《红楼梦》?", "曹雪芹"),
    ("In what year was the mayor of the town born who opened its second bridge?", ""),
)
EXPORT_NOTE = "The judge was exported as GGUF ({}) and is run by llama.cpp; the metrics are from before the export"
ExportProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportedJudge:
    """An exported gate.

    Attributes:
        folder: Folder of the new gate.
        megabytes: Size of its GGUF files.
        max_deviation: Largest difference between a probability before and after the export, over a few fixed questions;
            None if llama.cpp is not installed.
    """

    folder: Path
    megabytes: float
    max_deviation: float | None


def export_judge(
    gate: str | Path, out: Path, *, kind: GgufFormat = "q8_0", watch: ExportProgressCallback = lambda done, total: None
) -> ExportedJudge:
    """Copy a gate and convert its judge to GGUF, for llama.cpp.

    Args:
        gate: Folder of a fitted judge, gain or ik (lora) gate.
        out: Folder of the new gate.
        kind: Format of the weights.
        watch: Called with the number of written tensors and the total.
    """
    fitted = load_fitted_gate(str(gate))
    _check_gate(fitted, out)
    artifact = fitted.artifact
    sources, _ = causal_judge.check_adapters(artifact.path / causal_judge.ADAPTER_FOLDER, artifact.options)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        targets = causal_judge.list_adapter_folders(Path(scratch) / causal_judge.ADAPTER_FOLDER, len(sources))
        members = [
            _write_member(fitted, source, target, kind, watch) for source, target in zip(sources, targets, strict=True)
        ]
        digests = [causal_judge.compute_adapter_digest(folder) for folder in targets]
        megabytes = sum((folder / causal_judge.GGUF_FILE).stat().st_size for folder in targets) / 1e6
        manifest = _update_manifest(artifact.manifest, _average_checks(members), digests)
        card = {CARD_FILE: _update_card(fitted, kind)}
        revise_artifact(artifact, manifest, card, out, {folder.name: folder for folder in targets})
    return ExportedJudge(out, megabytes, _measure_deviation(out))


def _check_gate(gate: FittedGate, out: Path) -> None:
    """Raise BadSetting if the gate cannot be exported for llama.cpp or `out` cannot be written."""
    options, folder = gate.artifact.options, gate.artifact.path
    is_encoder, is_exported = bool(options.get("pairs")), bool(options.get("gguf"))  # encoders read pairs of texts
    if gate.name not in JUDGE_PROMPTS or "base" not in options or is_encoder or is_exported:
        raise BadSetting(
            f"the gate in '{folder}' contains no causal language model to export. Use an unexported gate that `fit judge`, `fit "
            "gain` or `fit ik` made. Gates on small encoders cannot be exported."
        )
    if out.exists() and out.resolve() == folder.resolve():
        raise BadSetting(f"out='{out}' is the folder of the gate itself. Set `out` to another folder.")
    check_replaceable(out, GATE_MANIFEST, GATE_KIND)


def _write_member(
    gate: FittedGate, source: Path, target: Path, kind: GgufFormat, watch: ExportProgressCallback
) -> causal_judge.GgufOptions:
    """Write one model of a judge as a GGUF file for llama.cpp.

    Its predictions for a few questions are recorded, to compare them with those of the GGUF file.

    Args:
        gate: The gate with the judge.
        source: Folder of the model's trained weights or LoRA adapter.
        target: Folder to write.
        kind: Format of the weights.
        watch: Called with the number of written tensors and the total.

    Returns:
        How llama.cpp must run the model, and its probabilities for the check questions before the export.
    """
    options = gate.artifact.options
    model = merge_adapter(source, options)
    check_exportable(model.loaded.model.config)
    tokenizer = model.loaded.tokenizer
    target.mkdir(parents=True)
    tokenizer.backend_tokenizer.save(str(target / causal_judge.TOKENIZER_FILE))
    write_gguf(
        target / causal_judge.GGUF_FILE,
        model.loaded.model,
        tokenizer,
        number_format=kind,
        tokenizer_source=find_gguf_file(str(options["base"])),
        on_progress=watch,
    )
    turn = extract_turn_template(model.render, tokenizer.all_special_tokens, chat=bool(tokenizer.chat_template))
    judge = causal_judge.CausalJudge(model, (options["labels"][0], options["labels"][1]))
    known_token, unknown_token = judge.label_tokens
    checks = _predict_checks(JUDGE_PROMPTS[gate.name], judge, int(options["tokens"]))
    return causal_judge.GgufOptions(kind=kind, turn=turn, pair=(known_token, unknown_token), checks=checks)


def _predict_checks(
    prompt_name: str, judge: causal_judge.CausalJudge, tokens: int
) -> tuple[causal_judge.ReferencePrompt, ...]:
    """Predict how probably the answers to the check questions are right, as a reference for the exported judge."""
    questions = [Question(question) for question, _ in CHECK_QUESTIONS]
    answers = [answer for _, answer in CHECK_QUESTIONS]
    prompts = encode_answers(prompt_name, judge, questions, answers, tokens)
    predictions = zip(prompts, judge.predict_known(prompts), strict=True)
    return tuple(causal_judge.ReferencePrompt(tuple(prompt.ids), float(known)) for prompt, known in predictions)


def merge_adapter(folder: Path, options: Mapping[str, Any]) -> HFModel:
    """Load the base model and merge the LoRA adapter into its weights.

    A fully trained judge is loaded as it is.
    """
    if not causal_judge.is_adapter_folder(folder):
        return causal_judge.load_full_judge(folder)
    model = causal_judge.load_judge_base(str(options["base"]), str(options["base_fingerprint"]), folder)
    with require_extra("a LoRA judge", "train"):
        from peft import PeftModel
    PeftModel.from_pretrained(model.loaded.model, str(folder)).merge_and_unload()
    return model


def _average_checks(members: Sequence[causal_judge.GgufOptions]) -> causal_judge.GgufOptions:
    """Merge the options of all models of a judge: those of the first model, with averaged check probabilities.

    The check questions are scored before and after the export. An ensemble averages the scores of its models.
    """
    checks = []
    for number, check in enumerate(members[0].checks):
        known = np.mean([member.checks[number].known for member in members])
        checks.append(replace(check, known=float(known)))
    return replace(members[0], checks=tuple(checks))


def _update_manifest(
    manifest: Mapping[str, Any], gguf: causal_judge.GgufOptions, digests: Sequence[str]
) -> dict[str, Any]:
    """Return the manifest of the exported gate. The guarantee does not hold after the export.

    Args:
        manifest: Manifest of the original gate.
        gguf: How llama.cpp must run the judge.
        digests: Digest of the folder of each exported model.
    """
    options = {**manifest["options"], "adapter_sha256": digests[0], "gguf": asdict(gguf)}
    if len(digests) > 1:
        options["more_sha256"] = list(digests[1:])
    without_guarantee = {key: value for key, value in manifest.items() if key != "guarantee"}
    return {**without_guarantee, "options": options, "notes": [*manifest["notes"], EXPORT_NOTE.format(gguf.kind)]}


def _update_card(gate: FittedGate, kind: GgufFormat) -> str:
    """Return the gate's model card with a section about the export."""
    file = gate.artifact.path / CARD_FILE
    card = file.read_text(encoding="utf-8", errors="replace").rstrip() if file.is_file() else ""
    lost = ""
    if gate.artifact.manifest.get("guarantee"):
        lost = " The guarantee above was proven before the export and is not kept: run `knowgate calibrate` again."
    return f"{card}\n\n## Exported for llama.cpp\n\n{EXPORT_NOTE.format(kind)}.{lost}\n"


def _measure_deviation(folder: Path) -> float | None:
    """Return by how much the export changed the judge's predictions.

    Returns:
        The largest change of a probability on the check questions. None if llama.cpp, which runs the exported judge, is
        not installed.
    """
    gate = load_fitted_gate(str(folder))
    try:
        judge = load_answer_judge(JUDGE_PROMPTS[gate.name], gate.artifact.path, gate.artifact.options)
    except MissingExtra:
        return None
    assert isinstance(judge, causal_judge.LlamaJudge)
    return judge.measure_deviation()
