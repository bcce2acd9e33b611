"""Judges that are causal language models: a fine-tuned model answers with one of two labels, such as Yes or No.

Training and inference share `CausalJudge.encode`, so that a label is at the same token in both. transformers runs the
judge by default; an exported judge in a GGUF file is run by llama.cpp, with the same tokens, a quarter of the memory
and no torch. torch is imported on first use.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from knowgate.core.files import sha256_file, sha256_text
from knowgate.core.schema import NumberRange, UnitInterval, read_record
from knowgate.data.runs.folder import RECORDED_PREFIX
from knowgate.errors import ArtifactError, BadSetting, ModelError
from knowgate.models import load_model
from knowgate.models.llamacpp.classifier import LlamaCppClassifier
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.models.tokenization import LabelPromptTokens, TurnTemplate, encode_labels
from knowgate.stats.logistic import sigmoid
from knowgate.stats.metrics import FloatArray
from knowgate.types import ModelIdentity

if TYPE_CHECKING:
    from knowgate.models.hf.model import HFModel

ADAPTER_FOLDER, ADAPTER_WEIGHTS = "adapter", "adapter_model.safetensors"
ADAPTER_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".gguf")  # none can run code when loaded
# The name is not tokenizer.json, because transformers would load that together with the GGUF file and then miss the
# chat template.
GGUF_FILE, TOKENIZER_FILE = "judge.gguf", "judge-tokenizer.json"
STARTUP_CHECKS = 2  # reference prompts to run when a judge is loaded
MAX_DEVIATION = 0.1  # of a probability; q8_0 quantization changes it by thousandths, a broken build by tenths


@dataclass(frozen=True)
class ReferencePrompt:
    """A tokenized prompt and the P(known) that the judge predicted for it before it was exported."""

    ids: tuple[int, ...]
    known: UnitInterval


@dataclass(frozen=True, kw_only=True)
class GgufOptions:
    """Manifest entry of a judge in a GGUF file. `pair` holds the first tokens of its two labels."""

    kind: str
    turn: TurnTemplate
    pair: tuple[int, int]
    checks: tuple[ReferencePrompt, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Manifest entry of a judge.

    Attributes:
        base: Spec of the model it was fine-tuned from.
        base_fingerprint: Fingerprint of that model.
        wording: Fingerprint of its prompt templates.
        labels: The labels for known and unknown.
        adapter_sha256: Digest of the adapter or of the fine-tuned model.
        max_tokens: Maximum length of a prompt.
        full: Whether all weights were fine-tuned, not an adapter.
        more_sha256: Digests of further members of an ensemble.
        pairs: Whether it is an encoder of question-answer pairs, not a causal model.
        gguf: Set if llama.cpp runs it.
        bits: Quantization of the base model; 0 for none.
    """

    base: str
    base_fingerprint: str
    wording: str
    labels: tuple[str, str]
    adapter_sha256: str
    max_tokens: Annotated[int, NumberRange(1, 10_000_000)]
    full: bool = False
    more_sha256: tuple[str, ...] = ()
    pairs: bool = False
    gguf: GgufOptions | None = None
    bits: Literal[0, 4, 8] = 0


@dataclass(frozen=True)
class JudgeMember:
    """One member of a judge ensemble: a model of its own, or an adapter of a shared model."""

    model: HFModel
    adapter: str = ""

    @contextlib.contextmanager
    def activate(self) -> Iterator[HFModel]:
        """Lock the model and switch to this adapter."""
        with self.model.adapters.activate(self.adapter) if self.adapter else contextlib.nullcontext():
            yield self.model


@dataclass(frozen=True)
class CausalJudge:
    """A model that answers with one of two labels, (known, unknown). Predictions of all members are averaged."""

    model: HFModel
    labels: tuple[str, str]
    members: tuple[JudgeMember, ...] = ()

    @functools.cached_property
    def label_tokens(self) -> list[int]:
        """The first token of each label."""
        try:
            return encode_labels(self.model, self.labels)
        except BadSetting:
            raise BadSetting(
                f"{self.model.name} cannot be a judge: its tokenizer gives the labels {' and '.join(self.labels)} the "
                "same first token. Choose another base model: smollm, small."
            ) from None

    def encode(self, text: str, *parts: str) -> LabelPromptTokens:
        """Tokenize a user turn and the parts of an answer, after each of which a label is predicted.

        Args:
            text: The user turn. Without parts, the label is predicted right after it.
            parts: Pieces of the answer, tokenized separately. All but the first start with the label that precedes
                them.
        """
        ids = self._tokenize_turn(text)
        positions = [] if parts else [len(ids) - 1]
        for number, part in enumerate(parts):
            tokens = self.model.tokenize(part)
            if number and tokens[0] not in self.label_tokens:
                raise BadSetting(f"{self.model.name} tokenizes the label in '{part}' differently than on its own.")
            ids = ids + tokens
            positions.append(len(ids) - 1)
        self.model.check_length(len(ids), 1)
        has_prefix = ids[: len(self.shared_prefix)] == self.shared_prefix
        return LabelPromptTokens(ids, positions, len(self.shared_prefix) if has_prefix else 0)

    @functools.cached_property
    def shared_prefix(self) -> list[int]:
        """The tokens that every turn starts with, whose computation can be cached."""
        pairs = zip(self._tokenize_turn("Question"), self._tokenize_turn("1"), strict=False)
        return [first for first, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def _tokenize_turn(self, text: str) -> list[int]:
        """Tokenize a user turn with the chat template, if there is one."""
        has_template = bool(self.model.loaded.tokenizer.chat_template)
        return self.model.tokenize(self.model.render(text), special=not has_template)

    def encode_answer(self, question: str, answer: str | None, text: str) -> LabelPromptTokens:
        """Tokenize the prompt `text`; question and answer on their own are for encoders."""
        return self.encode(text)

    def predict_known(self, prompts: Sequence[LabelPromptTokens]) -> FloatArray:
        """Predict P(known) / (P(known) + P(unknown)) at the last label position, averaged over the members."""
        return np.asarray(np.mean(self.predict_members(prompts), axis=0))

    def predict_members(self, prompts: Sequence[LabelPromptTokens]) -> list[FloatArray]:
        """Return the predictions of each member."""
        return [self._predict(member, prompts) for member in self.members or (JudgeMember(self.model),)]

    def _predict(self, member: JudgeMember, prompts: Sequence[LabelPromptTokens]) -> FloatArray:
        """Predict P(known) with one member."""
        from knowgate.models.hf.local_model import read_label_logits

        with member.activate() as model:
            logits = model.run_batched(
                [prompt.ids for prompt in prompts],
                lambda rows: read_label_logits(model, [prompts[row] for row in rows], self.label_tokens),
            )
        margins = np.array([float(rows[-1][0]) - float(rows[-1][1]) for rows in logits], dtype=np.float64)
        return sigmoid(margins)

    def truncate(self, text: str, n_tokens: int) -> str:
        """Return the first tokens of a text."""
        ids = self.model.tokenize(text.strip())[:n_tokens]
        return str(self.model.loaded.tokenizer.decode(ids, skip_special_tokens=True)).strip()


def load_judge_base(spec: str, fingerprint: str = "", adapter: Path | None = None, *, bits: int = 0) -> HFModel:
    """Load the model that a judge is fine-tuned from.

    Args:
        spec: Spec of the model.
        fingerprint: Expected fingerprint, if an adapter was made for it.
        adapter: Folder of that adapter.
        bits: Quantization; 0 for none.

    Raises:
        BadSetting: The spec names no local weights.
        ArtifactError: The adapter was made for other weights.
    """
    from knowgate.models.hf.model import HFModel

    model = None if spec.startswith(RECORDED_PREFIX) else load_model(spec)
    if not isinstance(model, HFModel):
        raise BadSetting(
            f"a judge is fine-tuned from local weights, and '{spec}' has none. Set `base` to smollm, hf:NAME_OR_DIR or "
            "gguf:FILE; judges of answers also accept small, which needs no GPU."
        )
    if adapter is not None and model.fingerprint != fingerprint:
        raise ArtifactError(
            f"the judge in '{adapter.parent}' was fine-tuned from {spec} ({fingerprint}); {spec} is now "
            f"{model.fingerprint}. Use the old base model, or fit the judge again."
        )
    return replace(model, bits=bits) if bits else model


def load_judge(folder: Path, options: Mapping[str, Any], prompts: str, llm: ModelIdentity | None = None) -> CausalJudge:
    """Load the judge of an artifact. Gates that are loaded from the same files share it.

    Args:
        folder: Folder of the adapter or the fine-tuned model.
        options: Options of the artifact; see `JudgeOptions`.
        prompts: Name of the prompt templates.
        llm: The LLM that is judged. If the adapter was made for its weights, they are shared.

    Raises:
        ArtifactError: The files were changed, or the prompt templates are others.
    """
    if options["wording"] != load_packaged_templates(prompts).fingerprint:
        raise ArtifactError(f"the judge in '{folder.parent}' was fitted with other prompt templates. Fit it again.")
    known, unknown = options["labels"]
    folders, digests = check_adapters(folder, options)
    if (host := _find_host(folder, options, llm)) is not None:
        return CausalJudge(host, (known, unknown), attach_adapters(host, folders, digests))
    bits = options.get("bits", 0)
    return _load_cached(folders, digests, options["base"], options["base_fingerprint"], (known, unknown), bits)


def _find_host(folder: Path, options: Mapping[str, Any], llm: ModelIdentity | None) -> HFModel | None:
    """Return the LLM itself if it runs locally and the adapter was made for its weights."""
    from knowgate.models.hf.model import HFModel

    if not isinstance(llm, HFModel) or llm.fingerprint != options["base_fingerprint"]:
        return None
    return llm if is_adapter_folder(folder) and llm.bits == options.get("bits", 0) else None


@functools.lru_cache(maxsize=2)
def _load_cached(
    folders: tuple[Path, ...], digests: tuple[str, ...], base: str, fingerprint: str, labels: tuple[str, str], bits: int
) -> CausalJudge:
    """Load a judge with weights of its own."""
    if not is_adapter_folder(folders[0]):
        members = tuple(JudgeMember(load_full_judge(folder)) for folder in folders)
        return CausalJudge(members[0].model, labels, members)
    model = load_judge_base(base, fingerprint, folders[0], bits=bits)
    return CausalJudge(model, labels, attach_adapters(model, folders, digests))


def check_adapters(folder: Path, options: Mapping[str, Any]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the folders of all members of a judge and their digests, after checking the files."""
    digests = (options["adapter_sha256"], *options.get("more_sha256", ()))
    folders = list_adapter_folders(folder, len(digests))
    for member_folder, digest in zip(folders, digests, strict=True):
        if compute_adapter_digest(member_folder) != digest:
            raise ArtifactError(f"the adapter in '{member_folder}' was changed or damaged. Fit the gate again.")
    return tuple(folders), digests


def list_adapter_folders(first: Path, n: int) -> list[Path]:
    """Name the folders of n ensemble members: `adapter`, `adapter-1`, ..."""
    return [first, *(first.with_name(f"{first.name}-{number}") for number in range(1, n))]


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a folder holds an adapter, not a complete model."""
    return (folder / ADAPTER_WEIGHTS).is_file()


def load_full_judge(folder: Path) -> HFModel:
    """Load a judge whose weights were all fine-tuned."""
    from knowgate.models.hf.model import HFModel

    return HFModel(str(folder), label=f"judge:{folder.parent.name}")


def attach_adapters(model: HFModel, folders: Sequence[Path], digests: Sequence[str]) -> tuple[JudgeMember, ...]:
    """Add adapters to a model in place. They are named by digest, so that none is added twice."""
    names = [f"judge-{digest[:16]}" for digest in digests]
    for name, folder in zip(names, folders, strict=True):
        model.adapters.add(name, folder)
    return tuple(JudgeMember(model.share_weights(), name) for name in names)


def compute_adapter_digest(folder: Path) -> str:
    """Compute the digest of an adapter's files; raise ArtifactError if it holds files of other types."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    unexpected = [path.name for path in files if path.suffix not in ADAPTER_SUFFIXES]
    if unexpected or not files:
        problem = f"it holds {', '.join(unexpected)}" if unexpected else "it is empty or missing"
        raise ArtifactError(
            f"'{folder}' is not an adapter of knowgate ({problem}); only safetensors and JSON are read."
        )
    return sha256_text(*(part for path in files for part in (path.relative_to(folder).as_posix(), sha256_file(path))))


# --- judges run by llama.cpp ----------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaJudge:
    """A judge that llama.cpp runs, one GGUF file per member. Predictions of all members are averaged."""

    members: tuple[LlamaCppClassifier, ...]
    options: GgufOptions

    def encode_answer(self, question: str, answer: str | None, text: str) -> LabelPromptTokens:
        """Tokenize the prompt `text`; question and answer on their own are for encoders."""
        turn = self.options.turn
        ids = self.members[0].tokenize(turn.render(text), special=not turn.chat)
        return LabelPromptTokens(ids, [len(ids) - 1])

    def truncate(self, text: str, n_tokens: int) -> str:
        """Return the first tokens of a text."""
        return self.members[0].decode(self.members[0].tokenize(text.strip())[:n_tokens]).strip()

    def predict_members(self, prompts: Sequence[LabelPromptTokens]) -> list[FloatArray]:
        """Return P(known) as predicted by each member."""
        pair = self.options.pair
        return [np.array([member.score_token_pair(item.ids, pair) for item in prompts]) for member in self.members]

    def predict_known(self, prompts: Sequence[LabelPromptTokens]) -> FloatArray:
        """Return P(known), averaged over the members."""
        return np.asarray(np.mean(self.predict_members(prompts), axis=0))

    def measure_deviation(self, n_prompts: int | None = None) -> float:
        """Return the largest deviation from the predictions before the export, over all or `n_prompts` prompts."""
        checks = self.options.checks[:n_prompts]
        prompts = [LabelPromptTokens(list(check.ids), [len(check.ids) - 1]) for check in checks]
        expected = np.array([check.known for check in checks])
        return float(np.abs(self.predict_known(prompts) - expected).max()) if prompts else 0.0


def load_llama_judge(folders: tuple[Path, ...], digests: tuple[str, ...], options: Mapping[str, Any]) -> LlamaJudge:
    """Load a judge from GGUF files and check its predictions on reference prompts.

    Args:
        folders: Folder of each member.
        digests: Digests of the folders; the judge is cached until they change.
        options: The `gguf` entry of the manifest.
    """
    return _load_llama_cached(folders, digests, read_record(GgufOptions, options, "options.gguf", ignore_unknown=True))


@functools.lru_cache(maxsize=2)
def _load_llama_cached(folders: tuple[Path, ...], digests: tuple[str, ...], options: GgufOptions) -> LlamaJudge:
    """Load GGUF files and check their predictions."""
    members = tuple(LlamaCppClassifier(folder / GGUF_FILE, folder / TOKENIZER_FILE) for folder in folders)
    judge = LlamaJudge(members, options)
    if (deviation := judge.measure_deviation(STARTUP_CHECKS)) > MAX_DEVIATION:
        raise ModelError(
            f"the judge in '{folders[0].parent}' predicts something else with this llama.cpp than at its export: "
            f"a probability differs by {deviation:.2f}. Use another release of xllamacpp, or the original gate."
        )
    return judge
