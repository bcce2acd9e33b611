"""Models that learn to judge: a causal one that says one of two words, with LoRA layers or all its weights.

Knows token ids, marked places and losses; not the order of examples, nor where anything is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from knowgate.data.runs.folder import RECORDED_PREFIX
from knowgate.errors import BadSetting, MissingExtra, UnknownName
from knowgate.gates.judges.causal_judge import (
    ADAPTER_SUFFIXES,
    CausalJudge,
    check_adapters,
    load_judge,
    load_judge_base,
)
from knowgate.gates.judges.encoder_judge import (
    ENCODER_NAMES,
    EncoderJudge,
    PairEncoder,
    is_encoder_spec,
    load_encoder_judge,
    pad_rows,
    resolve_encoder,
)
from knowgate.models import load_model
from knowgate.stats.metrics import FloatArray
from knowgate.training.judges.training_options import JudgeTrainingOptions

if TYPE_CHECKING:
    from knowgate.models.hf.model import HFModel
    from knowgate.models.tokenization import LabelPromptTokens


@dataclass(frozen=True)
class TrainingExample:
    """shares: of the first label against the second, at each mark: 1 or 0, or between where a teacher is unsure."""

    cut: LabelPromptTokens
    shares: tuple[float, ...]


@dataclass(frozen=True)
class LimitedExamples:
    kept: list[TrainingExample]
    dropped: int


def drop_long_examples(lessons: Sequence[TrainingExample], limit: int) -> LimitedExamples:
    """Examples of at most so many tokens: longer ones would decide how much memory training takes."""
    kept = [lesson for lesson in lessons if len(lesson.cut.ids) <= limit]
    return LimitedExamples(kept, len(lessons) - len(kept))


LORA_DROPOUT = 0.05


class TrainableModel(Protocol):
    """A model that can be taught. `begin` comes first; `margins` are logits of the first label against the second."""

    @property
    def fingerprint(self) -> str: ...

    def begin(self, training: JudgeTrainingOptions) -> list[Any]:
        """Ready to learn; gives the parameters that will change."""
        ...

    def set_training(self, on: bool) -> None: ...

    def loss(self, lessons: Sequence[TrainingExample]) -> Any: ...

    def margins(self, lessons: Sequence[TrainingExample]) -> list[float]: ...

    def save(self, folder: Path) -> None: ...


@dataclass
class TrainableCausalModel:
    """A causal model; `columns` are the tokens its two labels begin with."""

    base: HFModel
    columns: Sequence[int]
    trained: Any = field(default=None, repr=False)
    whole_vocabulary: bool = False

    @property
    def fingerprint(self) -> str:
        return self.base.fingerprint

    def begin(self, training: JudgeTrainingOptions) -> list[Any]:
        self.whole_vocabulary = training.whole_vocabulary
        self.trained = prepare_for_training(self.base, training)
        return [value for value in self.trained.parameters() if value.requires_grad]

    def set_training(self, on: bool) -> None:
        self.base.loaded.model.train(on)

    def loss(self, lessons: Sequence[TrainingExample]) -> Any:
        """Mean over the marked places of the cross-entropy of the labels."""
        import torch

        shares = torch.tensor([share for lesson in lessons for share in lesson.shares], device=self.base.loaded.device)
        if not self.whole_vocabulary:
            return pair_loss(self._logits(lessons, self.columns), shares)
        words = torch.tensor([self.columns[0] if share >= 0.5 else self.columns[1] for share in shares.tolist()])
        return torch.nn.functional.cross_entropy(self._logits(lessons, None), words.to(shares.device))

    def margins(self, lessons: Sequence[TrainingExample]) -> list[float]:
        """At the last mark of each lesson."""
        logits = self._logits(lessons, self.columns)
        ends = [sum(len(lesson.shares) for lesson in lessons[: place + 1]) - 1 for place in range(len(lessons))]
        return [float(margin) for margin in (logits[ends, 0] - logits[ends, 1]).tolist()]

    def _logits(self, lessons: Sequence[TrainingExample], columns: Sequence[int] | None) -> Any:
        """The head is applied at the marked places alone, and to the labels alone where the others do not count."""
        import torch

        from knowgate.models.hf.local_model import apply_lm_head

        device, model = self.base.loaded.device, self.base.loaded.model
        ids, mask = pad_rows([lesson.cut.ids for lesson in lessons], self.base.pad_id, device)
        rows = [row for row, lesson in enumerate(lessons) for _ in lesson.cut.positions]
        marks = [mark for lesson in lessons for mark in lesson.cut.positions]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            output = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
            logits = apply_lm_head(model, output.last_hidden_state[rows, marks], columns)
        return logits.float()

    def save(self, folder: Path) -> None:
        """The adapter, or the whole model in the number format it is used in, with its tokenizer."""
        if hasattr(self.trained, "peft_config"):
            self.trained.save_pretrained(str(folder), save_embedding_layers=False)
        else:
            half = self.base.loaded.device.type == "cuda"
            state = {key: value.bfloat16() if half else value for key, value in self.trained.state_dict().items()}
            self.trained.save_pretrained(str(folder), state_dict=state)
            self.base.loaded.tokenizer.save_pretrained(str(folder))
        for path in folder.iterdir():
            if path.suffix not in ADAPTER_SUFFIXES:
                path.unlink()  # peft's own model card


def prepare_for_training(base: HFModel, training: JudgeTrainingOptions) -> Any:
    """The model ready to learn: with LoRA layers in it (of fp32, whatever the base is), or all weights in fp32."""
    if training.full:
        return base.loaded.model.float().requires_grad_(True)
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise MissingExtra("LoRA", "train") from None
    config = LoraConfig(
        r=training.rank,
        lora_alpha=2 * training.rank,
        lora_dropout=LORA_DROPOUT,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base.loaded.model, config)


def pair_loss(logits: Any, shares: Any) -> Any:
    """Mean binary cross-entropy of first label against second."""
    import torch

    return torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0] - logits[:, 1], shares)


@dataclass(frozen=True)
class TrainableEncoder:
    """An encoder with one output, trained in full."""

    encoder: PairEncoder

    @property
    def fingerprint(self) -> str:
        return self.encoder.fingerprint

    def begin(self, training: JudgeTrainingOptions) -> list[Any]:
        if not training.full:
            raise BadSetting("an encoder is small and trained in full: add --full.")
        return list(self.encoder.model.parameters())

    def set_training(self, on: bool) -> None:
        self.encoder.model.train(on)

    def loss(self, lessons: Sequence[TrainingExample]) -> Any:
        import torch

        outputs = self.encoder.compute_logits([lesson.cut.ids for lesson in lessons])
        shares = torch.tensor([lesson.shares[0] for lesson in lessons], device=outputs.device)
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs, shares)

    def margins(self, lessons: Sequence[TrainingExample]) -> list[float]:
        return [float(one) for one in self.encoder.compute_logits([lesson.cut.ids for lesson in lessons]).tolist()]

    def save(self, folder: Path) -> None:
        from knowgate.models.hf.loader import silence_transformers

        with silence_transformers():
            self.encoder.model.save_pretrained(str(folder))
            self.encoder.tokenizer.save_pretrained(str(folder))


NO_CHAT_TEMPLATE_NOTE = (
    "the base has no chat template: it is asked in plain text, which suits models that were never taught to chat"
)


class VotingJudge(Protocol):
    """A judge as far as fitting must know it."""

    def predict_members(self, cuts: Sequence[LabelPromptTokens]) -> list[FloatArray]: ...


JudgeType = TypeVar("JudgeType", bound=VotingJudge)


@dataclass(frozen=True)
class TrainingSetup(Generic[JudgeType]):
    """A base ready to be taught; `judge` makes its lessons, `pupil` learns them. notes: what the card says of it."""

    judge: JudgeType
    pupil: TrainableModel
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class JudgeKind(Generic[JudgeType]):
    """begin: of a base, the two labels and a seed. open: of a folder, a gate's options and the name of its prompts."""

    begin: Callable[[str, tuple[str, str], int], TrainingSetup[JudgeType]]
    open: Callable[[Path, Mapping[str, Any], str], JudgeType]
    options: Mapping[str, Any] = field(default_factory=dict)  # what the gate says of such a judge


def _causal(base: str, labels: tuple[str, str], seed: int, *, bits: int = 0) -> TrainingSetup[CausalJudge]:
    model = load_judge_base(base, bits=bits)
    judge = CausalJudge(model, labels)
    spoken_to = bool(model.loaded.tokenizer.chat_template)
    return TrainingSetup(
        judge, TrainableCausalModel(model, judge.label_tokens), () if spoken_to else (NO_CHAT_TEMPLATE_NOTE,)
    )


def _pairs(base: str, labels: tuple[str, str], seed: int) -> TrainingSetup[EncoderJudge]:
    encoder = PairEncoder(resolve_encoder(base), seed)
    encoder.load_weights()
    return TrainingSetup(EncoderJudge((encoder,)), TrainableEncoder(encoder))


def _open_pairs(folder: Path, options: Mapping[str, Any], prompts: str) -> EncoderJudge:
    return load_encoder_judge(*check_adapters(folder, options))


CAUSAL_JUDGE = JudgeKind(_causal, load_judge)
PAIR_ENCODER_JUDGE = JudgeKind(_pairs, _open_pairs, {"pairs": True})


def select_judge_kind(base: str, bits: int = 0) -> JudgeKind[Any]:
    """Where a judge of answers learns: either kind serves. bits: of a causal base's weights; 0: the usual format."""
    if is_encoder_spec(base):
        return PAIR_ENCODER_JUDGE
    _check_known(base)
    return JudgeKind(functools.partial(_causal, bits=bits), load_judge, {"bits": bits}) if bits else CAUSAL_JUDGE


def _check_known(base: str) -> None:
    """Of a name that is no model's, say what a judge of answers can be made of, encoders as well."""
    if base.startswith(RECORDED_PREFIX):
        return
    try:
        load_model(base)  # weights are read on first use
    except UnknownName:
        raise UnknownName("base", base, [*ENCODER_NAMES, "encoder:DIR", "smollm", "hf:NAME", "gguf:FILE"]) from None
