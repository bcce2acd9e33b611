"""Judges that are causal language models: they answer a prompt with one of two labels, such as Yes or No.

The first label means "known" (the LLM's answer is right), the second "unknown". By default, transformers runs the judge.
A judge that was exported to a GGUF file is run by llama.cpp, with a quarter of the memory and without torch.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from knowgate.core.files import sha256_file, sha256_text
from knowgate.core.schema import NumberRange, UnitInterval
from knowgate.data.runs.folder import RECORDED_PREFIX
from knowgate.errors import ArtifactError, BadSetting, ModelError
from knowgate.models import load_model
from knowgate.models.llamacpp.classifier import LlamaCppClassifier
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.models.tokenization import LabelPromptTokens, TurnTemplate, encode_labels
from knowgate.stats.metrics import FloatArray, sigmoid
from knowgate.types import ModelIdentity, Question

if TYPE_CHECKING:
    from knowgate.models.hf.model import HFModel

ADAPTER_FOLDER, ADAPTER_WEIGHTS = "adapter", "adapter_model.safetensors"
ADAPTER_SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model", ".gguf")  # none can run code when loaded
# Not tokenizer.json: transformers would load that with the GGUF file and then miss the chat template.
GGUF_FILE, TOKENIZER_FILE = "judge.gguf", "judge-tokenizer.json"
STARTUP_CHECKS = 2  # number of reference prompts that are run when a judge is loaded
# Largest change of a probability by the export: thousandths by q8_0 quantization, tenths by a broken llama.cpp.
MAX_DEVIATION = 0.1
MAX_QUESTION_TOKENS = 512  # of a question; so a decision takes bounded time


@dataclass(frozen=True)
class ReferencePrompt:
    """A prompt with the judge's prediction before its export. The exported judge must predict the same.

    Attributes:
        ids: Tokens of the prompt.
        known: The predicted probability that the LLM knows the answer.
    """

    ids: tuple[int, ...]
    known: UnitInterval


@dataclass(frozen=True, kw_only=True)
class GgufOptions:
    """Options of a judge in a GGUF file, stored as `gguf` in the manifest.

    Attributes:
        kind: Quantization of the file.
        turn: Chat template of one turn, that is, of a user message.
        pair: Ids of the first tokens of the words that the judge answers with, such as Yes (known) and No (unknown).
        checks: Reference prompts that show whether llama.cpp predicts the same as the original judge.
    """

    kind: str
    turn: TurnTemplate
    pair: tuple[int, int]
    checks: tuple[ReferencePrompt, ...] = ()


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """Options of a judge in the manifest of a gate or arbiter.

    Attributes:
        base: Spec of the model that the judge was fine-tuned from.
        base_fingerprint: Fingerprint of that model.
        wording: Fingerprint of the wording of its prompts.
        labels: The labels for known and unknown, such as Yes and No.
        adapter_sha256: Digest of the adapter folder, or of the folder of the fine-tuned model.
        max_tokens: Maximum length of a prompt.
        full: Whether all weights were fine-tuned; False for a LoRA adapter.
        more_sha256: Digests of further members of an ensemble.
        pairs: Whether it is an encoder of question-answer pairs, not a causal model.
        gguf: Options for llama.cpp; None if transformers runs the judge.
        bits: Bits per weight of the quantized base model; 0 for no quantization.
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
    """One member of a judge ensemble. With `adapter`, several members share one model."""

    model: HFModel  # the language model
    adapter: str = ""  # name of the fine-tuned weights; empty if they are in the model

    def activate(self) -> contextlib.AbstractContextManager[None]:
        """Switch this member's adapter on for a `with` block. Meanwhile, a shared model is locked."""
        return self.model.adapters.activate(self.adapter) if self.adapter else contextlib.nullcontext()


def shorten_question(question: Question, tokenize: Callable[[str], Sequence[int]]) -> Question:
    """Return the question, cut after `MAX_QUESTION_TOKENS` tokens.

    Args:
        question: The question. Its choices are not cut.
        tokenize: Returns the tokens of a text.
    """
    text = question.text
    while (n_tokens := len(tokenize(text))) > MAX_QUESTION_TOKENS:
        text = text[: len(text) * MAX_QUESTION_TOKENS // n_tokens]
    return question if text == question.text else replace(question, text=text)


@dataclass(frozen=True)
class CausalJudge:
    """A language model that answers prompts as a judge, with one of two labels such as Yes and No.

    Attributes:
        model: The model, whose tokenizer is used.
        labels: The label for known (the LLM's answer is right) and the label for unknown.
        members: The models of an ensemble, whose predictions are averaged. If empty, `model` predicts alone.
    """

    model: HFModel
    labels: tuple[str, str]
    members: tuple[JudgeMember, ...] = ()

    @functools.cached_property
    def label_tokens(self) -> list[int]:
        """The first token of each label.

        Raises:
            BadSetting: Both labels start with the same token, so that they cannot be told apart.
        """
        try:
            return encode_labels(self.model.tokenize, self.labels)
        except BadSetting:
            raise BadSetting(
                f"{self.model.name} cannot be a judge. Its tokenizer starts the labels {' and '.join(self.labels)} with the "
                "same token. Choose a different base model, for example smollm or small."
            ) from None

    def encode(self, text: str, *parts: str) -> LabelPromptTokens:
        """Tokenize a prompt for the judge, with the positions of the labels (answer words) to predict.

        Usually the judge answers with one label, and there are no `parts`. Some judges answer with several labels:
        {"mastery": "True", "certainty": "False"}. Then `parts` are '{"mastery": "' and 'True", "certainty": "'.

        Args:
            text: The user message.
            parts: The answer of the judge, cut before each label. So every part except the first starts with a label.

        Raises:
            BadSetting: The tokenizer merges a label with the text that follows it.
        """
        ids = self._tokenize_turn(text)
        positions = [] if parts else [len(ids) - 1]
        for number, part in enumerate(parts):
            tokens = self.model.tokenize(part)
            if number > 0:  # the first part starts with no label
                self._check_starts_with_label(part, tokens)
            ids = ids + tokens
            positions.append(len(ids) - 1)  # the last token of the part predicts the label after it
        self.model.check_length(len(ids), 1)
        has_prefix = ids[: len(self.shared_prefix)] == self.shared_prefix
        return LabelPromptTokens(ids, positions, len(self.shared_prefix) if has_prefix else 0)

    def _check_starts_with_label(self, part: str, tokens: Sequence[int]) -> None:
        """Raise BadSetting if the first token of a part is not a label."""
        if tokens[0] not in self.label_tokens:
            raise BadSetting(
                f"{self.model.name} cannot be a judge. Its tokenizer does not split '{part}' after the label at its start "
                f"({' or '.join(self.labels)}). Choose a different base model."
            )

    @functools.cached_property
    def shared_prefix(self) -> list[int]:
        """The tokens at the start of every prompt. Found by comparing two prompts."""
        pairs = zip(self._tokenize_turn("Question"), self._tokenize_turn("1"), strict=False)
        return [first for first, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def _tokenize_turn(self, text: str) -> list[int]:
        """Tokenize a user message, with the model's chat template if there is one."""
        has_template = bool(self.model.loaded.tokenizer.chat_template)
        return self.model.tokenize(self.model.render(text), special=not has_template)

    def encode_answer(self, question: str, answer: str | None, text: str) -> LabelPromptTokens:
        """Tokenize the prompt `text`. `question` and `answer` are ignored; only encoders read them."""
        return self.encode(text)

    def shorten(self, question: Question) -> Question:
        """Return the question, cut after `MAX_QUESTION_TOKENS` tokens."""
        return shorten_question(question, self.model.tokenize)

    def predict_known(self, prompts: Sequence[LabelPromptTokens]) -> FloatArray:
        """Predict for each prompt how probably the LLM knows the answer. Predictions are averaged over the ensemble."""
        predictions = [self.predict_member(number, prompts) for number in range(max(1, len(self.members)))]
        return np.asarray(np.mean(predictions, axis=0))

    def predict_member(self, number: int, prompts: Sequence[LabelPromptTokens]) -> FloatArray:
        """Predict with one ensemble member how probably the LLM knows each answer."""
        from knowgate.models.hf.local_model import read_label_logits

        member = self.members[number] if self.members else JudgeMember(self.model)
        with member.activate():
            logits = member.model.run_batched(
                [prompt.ids for prompt in prompts],
                lambda rows: read_label_logits(member.model, [prompts[row] for row in rows], self.label_tokens),
            )
        last_logits = np.array([label_logits[-1] for label_logits in logits], dtype=np.float64)  # of the last label
        known, unknown = last_logits.reshape(-1, 2).T
        return sigmoid(known - unknown)

    def truncate(self, text: str, n_tokens: int) -> str:
        """Return the start of a text, cut after `n_tokens` tokens."""
        ids = self.model.tokenize(text.strip())[:n_tokens]
        return str(self.model.loaded.tokenizer.decode(ids, skip_special_tokens=True)).strip()


def load_judge_base(spec: str, fingerprint: str = "", adapter: Path | None = None, *, bits: int = 0) -> HFModel:
    """Load the model that a judge is fine-tuned from.

    Args:
        spec: Spec of the model.
        fingerprint: Expected fingerprint; checked only if `adapter` is given.
        adapter: Folder of the adapter that the model is loaded for.
        bits: Bits per weight to quantize the model to; 0 for no quantization.

    Raises:
        BadSetting: The model has no local weights.
        ArtifactError: The adapter was trained on different weights.
    """
    from knowgate.models.hf.model import HFModel

    model = None if spec.startswith(RECORDED_PREFIX) else load_model(spec)
    if not isinstance(model, HFModel):
        raise BadSetting(
            f"the base model '{spec}' has no local weights to fine-tune. Set `base` to smollm, hf:NAME_OR_DIR or gguf:FILE. "
            "Gates 'judge' and 'gain' also accept 'small', which needs no GPU."
        )
    if adapter is not None and model.fingerprint != fingerprint:
        raise ArtifactError(
            f"the weights of {spec} have changed since the judge in '{adapter.parent}' was fine-tuned. Their fingerprint was "
            f"{fingerprint} and is now {model.fingerprint}. Use the original weights, or fit the judge again."
        )
    return replace(model, bits=bits) if bits else model


def load_judge(folder: Path, options: Mapping[str, Any], prompts: str, llm: ModelIdentity | None = None) -> CausalJudge:
    """Load the judge model of a fitted gate or arbiter.

    Args:
        folder: Folder of the adapter or the fine-tuned model.
        options: Options of the gate or arbiter; see `JudgeOptions`.
        prompts: Name of the prompt templates.
        llm: The LLM that is judged. If it runs locally and the adapter was trained on its weights, they are shared.

    Raises:
        ArtifactError: The files were changed, or the prompt templates are not those that the judge was fitted with.
    """
    if options["wording"] != load_packaged_templates(prompts).fingerprint:
        raise ArtifactError(f"the judge in '{folder.parent}' was fitted with other prompt templates. Fit it again.")
    known, unknown = options["labels"]
    folders, digests = check_adapters(folder, options)  # of each member of the ensemble
    if (shared_model := _find_shared_model(folder, options, llm)) is not None:
        return CausalJudge(shared_model, (known, unknown), attach_adapters(shared_model, folders, digests))
    bits = options.get("bits", 0)
    return _load_unshared(folders, digests, options["base"], options["base_fingerprint"], (known, unknown), bits)


def _find_shared_model(folder: Path, options: Mapping[str, Any], llm: ModelIdentity | None) -> HFModel | None:
    """Return the LLM if the judge can share its weights, else None.

    The judge must be an adapter of the same weights.
    """
    from knowgate.models.hf.model import HFModel

    if not isinstance(llm, HFModel) or not is_adapter_folder(folder):
        return None
    has_same_weights = llm.fingerprint == options["base_fingerprint"] and llm.bits == options.get("bits", 0)
    return llm if has_same_weights else None


@functools.lru_cache(maxsize=2)
def _load_unshared(
    folders: tuple[Path, ...], digests: tuple[str, ...], base: str, fingerprint: str, labels: tuple[str, str], bits: int
) -> CausalJudge:
    """Load a judge that does not share the weights of the LLM. Judges that were loaded before are reused.

    Args:
        folders: Folder of each ensemble member. All hold adapters for the base model, or all hold complete models.
        digests: Checksum of each folder. It is only part of the cache key: changed folders are loaded again.
        base: Name of the base model.
        fingerprint: Expected fingerprint of the base model.
        labels: The words that the judge answers with, for known and for unknown.
        bits: Quantization of the base model; 0 for none.
    """
    if is_adapter_folder(folders[0]):
        model = load_judge_base(base, fingerprint, folders[0], bits=bits)
        return CausalJudge(model, labels, members=attach_adapters(model, folders, digests))
    members = tuple(JudgeMember(load_full_judge(folder)) for folder in folders)
    return CausalJudge(members[0].model, labels, members)  # all members have the same tokenizer, so any model will do


def check_adapters(folder: Path, options: Mapping[str, Any]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Check the files of a judge. Return the folder and digest of each ensemble member.

    Args:
        folder: Folder of the first member.
        options: Options of the gate or arbiter, with the expected digests.

    Raises:
        ArtifactError: The files in a folder do not match the digest in the manifest.
    """
    digests = (options["adapter_sha256"], *options.get("more_sha256", ()))
    folders = list_adapter_folders(folder, len(digests))
    for member_folder, digest in zip(folders, digests, strict=True):
        if compute_adapter_digest(member_folder) != digest:
            raise ArtifactError(
                f"the judge in '{member_folder}' was changed or damaged: its files do not match the manifest. Fit the "
                "gate again."
            )
    return tuple(folders), digests


def list_adapter_folders(first: Path, n: int) -> list[Path]:
    """Return the folders of n ensemble members, given the first: `adapter`, `adapter-1`, `adapter-2`, ..."""
    return [first, *(first.with_name(f"{first.name}-{number}") for number in range(1, n))]


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a folder holds an adapter, not a complete model."""
    return (folder / ADAPTER_WEIGHTS).is_file()


def load_full_judge(folder: Path) -> HFModel:
    """Load a judge whose weights were all fine-tuned."""
    from knowgate.models.hf.model import HFModel

    return HFModel(str(folder), label=f"judge:{folder.parent.name}")


def attach_adapters(model: HFModel, folders: Sequence[Path], digests: Sequence[str]) -> tuple[JudgeMember, ...]:
    """Add adapters to a model in place. Return one ensemble member per adapter."""
    names = [f"judge-{digest[:16]}" for digest in digests]
    for name, folder in zip(names, folders, strict=True):
        model.adapters.add(name, folder)
    return tuple(JudgeMember(model.share_weights(), name) for name in names)


def compute_adapter_digest(folder: Path) -> str:
    """Compute the digest of all files of an adapter.

    Raises:
        ArtifactError: The folder is empty or contains a file of a type that adapters do not have.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files or any(path.suffix not in ADAPTER_SUFFIXES for path in files):
        raise ArtifactError(
            f"the folder '{folder}' is not an adapter (fine-tuned weights) made by knowgate. It must contain only "
            f"{', '.join(ADAPTER_SUFFIXES)} files, and at least one. Fit the gate again."
        )
    names_and_digests = [(path.relative_to(folder).as_posix(), sha256_file(path)) for path in files]
    return sha256_text(*itertools.chain.from_iterable(names_and_digests))


# --- judges run by llama.cpp ----------------------------------------------------------------------


@dataclass(frozen=True)
class LlamaJudge:
    """An ensemble of judges run by llama.cpp, whose predictions are averaged."""

    members: tuple[LlamaCppClassifier, ...]  # one per GGUF file
    options: GgufOptions  # the `gguf` entry of the manifest

    def encode_answer(self, question: str, answer: str | None, text: str) -> LabelPromptTokens:
        """Tokenize the prompt `text`. Only encoder judges read `question` and `answer`."""
        turn = self.options.turn
        # A chat template already contains the special tokens.
        ids = self.members[0].tokenize(turn.render(text), special=not turn.chat)
        return LabelPromptTokens(ids, [len(ids) - 1])  # the label is predicted after the last token

    def truncate(self, text: str, n_tokens: int) -> str:
        """Return the start of a text, cut after `n_tokens` tokens."""
        return self.members[0].decode(self.members[0].tokenize(text.strip())[:n_tokens]).strip()

    def shorten(self, question: Question) -> Question:
        """Return the question, cut after `MAX_QUESTION_TOKENS` tokens."""
        return shorten_question(question, self.members[0].tokenize)

    def predict_known(self, prompts: Sequence[LabelPromptTokens]) -> FloatArray:
        """Return the probability that the LLM knows the answer, averaged over the members."""
        pair = self.options.pair
        votes = [[member.score_token_pair(prompt.ids, pair) for prompt in prompts] for member in self.members]
        return np.asarray(np.mean(votes, axis=0))

    def measure_deviation(self, n_prompts: int | None = None) -> float:
        """Return how far the predictions of this exported judge are from those of the original judge.

        The result is the largest difference of a probability on the reference prompts; 0 without reference prompts.

        Args:
            n_prompts: Number of reference prompts to run. Default: all.
        """
        checks = self.options.checks[:n_prompts]
        prompts = [LabelPromptTokens(list(check.ids), [len(check.ids) - 1]) for check in checks]
        expected = np.array([check.known for check in checks])
        return float(np.abs(self.predict_known(prompts) - expected).max(initial=0.0))


@functools.lru_cache(maxsize=2)
def load_llama_judge(folders: tuple[Path, ...], digests: tuple[str, ...], options: GgufOptions) -> LlamaJudge:
    """Load a judge from GGUF files, and check its predictions on reference prompts.

    Args:
        folders: Folder of each member.
        digests: Digests of the folders. They are only part of the cache key: changed folders are loaded again.
        options: The `gguf` entry of the manifest.

    Raises:
        ModelError: The predictions differ from those of the original judge, which was exported to GGUF.
    """
    members = tuple(LlamaCppClassifier(folder / GGUF_FILE, folder / TOKENIZER_FILE) for folder in folders)
    judge = LlamaJudge(members, options)
    deviation = judge.measure_deviation(STARTUP_CHECKS)
    if deviation > MAX_DEVIATION:
        raise ModelError(
            f"the exported judge in '{folders[0].parent}' deviates from the original. One probability differs by "
            f"{deviation:.2f}, but at most {MAX_DEVIATION} is allowed. Install another release of xllamacpp, or use the "
            "original gate."
        )
    return judge
