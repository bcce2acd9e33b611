"""A cross-encoder reads question and passage together and gives one score.

Runs on sentence-transformers (extra `local`).
Reference: Nogueira and Cho 2019, Passage re-ranking with BERT. Training one is not done here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.artifacts import PICKLE_SUFFIXES, check_artifact_folder, check_digests
from knowgate.core.files import sha256_file, sha256_text
from knowgate.core.schema import read_record
from knowgate.core.validation import expand_path, read_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, MissingExtra, ModelError, WeightsError
from knowgate.types import Passage

RERANKER_VERSION = 1
RERANKER_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".md", ".jinja")
RERANKER_MANIFEST, RERANKER_WEIGHTS = "reranker.json", "model.safetensors"
RERANKER_CARD = "README.md"
FINGERPRINT_KEY = "model_fingerprint"
RERANKER_BASE = "base"  # the cross-encoder before alignment, where it was made here


@dataclass(frozen=True)
class RerankerManifest:
    """`files` are the digests of all files but the card; rerankers of earlier versions have none."""

    version: int
    weights_sha256: str
    base: str = ""
    aligned_to: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    reads_question: bool = True


def is_aligned_reranker(path: str | Path) -> bool:
    return (expand_path(path) / RERANKER_MANIFEST).is_file()


def check_reranker_files(path: str | Path) -> None:
    """Refuse what could run code when it is loaded: a folder of weights holds safetensors and text, nothing else."""
    folder = expand_path(path)
    if not any(folder.glob("*.safetensors")):
        found = sorted(item.name for item in folder.iterdir() if item.suffix in PICKLE_SUFFIXES)
        holds = f" (only {', '.join(found)}, which is pickle)" if found else ""
        raise WeightsError(f"the reranker '{path}' cannot be loaded: it has no safetensors weights{holds}.")
    foreign = sorted(str(item.relative_to(folder)) for item in folder.rglob("*") if _is_foreign(item))
    if is_aligned_reranker(folder) and foreign:
        raise ArtifactError(
            f"the reranker '{path}' holds '{foreign[0]}', which knowgate did not write there. Fit it again."
        )


def _is_foreign(item: Path) -> bool:
    return item.is_file() and item.suffix not in RERANKER_SUFFIXES


def read_reranker_manifest(path: str | Path) -> Mapping[str, Any]:
    """The manifest of an aligned reranker, checked against its weights."""
    folder = expand_path(path)
    if not is_aligned_reranker(folder):
        raise ArtifactError(
            f"'{path}' is not an aligned reranker: it has no {RERANKER_MANIFEST}. Make one: knowgate fit reranker"
        )
    try:
        manifest: Mapping[str, Any] = read_json(folder / RERANKER_MANIFEST)
        record = read_record(RerankerManifest, manifest, RERANKER_MANIFEST, ignore_unknown=True)
    except BadInput as error:
        raise ArtifactError(f"{folder / RERANKER_MANIFEST} is broken ({error}). Fit the reranker again.") from None
    if record.version != RERANKER_VERSION:
        raise ArtifactError(
            f"the reranker '{path}' has format {record.version}, this knowgate reads {RERANKER_VERSION}. Fit it again."
        )

    def refusal(problem: str) -> ArtifactError:
        return ArtifactError(f"the reranker '{path}' cannot be used: {problem}. Fit it again.")

    check_artifact_folder(folder, refusal)
    if not (folder / RERANKER_WEIGHTS).is_file() or sha256_file(folder / RERANKER_WEIGHTS) != record.weights_sha256:
        raise ArtifactError(f"the weights of the reranker '{path}' were changed or damaged. Fit it again.")
    check_digests(folder, record.files, refusal)
    return manifest


def fingerprint_weights(path: str | Path) -> str:
    """Of the weights of a saved cross-encoder, wherever it lies."""
    files = sorted(expand_path(path).glob("*.safetensors"))
    if not files:
        raise WeightsError(f"'{path}' holds no safetensors weights.")
    return sha256_text(*map(sha256_file, files))[:16]


def describe_llm_mismatch(path: str | Path, model: str, fingerprint: str) -> str | None:
    """What to say of a reranker that was aligned to another LLM: it still ranks, but not for this one."""
    if (
        not is_aligned_reranker(path)
        or (made := read_reranker_manifest(path).get("aligned_to", {})).get(FINGERPRINT_KEY) == fingerprint
    ):
        return None
    return f"The reranker '{path}' was aligned to {made.get('model', 'another LLM')}, not to {model}."


EMPTY_QUESTION = ""  # stands where a question would: see `reads_question`


class CrossEncoderReranker:
    """Scores are logits: any finite number, higher is better. Loaded on first use, on the GPU if there is one."""

    def __init__(self, spec: str, *, device: str | None = None, batch_size: int | None = None):
        if not spec:
            raise BadSetting("a cross-encoder needs a model: cross-encoder:NAME_OR_DIR.")
        self.spec = spec
        self._device = device
        self._batch_size = batch_size

    @classmethod
    def around(cls, model: Any, spec: str, *, reads_question: bool = True) -> CrossEncoderReranker:
        """A reranker of a cross-encoder that is already loaded."""
        reranker = cls(spec)
        reranker.__dict__ |= {"_model": model, "reads_question": reads_question}
        return reranker

    @cached_property
    def reads_question(self) -> bool:
        """False of a control that was taught, and is asked, without the question: it ranks passages as such."""
        if not is_aligned_reranker(self.spec):
            return True
        check_reranker_files(self.spec)
        return bool(read_reranker_manifest(self.spec).get("reads_question", True))

    @property
    def name(self) -> str:
        return f"cross-encoder:{self.spec}"

    @cached_property
    def fingerprint(self) -> str:
        """Of a folder the hash of its weights, wherever it lies; of a hub name its commit."""
        if Path(self.spec).is_dir():
            return fingerprint_weights(self.spec)
        return sha256_text("hub", self.spec, str(getattr(self._model.config, "_commit_hash", None)))[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """One score per passage of each question; pairs of all questions share batches.

        A pair that comes twice is scored once: in another batch its score could differ in the last bits.
        """
        if len(questions) != len(passages):
            raise BadInput(f"{len(questions)} questions came with {len(passages)} lists of passages.")
        pairs = [
            [(question if self.reads_question else EMPTY_QUESTION, format_passage(passage)) for passage in found]
            for question, found in zip(questions, passages, strict=True)
        ]
        distinct = list(dict.fromkeys(pair for some in pairs for pair in some))
        scores = dict(zip(distinct, self._scores(distinct), strict=True))
        return [[scores[pair] for pair in some] for some in pairs]

    def _scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        if not pairs:
            return []
        import torch

        size = self._batch_size or (128 if torch.cuda.is_available() else 32)
        # predict sorts by length itself, so that short pairs are not padded to long ones
        scores = self._model.predict(pairs, batch_size=size, activation_fn=torch.nn.Identity(), show_progress_bar=False)
        if not np.isfinite(scores).all():
            raise ModelError(f"the reranker '{self.spec}' gave a score that is not a number (NaN or infinite).")
        return [float(score) for score in scores]

    @cached_property
    def _model(self) -> Any:
        try:
            from sentence_transformers import CrossEncoder
        except ModuleNotFoundError as error:
            raise MissingExtra("the cross-encoder", "local") from error
        local = Path(self.spec).is_dir()
        if local:
            check_reranker_files(self.spec)
        if is_aligned_reranker(self.spec):
            read_reranker_manifest(self.spec)  # refuses weights that were changed
        try:
            safe = {"use_safetensors": True}
            model = CrossEncoder(self.spec, device=self._device, local_files_only=local, model_kwargs=safe)
        except Exception as error:
            cause = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")[:300]
            raise WeightsError(
                f"the reranker '{self.spec}' cannot be loaded: {cause}. Give a folder or a hub name of a cross-encoder."
            ) from error
        if model.num_labels != 1:
            raise ModelError(f"the reranker '{self.spec}' gives {model.num_labels} scores a pair; one is needed.")
        return model


def format_passage(passage: Passage) -> str:
    """A passage as a cross-encoder reads it."""
    return f"{passage.title}\n{passage.text}" if passage.title else passage.text
