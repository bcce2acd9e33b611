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

from knowgate.errors import BadSetting, MissingExtra
from knowgate.files import check_replaceable
from knowgate.gates import (
    ADAPTER_FOLDER,
    CARD,
    GGUF_NAME,
    KIND,
    MANIFEST,
    TOKENIZER_NAME,
    CheckedPrompt,
    FittedGate,
    GgufOptions,
    Judge,
    adapter_digest,
    adapter_folders,
    answer_cuts,
    checked_adapters,
    is_adapter,
    load_fitted,
    open_base,
    revise_artefact,
    whole_judge,
)
from knowgate.models import check_writable, gguf_behind, turn_of, write_gguf
from knowgate.statistics import Floats
from knowgate.types import Question

if TYPE_CHECKING:
    from knowgate.models import GgufKind, HFModel

# What the judge is asked before and after it is written: short and long, sure and unsure, with figures, not English
ASKED_BY = {"judge": "judge", "gain": "judge", "ik": "ik"}  # gates with a judge of answers: what it is asked
ASKED = (
    ("What is the capital of France?", "Paris"),
    ("Who wrote the novel Middlemarch, and in which year did it appear?", "George Eliot, in 1871"),
    ("How many moons does Mars have?", "17"),
    ("Which river flows through Vienna?", "I don't know."),
    ("谁写了《红楼梦》?", "曹雪芹"),
    ("In what year was the mayor of the town born who opened its second bridge?", ""),
)
Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportedJudge:
    """Where it lies, and how far it is at most from what it said before; None where llama.cpp is not here to ask."""

    folder: Path
    megabytes: float
    off_by: float | None


def export_judge(
    gate: str | Path, out: Path, *, kind: GgufKind = "q8_0", watch: Watch = lambda done, total: None
) -> ExportedJudge:
    """Write the gate in a folder anew, with a judge that llama.cpp runs."""
    fitted = load_fitted(str(gate))
    _check(fitted, out)
    options = fitted.artefact.options
    folders, _ = checked_adapters(fitted.artefact.path / ADAPTER_FOLDER, options)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        made = adapter_folders(Path(scratch) / ADAPTER_FOLDER, len(folders))
        told = [_write(fitted, source, target, kind, watch) for source, target in zip(folders, made, strict=True)]
        about = _options(told, kind)
        digests = [adapter_digest(folder) for folder in made]
        megabytes = sum((folder / GGUF_NAME).stat().st_size for folder in made) / 1e6
        manifest = _manifest(fitted.artefact.manifest, about, digests)
        revise_artefact(fitted.artefact, manifest, _texts(fitted, kind), out, {each.name: each for each in made})
    return ExportedJudge(out, megabytes, _off_by(out))


@dataclass(frozen=True)
class _Written:
    """One training: how it is spoken to, and what it said to what it was asked."""

    pair: tuple[int, int]
    turn: Any
    ids: list[list[int]]
    known: Floats


def _check(gate: FittedGate, out: Path) -> None:
    options, folder = gate.artefact.options, gate.artefact.path
    if gate.name not in ASKED_BY or "base" not in options:
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
    check_replaceable(out, MANIFEST, KIND)


def _write(gate: FittedGate, source: Path, target: Path, kind: GgufKind, watch: Watch) -> _Written:
    options = gate.artefact.options
    model = merged(source, options)
    check_writable(model.loaded.model.config)
    judge = Judge(model, (options["labels"][0], options["labels"][1]))
    questions, answers = [Question(asked) for asked, _ in ASKED], [answer for _, answer in ASKED]
    cuts = answer_cuts(ASKED_BY[gate.name], judge, questions, answers, int(options["tokens"]))
    tokenizer = model.loaded.tokenizer
    turn = turn_of(model.render, tokenizer.all_special_tokens, chat=bool(tokenizer.chat_template))
    target.mkdir(parents=True)
    tokenizer.backend_tokenizer.save(str(target / TOKENIZER_NAME))
    tokens_of = gguf_behind(str(options["base"]))
    write_gguf(target / GGUF_NAME, model.loaded.model, tokenizer, kind=kind, tokens_of=tokens_of, watch=watch)
    first, second = judge.columns
    return _Written((first, second), turn, [cut.ids for cut in cuts], judge.known(cuts))


def merged(folder: Path, options: Mapping[str, Any]) -> HFModel:
    """The base with one training's adapter added to its weights; a judge that was trained in full is its own."""
    if not is_adapter(folder):
        return whole_judge(folder)
    model = open_base(str(options["base"]), str(options["base_fingerprint"]), folder)
    try:
        from peft import PeftModel
    except ModuleNotFoundError:
        raise MissingExtra("a LoRA judge", "train") from None
    PeftModel.from_pretrained(model.loaded.model, str(folder)).merge_and_unload()
    return model


def _options(told: Sequence[_Written], kind: GgufKind) -> GgufOptions:
    known = np.mean([one.known for one in told], axis=0)
    checks = [CheckedPrompt(tuple(ids), float(share)) for ids, share in zip(told[0].ids, known, strict=True)]
    return GgufOptions(kind=kind, turn=told[0].turn, pair=told[0].pair, checks=tuple(checks))


def _manifest(manifest: Mapping[str, Any], about: GgufOptions, digests: Sequence[str]) -> dict[str, Any]:
    options = {**manifest["options"], "adapter_sha256": digests[0], "gguf": asdict(about)}
    if len(digests) > 1:
        options["more_sha256"] = list(digests[1:])
    kept = {key: value for key, value in manifest.items() if key != "guarantee"}
    return {**kept, "options": options, "notes": [*manifest["notes"], _note(about.kind)]}


def _note(kind: str) -> str:
    return f"the judge was written as GGUF ({kind}) and is run by llama.cpp; what was measured was measured before"


def _texts(gate: FittedGate, kind: GgufKind) -> dict[str, str]:
    file = gate.artefact.path / CARD
    card = file.read_text(encoding="utf-8", errors="replace").rstrip() if file.is_file() else ""
    lost = ""
    if gate.artefact.manifest.get("guarantee"):
        lost = " The guarantee above was proven for the judge as it was and is not kept: `knowgate calibrate` it again."
    return {CARD: f"{card}\n\n## Written for llama.cpp\n\nT{_note(kind)[1:]}.{lost}\n"}


def _off_by(folder: Path) -> float | None:
    """Opened as `ask` will open it, where it can be."""
    from knowgate.gates import LlamaJudge, open_answer_judge

    gate = load_fitted(str(folder))
    try:
        judge = open_answer_judge(ASKED_BY[gate.name], gate.artefact.path, gate.artefact.options)
    except MissingExtra:
        return None
    assert isinstance(judge, LlamaJudge)
    return judge.off_by()
