"""A fitted judge of answers written for llama.cpp: adapters merged into the base, one GGUF file for each training.

The gate stays what it was, with other files in it: threshold and calibration are kept, a guarantee is not, since it was
proven for other numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from knowgate.core.files import check_replaceable
from knowgate.errors import BadSetting, MissingExtra
from knowgate.gates import load_fitted_gate
from knowgate.gates.artifacts.gate_folder import CARD_FILE, GATE_KIND, GATE_MANIFEST, revise_artifact
from knowgate.gates.fitted_gate import FittedGate
from knowgate.gates.judges import encode_answers
from knowgate.gates.judges.causal_judge import (
    ADAPTER_FOLDER,
    GGUF_FILE,
    TOKENIZER_FILE,
    CausalJudge,
    GgufOptions,
    ReferencePrompt,
    check_adapters,
    compute_adapter_digest,
    is_adapter_folder,
    list_adapter_folders,
    load_full_judge,
    load_judge_base,
)
from knowgate.models.gguf import check_exportable, find_gguf_file, write_gguf
from knowgate.models.tokenization import extract_turn_template
from knowgate.stats.metrics import FloatArray
from knowgate.types import Question

if TYPE_CHECKING:
    from knowgate.models.gguf import GgufFormat
    from knowgate.models.hf.model import HFModel

# What the judge is asked before and after it is written: short and long, sure and unsure, with figures, not English
JUDGE_PROMPTS = {"judge": "judge", "gain": "judge", "ik": "ik"}  # gates with a judge of answers: what it is asked
CHECK_QUESTIONS = (
    ("What is the capital of France?", "Paris"),
    ("Who wrote the novel Middlemarch, and in which year did it appear?", "George Eliot, in 1871"),
    ("How many moons does Mars have?", "17"),
    ("Which river flows through Vienna?", "I don't know."),
    ("谁写了《红楼梦》?", "曹雪芹"),
    ("In what year was the mayor of the town born who opened its second bridge?", ""),
)
ExportProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportedJudge:
    """Where it lies, and how far it is at most from what it said before; None where llama.cpp is not here to ask."""

    folder: Path
    megabytes: float
    off_by: float | None


def export_judge(
    gate: str | Path, out: Path, *, kind: GgufFormat = "q8_0", watch: ExportProgressCallback = lambda done, total: None
) -> ExportedJudge:
    """Write the gate in a folder anew, with a judge that llama.cpp runs."""
    fitted = load_fitted_gate(str(gate))
    _check(fitted, out)
    options = fitted.artifact.options
    folders, _ = check_adapters(fitted.artifact.path / ADAPTER_FOLDER, options)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        made = list_adapter_folders(Path(scratch) / ADAPTER_FOLDER, len(folders))
        told = [_write(fitted, source, target, kind, watch) for source, target in zip(folders, made, strict=True)]
        about = _options(told, kind)
        digests = [compute_adapter_digest(folder) for folder in made]
        megabytes = sum((folder / GGUF_FILE).stat().st_size for folder in made) / 1e6
        manifest = _manifest(fitted.artifact.manifest, about, digests)
        revise_artifact(fitted.artifact, manifest, _texts(fitted, kind), out, {each.name: each for each in made})
    return ExportedJudge(out, megabytes, _off_by(out))


@dataclass(frozen=True)
class _Written:
    """One training: how it is spoken to, and what it said to what it was asked."""

    pair: tuple[int, int]
    turn: Any
    ids: list[list[int]]
    known: FloatArray


def _check(gate: FittedGate, out: Path) -> None:
    options, folder = gate.artifact.options, gate.artifact.path
    if gate.name not in JUDGE_PROMPTS or "base" not in options:
        raise BadSetting(
            f"'{folder}' is a fitted {gate.name} and has no judge of answers; judge, gain and ik (lora) have."
        )
    if options.get("pairs"):
        raise BadSetting(
            f"the judge in '{folder}' is a small encoder, which llama.cpp cannot run: it is fast as it is."
        )
    if options.get("gguf"):
        raise BadSetting(f"the judge in '{folder}' is a GGUF file already. Export the gate it was made from.")
    if out.exists() and out.resolve() == folder.resolve():
        raise BadSetting(f"the gate '{folder}' would take its own place. Give another folder: --out DIR")
    check_replaceable(out, GATE_MANIFEST, GATE_KIND)


def _write(gate: FittedGate, source: Path, target: Path, kind: GgufFormat, watch: ExportProgressCallback) -> _Written:
    options = gate.artifact.options
    model = merge_adapter(source, options)
    check_exportable(model.loaded.model.config)
    judge = CausalJudge(model, (options["labels"][0], options["labels"][1]))
    questions, answers = [Question(asked) for asked, _ in CHECK_QUESTIONS], [answer for _, answer in CHECK_QUESTIONS]
    cuts = encode_answers(JUDGE_PROMPTS[gate.name], judge, questions, answers, int(options["tokens"]))
    tokenizer = model.loaded.tokenizer
    turn = extract_turn_template(model.render, tokenizer.all_special_tokens, chat=bool(tokenizer.chat_template))
    target.mkdir(parents=True)
    tokenizer.backend_tokenizer.save(str(target / TOKENIZER_FILE))
    write_gguf(
        target / GGUF_FILE,
        model.loaded.model,
        tokenizer,
        number_format=kind,
        tokenizer_source=find_gguf_file(str(options["base"])),
        on_progress=watch,
    )
    first, second = judge.label_tokens
    return _Written((first, second), turn, [cut.ids for cut in cuts], judge.predict_known(cuts))


def merge_adapter(folder: Path, options: Mapping[str, Any]) -> HFModel:
    """The base with one training's adapter added to its weights; a judge that was trained in full is its own."""
    if not is_adapter_folder(folder):
        return load_full_judge(folder)
    model = load_judge_base(str(options["base"]), str(options["base_fingerprint"]), folder)
    try:
        from peft import PeftModel
    except ModuleNotFoundError:
        raise MissingExtra("a LoRA judge", "train") from None
    PeftModel.from_pretrained(model.loaded.model, str(folder)).merge_and_unload()
    return model


def _options(told: Sequence[_Written], kind: GgufFormat) -> GgufOptions:
    known = np.mean([one.known for one in told], axis=0)
    checks = [ReferencePrompt(tuple(ids), float(share)) for ids, share in zip(told[0].ids, known, strict=True)]
    return GgufOptions(kind=kind, turn=told[0].turn, pair=told[0].pair, checks=tuple(checks))


def _manifest(manifest: Mapping[str, Any], about: GgufOptions, digests: Sequence[str]) -> dict[str, Any]:
    options = {**manifest["options"], "adapter_sha256": digests[0], "gguf": asdict(about)}
    if len(digests) > 1:
        options["more_sha256"] = list(digests[1:])
    kept = {key: value for key, value in manifest.items() if key != "guarantee"}
    return {**kept, "options": options, "notes": [*manifest["notes"], _note(about.kind)]}


def _note(kind: str) -> str:
    return f"the judge was written as GGUF ({kind}) and is run by llama.cpp; what was measured was measured before"


def _texts(gate: FittedGate, kind: GgufFormat) -> dict[str, str]:
    file = gate.artifact.path / CARD_FILE
    card = file.read_text(encoding="utf-8", errors="replace").rstrip() if file.is_file() else ""
    lost = ""
    if gate.artifact.manifest.get("guarantee"):
        lost = " The guarantee above was proven for the judge as it was and is not kept: `knowgate calibrate` it again."
    return {CARD_FILE: f"{card}\n\n## Written for llama.cpp\n\nT{_note(kind)[1:]}.{lost}\n"}


def _off_by(folder: Path) -> float | None:
    """Opened as `ask` will open it, where it can be."""
    from knowgate.gates.judges import load_answer_judge
    from knowgate.gates.judges.causal_judge import LlamaJudge

    gate = load_fitted_gate(str(folder))
    try:
        judge = load_answer_judge(JUDGE_PROMPTS[gate.name], gate.artifact.path, gate.artifact.options)
    except MissingExtra:
        return None
    assert isinstance(judge, LlamaJudge)
    return judge.measure_deviation()
