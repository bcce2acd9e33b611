"""A fine-tuned causal model that says one of two words: how IK and KBM are asked, and how they come off the disk.

Fitting and deciding share `Judge.encode`, so that a label stands at the same token in both. torch loads on first use.
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
from knowgate.gates.artifacts.networks import Floats
from knowgate.models import load_model
from knowgate.models.llamacpp.classifier import LlamaCppClassifier
from knowgate.models.prompts.templates import load_packaged_templates
from knowgate.models.tokenization import LabelPromptTokens, TurnTemplate
from knowgate.stats.logistic import sigmoid
from knowgate.types import ModelIdentity

if TYPE_CHECKING:
    from knowgate.models.hf.model import HFModel


# not tokenizer.json: transformers, opening the GGUF file, would take that for its tokenizer and miss the chat template
GGUF_FILE, TOKENIZER_FILE = "judge.gguf", "judge-tokenizer.json"
STARTUP_CHECKS = 2  # prompts at every start; all of them when it is written
MAX_DEVIATION = 0.1  # of a probability; q8_0 moves it by some thousandths, wrong arithmetic by tenths


@dataclass(frozen=True)
class ReferencePrompt:
    """A prompt in tokens, and what the judge said to it before it was written: P(known)."""

    ids: tuple[int, ...]
    known: UnitInterval


@dataclass(frozen=True, kw_only=True)
class GgufOptions:
    """What a gate says of a judge in a GGUF file. pair: the tokens its two labels begin with."""

    kind: str
    turn: TurnTemplate
    pair: tuple[int, int]
    checks: tuple[ReferencePrompt, ...] = ()


@dataclass(frozen=True)
class LlamaJudge:
    """Trainings of one judge, each in a file of its own; their verdicts are averaged."""

    voices: tuple[LlamaCppClassifier, ...]
    options: GgufOptions

    def pose(self, question: str, answer: str | None, text: str) -> LabelPromptTokens:
        turn = self.options.turn
        ids = self.voices[0].tokenize(turn.render(text), special=not turn.chat)
        return LabelPromptTokens(ids, [len(ids) - 1])

    def beginning(self, text: str, n_tokens: int) -> str:
        """The first tokens of a text."""
        return self.voices[0].decode(self.voices[0].tokenize(text.strip())[:n_tokens]).strip()

    def votes(self, cuts: Sequence[LabelPromptTokens]) -> list[Floats]:
        """What each training says."""
        pair = self.options.pair
        return [np.array([voice.score_token_pair(cut.ids, pair) for cut in cuts]) for voice in self.voices]

    def known(self, cuts: Sequence[LabelPromptTokens]) -> Floats:
        mean: Floats = np.mean(self.votes(cuts), axis=0)
        return mean

    def off_by(self, most: int | None = None) -> float:
        """How far it is at most from what it said before it was written; most: prompts to try, all by default."""
        checks = self.options.checks[:most]
        asked = [LabelPromptTokens(list(check.ids), [len(check.ids) - 1]) for check in checks]
        told = np.array([check.known for check in checks])
        return float(np.abs(self.known(asked) - told).max()) if asked else 0.0


@functools.lru_cache(maxsize=2)
def _opened(folders: tuple[Path, ...], digests: tuple[str, ...], options: GgufOptions) -> LlamaJudge:
    judge = LlamaJudge(tuple(LlamaCppClassifier(each / GGUF_FILE, each / TOKENIZER_FILE) for each in folders), options)
    if (off := judge.off_by(STARTUP_CHECKS)) > MAX_DEVIATION:
        raise ModelError(
            f"the judge in '{folders[0].parent}' says something else under this llama.cpp than when it was written: a "
            f"probability is off by {off:.2f}. Use another release of xllamacpp, or the gate it was exported from."
        )
    return judge


def load_llama_judge(folders: tuple[Path, ...], digests: tuple[str, ...], options: Mapping[str, Any]) -> LlamaJudge:
    """The judge in these folders, found to count as it should; the digests tell whether it is still the same."""
    return _opened(folders, digests, read_record(GgufOptions, options, "options.gguf", ignore_unknown=True))


ADAPTER_FOLDER, ADAPTER_WEIGHTS = "adapter", "adapter_model.safetensors"
ADAPTER_SUFFIXES = (
    ".safetensors",
    ".json",
    ".jinja",
    ".txt",
    ".model",
    ".gguf",
)  # nothing that runs code when it is read


@dataclass(frozen=True, kw_only=True)
class JudgeOptions:
    """What a gate with a judge says of it. labels: (known, unknown)."""

    base: str
    base_fingerprint: str
    wording: str
    labels: tuple[str, str]
    adapter_sha256: str
    max_tokens: Annotated[int, NumberRange(1, 10_000_000)]
    full: bool = False
    more_sha256: tuple[str, ...] = ()  # of further adapters, where several were trained
    pairs: bool = False  # an encoder that reads pairs, not a causal model that is spoken to
    gguf: GgufOptions | None = None  # of a judge that llama.cpp runs
    bits: Literal[0, 4, 8] = 0  # of the base's weights; 0: the usual number format


@dataclass(frozen=True)
class JudgeMember:
    """One of the trainings of a judge: a model of its own, or an adapter of one that others use without it."""

    model: HFModel
    adapter: str = ""

    @contextlib.contextmanager
    def speaking(self) -> Iterator[HFModel]:
        """The model with this adapter in use; nobody else runs it meanwhile."""
        with self.model.adapters.activate(self.adapter) if self.adapter else contextlib.nullcontext():
            yield self.model


@dataclass(frozen=True)
class CausalJudge:
    """A model and the two words it answers with: (known, unknown). voices: trainings whose verdicts are averaged."""

    model: HFModel
    labels: tuple[str, str]
    voices: tuple[JudgeMember, ...] = ()

    @functools.cached_property
    def columns(self) -> list[int]:
        """The token each label begins with."""
        from knowgate.models.tokenization import encode_labels

        try:
            return encode_labels(self.model, self.labels)
        except BadSetting:
            raise BadSetting(
                f"{self.model.name} cannot be a judge: it says {' or '.join(self.labels)}, which are told apart by "
                "their first token, and its tokenizer begins both alike. Choose another base: smollm, small."
            ) from None

    def encode(self, text: str, *parts: str) -> LabelPromptTokens:
        """A user turn, then the parts of the answer; a label is expected after each (after the turn, if none).

        Turn and parts are tokenised apart; parts after the first begin with the label that stands there.
        """
        from knowgate.models.tokenization import LabelPromptTokens

        ids = self._turn(text)
        marks = [] if parts else [len(ids) - 1]
        for number, part in enumerate(parts):
            piece = self.model.tokenize(part)
            if number and piece[0] not in self.columns:
                raise BadSetting(f"{self.model.name} does not tokenize the label in '{part}' as it stands in place.")
            ids = ids + piece
            marks.append(len(ids) - 1)
        self.model.check_length(len(ids), 1)
        begins_alike = ids[: len(self.opening)] == self.opening
        return LabelPromptTokens(ids, marks, len(self.opening) if begins_alike else 0)

    @functools.cached_property
    def opening(self) -> list[int]:
        """What every turn begins with, before anything is asked: run once, also where questions come one by one."""
        pairs = zip(self._turn("Question"), self._turn("1"), strict=False)
        return [first for first, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]

    def _turn(self, text: str) -> list[int]:
        chat = bool(self.model.loaded.tokenizer.chat_template)
        return self.model.tokenize(self.model.render(text), special=not chat)

    def pose(self, question: str, answer: str | None, text: str) -> LabelPromptTokens:
        """A question about an answer, worded as a user turn; the two alone are for encoders."""
        return self.encode(text)

    def known(self, cuts: Sequence[LabelPromptTokens]) -> Floats:
        """P(known) / (P(known) + P(unknown)) at the last marked place of each, the mean over the voices."""
        mean: Floats = np.mean(self.votes(cuts), axis=0)
        return mean

    def votes(self, cuts: Sequence[LabelPromptTokens]) -> list[Floats]:
        """What each voice says."""
        return [self._known(voice, cuts) for voice in self.voices or (JudgeMember(self.model),)]

    def _known(self, voice: JudgeMember, cuts: Sequence[LabelPromptTokens]) -> Floats:
        from knowgate.models.hf.local_model import read_label_logits

        with voice.speaking() as model:
            logits = model.run_batched(
                [cut.ids for cut in cuts],
                lambda places: read_label_logits(model, [cuts[place] for place in places], self.columns),
            )
        margin = np.array([float(rows[-1][0]) - float(rows[-1][1]) for rows in logits], dtype=np.float64)
        probability: Floats = sigmoid(margin)
        return probability

    def beginning(self, text: str, n_tokens: int) -> str:
        """The first tokens of a text, as this model counts them."""
        ids = self.model.tokenize(text.strip())[:n_tokens]
        return str(self.model.loaded.tokenizer.decode(ids, skip_special_tokens=True)).strip()


def load_judge_base(spec: str, fingerprint: str = "", adapter: Path | None = None, *, bits: int = 0) -> HFModel:
    """The causal model a judge is made of; its weights must be at hand, and those the adapter was made for."""
    from knowgate.models.hf.model import HFModel

    model = None if spec.startswith(RECORDED_PREFIX) else load_model(spec)
    if not isinstance(model, HFModel):
        raise BadSetting(
            f"a judge is fine-tuned from weights, and '{spec}' has none here. Say what it is to be made of: --base "
            "smollm, hf:NAME_OR_DIR or gguf:FILE; judges of answers also take small, which needs no GPU."
        )
    if adapter is not None and model.fingerprint != fingerprint:
        raise ArtifactError(
            f"the judge in '{adapter.parent}' was fine-tuned from {spec} ({fingerprint}); {spec} is now "
            f"{model.fingerprint}. Fit it again, or give it its old base."
        )
    return replace(model, bits=bits) if bits else model


def load_judge(folder: Path, options: Mapping[str, Any], prompts: str, llm: ModelIdentity | None = None) -> CausalJudge:
    """The judge of an artifact; shared by all gates that are loaded from the same files.

    llm: who is judged. An adapter of its own weights is put into them: there is no second copy.
    """
    if options["wording"] != load_packaged_templates(prompts).fingerprint:
        raise ArtifactError(
            f"the judge in '{folder.parent}' was fitted with another wording of its prompt. Fit it again."
        )
    known, unknown = options["labels"]
    folders, digests = check_adapters(folder, options)
    if (host := _host(folder, options, llm)) is not None:
        return CausalJudge(host, (known, unknown), attach_adapters(host, folders, digests))
    bits = options.get("bits", 0)
    return _judge_opened(folders, digests, options["base"], options["base_fingerprint"], (known, unknown), bits)


def _host(folder: Path, options: Mapping[str, Any], llm: ModelIdentity | None) -> HFModel | None:
    """The LLM itself, where its weights are here and are what the adapter was made for."""
    from knowgate.models.hf.model import HFModel

    if not isinstance(llm, HFModel) or llm.fingerprint != options["base_fingerprint"]:
        return None
    return llm if is_adapter_folder(folder) and llm.bits == options.get("bits", 0) else None


def check_adapters(folder: Path, options: Mapping[str, Any]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Where the trainings of a judge lie, and their digests; refused where one is not what was written."""
    digests = (options["adapter_sha256"], *options.get("more_sha256", ()))
    folders = list_adapter_folders(folder, len(digests))
    for each, digest in zip(folders, digests, strict=True):
        if compute_adapter_digest(each) != digest:
            raise ArtifactError(f"the adapter in '{each}' was changed or damaged. Fit the gate again.")
    return tuple(folders), digests


def list_adapter_folders(first: Path, n: int) -> list[Path]:
    """Where the trainings of a judge lie: the first, and others beside it."""
    return [first, *(first.with_name(f"{first.name}-{number}") for number in range(1, n))]


@functools.lru_cache(maxsize=2)
def _judge_opened(
    folders: tuple[Path, ...], digests: tuple[str, ...], base: str, fingerprint: str, labels: tuple[str, str], bits: int
) -> CausalJudge:
    if not is_adapter_folder(folders[0]):
        voices = tuple(JudgeMember(load_full_judge(folder)) for folder in folders)
        return CausalJudge(voices[0].model, labels, voices)
    model = load_judge_base(base, fingerprint, folders[0], bits=bits)
    return CausalJudge(model, labels, attach_adapters(model, folders, digests))


def is_adapter_folder(folder: Path) -> bool:
    """Whether it holds an adapter, not a model of its own."""
    return (folder / ADAPTER_WEIGHTS).is_file()


def load_full_judge(folder: Path) -> HFModel:
    """A judge that was fine-tuned in full is a model of its own."""
    from knowgate.models.hf.model import HFModel

    return HFModel(str(folder), label=f"judge:{folder.parent.name}")


def attach_adapters(model: HFModel, folders: Sequence[Path], digests: Sequence[str]) -> tuple[JudgeMember, ...]:
    """How each adapter is used, put into the model in place; named by what it is, so that none is there twice."""
    names = [f"judge-{digest[:16]}" for digest in digests]
    for name, folder in zip(names, folders, strict=True):
        model.adapters.add(name, folder)
    return tuple(JudgeMember(model.share_weights(), name) for name in names)


def compute_adapter_digest(folder: Path) -> str:
    """Identity of an adapter's files; files of other kinds than weights, settings and words are refused."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    wrong = [path.name for path in files if path.suffix not in ADAPTER_SUFFIXES]
    if wrong or not files:
        found = f"it holds {', '.join(wrong)}" if wrong else "it is empty or missing"
        raise ArtifactError(f"'{folder}' is not an adapter of ours ({found}); only safetensors and JSON are read.")
    return sha256_text(*(part for path in files for part in (path.relative_to(folder).as_posix(), sha256_file(path))))
