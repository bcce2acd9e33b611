"""Cross-encoder reranker: a model that reads a question and a passage together and scores them (extra `local`).

An aligned reranker is a cross-encoder that `knowgate fit reranker` trained further on the answers of an LLM. It is a
folder with the files of a cross-encoder, a manifest (`reranker.json`) and a model card (`README.md`). It never contains
pickle files, which could run code.

Reference: Nogueira and Cho 2019, Passage re-ranking with BERT.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from knowgate.core.artifacts import check_artifact_folder, check_digests
from knowgate.core.files import sha256_file, sha256_text
from knowgate.core.schema import read_record
from knowgate.core.validation import expand_path, read_json
from knowgate.errors import ArtifactError, BadInput, BadSetting, ModelError, WeightsError, get_cause, require_extra
from knowgate.retrieval.passages import check_passage_lists, format_passage
from knowgate.types import Passage

RERANKER_VERSION = 1
RERANKER_SUFFIXES = (".json", ".safetensors", ".txt", ".model", ".md", ".jinja")
RERANKER_MANIFEST, RERANKER_WEIGHTS, RERANKER_CARD = "reranker.json", "model.safetensors", "README.md"
RERANKER_BASE = "base"  # subfolder with the model before alignment, if that model was trained as well
FINGERPRINT_KEY = "model_fingerprint"
EMPTY_QUESTION = ""  # replaces the question for rerankers with `reads_question` False


@dataclass(frozen=True)
class RerankerManifest:
    """The contents of `reranker.json`, the description of an aligned reranker.

    An aligned reranker prefers passages that help one LLM.

    Args:
        version: The version of the file format.
        weights_sha256: The hash of the weights.
        base: The cross-encoder that was trained further.
        aligned_to: The LLM whose answers were used for the training.
        files: The digest of every file except the model card. Early versions of knowgate wrote none.
        reads_question: False for a control model, which ranks passages without seeing the question.
    """

    version: int
    weights_sha256: str
    base: str = ""
    aligned_to: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    reads_question: bool = True


def is_aligned_reranker(path: str | Path) -> bool:
    """Return whether a folder contains a reranker that `knowgate fit reranker` trained."""
    return (expand_path(path) / RERANKER_MANIFEST).is_file()


def check_reranker_files(path: str | Path) -> None:
    """Check that a reranker folder has safetensors weights and no unexpected files.

    Raises:
        WeightsError: There are no weights in the safetensors format.
        ArtifactError: The folder of an aligned reranker contains a file that knowgate does not write.
    """
    folder = expand_path(path)
    if not any(folder.glob("*.safetensors")):
        raise WeightsError(
            f"the reranker '{path}' has no safetensors weights. Weights in pickle files are not loaded, because they could run "
            "code. Save the model as safetensors."
        )
    unexpected = [item for item in folder.rglob("*") if item.is_file() and item.suffix not in RERANKER_SUFFIXES]
    if is_aligned_reranker(folder) and unexpected:
        name = min(str(item.relative_to(folder)) for item in unexpected)
        raise ArtifactError(f"the reranker '{path}' contains the unexpected file '{name}'. Fit the reranker again.")


def read_reranker_manifest(path: str | Path) -> Mapping[str, Any]:
    """Read the manifest of an aligned reranker, and check the files of the folder.

    Raises:
        ArtifactError: This is not an aligned reranker, or a file is missing, changed or damaged.
    """
    folder = expand_path(path)
    if not is_aligned_reranker(folder):
        raise ArtifactError(
            f"'{path}' is not a reranker of knowgate: it has no {RERANKER_MANIFEST}. Train one with `knowgate fit "
            "reranker`."
        )
    try:
        manifest: Mapping[str, Any] = read_json(folder / RERANKER_MANIFEST)
        record = read_record(RerankerManifest, manifest, RERANKER_MANIFEST, ignore_unknown=True)
    except BadInput as error:
        raise ArtifactError(f"{folder / RERANKER_MANIFEST} is damaged ({error}). Fit the reranker again.") from None
    _check_manifest(path, record)
    return manifest


def _check_manifest(path: str | Path, manifest: RerankerManifest) -> None:
    """Raise ArtifactError unless the manifest fits the files of the reranker."""
    folder = expand_path(path)

    def make_error(problem: str) -> ArtifactError:
        return ArtifactError(f"the reranker '{path}' cannot be used: {problem}. Fit it again.")

    if manifest.version != RERANKER_VERSION:
        raise make_error(
            f"{RERANKER_MANIFEST} has format version {manifest.version}, but this knowgate reads version {RERANKER_VERSION}"
        )
    check_artifact_folder(folder, make_error)
    weights = folder / RERANKER_WEIGHTS
    if not weights.is_file() or sha256_file(weights) != manifest.weights_sha256:
        raise make_error(f"the weights in {RERANKER_WEIGHTS} were changed or damaged")
    check_digests(folder, manifest.files, make_error)


def fingerprint_weights(path: str | Path) -> str:
    """Return a hash of the weights of a cross-encoder in a folder.

    The path of the folder does not matter.
    """
    files = sorted(expand_path(path).glob("*.safetensors"))
    if not files:
        raise WeightsError(f"'{path}' contains no safetensors weights. Save the model as safetensors.")
    return sha256_text(*map(sha256_file, files))[:16]


def describe_llm_mismatch(path: str | Path, model: str, fingerprint: str) -> str | None:
    """Return a warning if a reranker was aligned to another LLM, else None.

    Args:
        path: The reranker. Rerankers that knowgate did not train cause no warning.
        model: The name of the LLM in use, for the warning.
        fingerprint: The fingerprint of the LLM in use.
    """
    if not is_aligned_reranker(path):
        return None
    aligned_to = read_reranker_manifest(path).get("aligned_to", {})
    if aligned_to.get(FINGERPRINT_KEY) == fingerprint:
        return None
    return f"The reranker '{path}' was aligned to {aligned_to.get('model', 'another LLM')}, not to {model}."


@contextmanager
def _translate_loading_errors(spec: str) -> Iterator[None]:
    """Turn any error inside the block into a WeightsError."""
    try:
        yield
    except Exception as error:
        cause = get_cause(error)[:300]
        raise WeightsError(
            f"the reranker '{spec}' cannot be loaded: {cause}. Use a folder or a hub name of a cross-encoder."
        ) from error


class CrossEncoderReranker:
    """A local cross-encoder of sentence-transformers, loaded on first use.

    Scores are logits. Higher is better.

    Args:
        spec: A hub name, a folder of sentence-transformers, or the folder of an aligned reranker.
        batch_size: The number of question-passage pairs per forward pass. Default: 128 on a GPU, 32 on a CPU.
    """

    def __init__(self, spec: str, *, batch_size: int | None = None):
        if not spec:
            raise BadSetting("a cross-encoder needs a model. Write cross-encoder:NAME_OR_DIR.")
        self.spec = spec
        self._batch_size = batch_size

    @classmethod
    def from_model(cls, model: Any, spec: str, *, reads_question: bool = True) -> CrossEncoderReranker:
        """Make a reranker from a `CrossEncoder` that is already loaded.

        Args:
            model: The `CrossEncoder`.
            spec: The name or the folder of the model.
            reads_question: False for a control model, which ranks passages without seeing the question.
        """
        reranker = cls(spec)
        # Both are cached properties. With their values stored, nothing is loaded from files.
        reranker.__dict__ |= {"_model": model, "reads_question": reads_question}
        return reranker

    @cached_property
    def reads_question(self) -> bool:
        """Whether the model sees the question.

        False for a control model, trained on passages alone.
        """
        if not is_aligned_reranker(self.spec):
            return True
        check_reranker_files(self.spec)
        return bool(read_reranker_manifest(self.spec).get("reads_question", True))

    @property
    def name(self) -> str:
        return f"cross-encoder:{self.spec}"

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the weights in a folder, or of a hub name and its commit."""
        if Path(self.spec).is_dir():
            return fingerprint_weights(self.spec)
        return sha256_text("hub", self.spec, str(getattr(self._model.config, "_commit_hash", None)))[:16]

    def score(self, questions: Sequence[str], passages: Sequence[Sequence[Passage]]) -> list[list[float]]:
        """Return one score for each passage of each question.

        Equal pairs are scored once, so that they get equal scores.

        Args:
            questions: The questions.
            passages: A list of passages for each question.
        """
        check_passage_lists(questions, passages)
        pairs: list[list[tuple[str, str]]] = []  # question and passage text, for each passage of each question
        for question, retrieved in zip(questions, passages, strict=True):
            seen_question = question if self.reads_question else EMPTY_QUESTION
            pairs.append([(seen_question, format_passage(passage)) for passage in retrieved])
        distinct = list(dict.fromkeys(itertools.chain.from_iterable(pairs)))
        scores = dict(zip(distinct, self._score_pairs(distinct), strict=True))
        return [[scores[pair] for pair in question_pairs] for question_pairs in pairs]

    def _score_pairs(self, pairs: list[tuple[str, str]]) -> list[float]:
        """Return the score of each pair of a question and a passage text."""
        if not pairs:
            return []
        import torch

        size = self._batch_size or (128 if torch.cuda.is_available() else 32)
        # `predict` sorts the pairs by length, so that short pairs are not padded to long ones.
        scores = self._model.predict(pairs, batch_size=size, activation_fn=torch.nn.Identity(), show_progress_bar=False)
        if not np.isfinite(scores).all():
            raise ModelError(
                f"the reranker '{self.spec}' returned a score that is not a number (NaN or infinite). Use another reranker."
            )
        return [float(score) for score in scores]

    @cached_property
    def _model(self) -> Any:
        """The loaded `CrossEncoder`, whose files are checked first."""
        with require_extra("the cross-encoder", "local"):
            from sentence_transformers import CrossEncoder
        is_local = Path(self.spec).is_dir()
        if is_local:
            check_reranker_files(self.spec)
        if is_aligned_reranker(self.spec):
            read_reranker_manifest(self.spec)  # called because it checks the files
        with _translate_loading_errors(self.spec):
            model = CrossEncoder(self.spec, local_files_only=is_local, model_kwargs={"use_safetensors": True})
        if model.num_labels != 1:
            raise ModelError(
                f"the reranker '{self.spec}' returns {model.num_labels} scores per passage, not one. Use another model."
            )
        return model
