"""Models that can be trained as judges: causal models that say one of two labels, and encoders of text pairs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from knowgate.data.runs.folder import RECORDED_PREFIX
from knowgate.errors import BadSetting, UnknownName, require_extra
from knowgate.gates.judges import causal_judge, encoder_judge
from knowgate.models import load_model
from knowgate.stats.metrics import FloatArray
from knowgate.training.judges.training_options import JudgeTrainingOptions

if TYPE_CHECKING:
    from knowgate.models.hf.model import HFModel
    from knowgate.models.tokenization import LabelPromptTokens

LORA_DROPOUT = 0.05
NO_CHAT_TEMPLATE_NOTE = "the base has no chat template: it is prompted in plain text, as fits models not tuned for chat"


@dataclass(frozen=True)
class TrainingExample:
    """A tokenized prompt and the target probabilities of the first label.

    Attributes:
        prompt: Token ids and the positions at which a label is predicted.
        targets: Probability of the first label at each position: 1, 0, or between for soft labels.
    """

    prompt: LabelPromptTokens
    targets: tuple[float, ...]


def drop_long_examples(examples: Sequence[TrainingExample], max_tokens: int) -> list[TrainingExample]:
    """Drop examples with more than `max_tokens` tokens. The longest one determines the memory of a batch."""
    return [example for example in examples if len(example.prompt.ids) <= max_tokens]


class TrainableModel(Protocol):
    """A model that can be trained as a judge. Call `prepare` before the other methods."""

    @property
    def fingerprint(self) -> str: ...

    def prepare(self, training: JudgeTrainingOptions) -> list[Any]:
        """Make the model trainable and return the parameters to optimize."""
        ...

    def set_training(self, on: bool) -> None:
        """Switch between training mode and evaluation mode."""

    def compute_loss(self, examples: Sequence[TrainingExample]) -> Any:
        """Return the mean loss of a batch, with gradients."""

    def compute_margins(self, examples: Sequence[TrainingExample]) -> list[float]:
        """Return the logit of the first label minus that of the second, at the last position of each example."""
        ...

    def save(self, folder: Path) -> None:
        """Save the trained weights."""


@dataclass
class TrainableCausalModel:
    """A causal model that is trained to answer with one of two labels, such as Yes and No.

    Attributes:
        base: The model to train.
        columns: The first token of each label.
        trained: The model with trainable weights; set by `prepare`.
        whole_vocabulary: Whether the label competes with every token in the loss, or only with the other label.
    """

    base: HFModel
    columns: Sequence[int]
    trained: Any = field(default=None, repr=False)
    whole_vocabulary: bool = False

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the base model."""
        return self.base.fingerprint

    def prepare(self, training: JudgeTrainingOptions) -> list[Any]:
        """Add LoRA layers, or make all weights trainable; return the parameters to optimize."""
        self.whole_vocabulary = training.whole_vocabulary
        self.trained = prepare_for_training(self.base, training)
        return [value for value in self.trained.parameters() if value.requires_grad]

    def set_training(self, on: bool) -> None:
        """Switch between training mode and evaluation mode."""
        self.base.loaded.model.train(on)

    def compute_loss(self, examples: Sequence[TrainingExample]) -> Any:
        """Return the mean cross-entropy of the labels over all positions.

        A label competes with the other label only, or with all tokens if `whole_vocabulary` is set.
        """
        import torch

        targets = [target for example in examples for target in example.targets]
        if not self.whole_vocabulary:
            logits = self._compute_logits(examples, self.columns)
            return pair_loss(logits, torch.tensor(targets, device=logits.device))
        logits = self._compute_logits(examples, None)
        labels = [self.columns[0] if target >= 0.5 else self.columns[1] for target in targets]
        return torch.nn.functional.cross_entropy(logits, torch.tensor(labels, device=logits.device))

    def compute_margins(self, examples: Sequence[TrainingExample]) -> list[float]:
        """Return the logit of the first label minus that of the second, at the last position of each example."""
        logits = self._compute_logits(examples, self.columns)
        # Each example has one row of logits per target. Only its last row is used.
        last_rows = [end - 1 for end in itertools.accumulate(len(example.targets) for example in examples)]
        return [float(margin) for margin in (logits[last_rows, 0] - logits[last_rows, 1]).tolist()]

    def _compute_logits(self, examples: Sequence[TrainingExample], columns: Sequence[int] | None) -> Any:
        """Return the logits at the label positions of all examples, one row per position.

        Args:
            examples: Tokenized prompts with the positions at which a label is predicted.
            columns: Tokens whose logits are computed; None for the whole vocabulary.
        """
        import torch

        from knowgate.models.hf.local_model import apply_lm_head

        device, model = self.base.loaded.device, self.base.loaded.model
        ids, mask = encoder_judge.pad_rows([example.prompt.ids for example in examples], self.base.pad_id, device)
        # Row and position in the batch of each label, for indexing the hidden states.
        rows = [row for row, example in enumerate(examples) for _ in example.prompt.positions]
        positions = [position for example in examples for position in example.prompt.positions]
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            output = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
            logits = apply_lm_head(model, output.last_hidden_state[rows, positions], columns)
        return logits.float()

    def save(self, folder: Path) -> None:
        """Save the adapter, or the whole model in the precision it is used in, with its tokenizer."""
        if hasattr(self.trained, "peft_config"):
            self.trained.save_pretrained(str(folder), save_embedding_layers=False)
        else:
            is_bfloat16 = self.base.loaded.device.type == "cuda"  # the precision in which a GPU runs the judge
            weights = self.trained.state_dict()
            state = {key: value.bfloat16() if is_bfloat16 else value for key, value in weights.items()}
            self.trained.save_pretrained(str(folder), state_dict=state)
            self.base.loaded.tokenizer.save_pretrained(str(folder))
        for path in folder.iterdir():
            if path.suffix not in causal_judge.ADAPTER_SUFFIXES:
                path.unlink()  # peft's own model card


def prepare_for_training(base: HFModel, training: JudgeTrainingOptions) -> Any:
    """Return the model with fp32 LoRA layers, or with all weights trainable in fp32."""
    if training.full:
        return base.loaded.model.float().requires_grad_(True)
    with require_extra("LoRA", "train"):
        from peft import LoraConfig, get_peft_model
    config = LoraConfig(
        r=training.rank,
        lora_alpha=2 * training.rank,
        lora_dropout=LORA_DROPOUT,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base.loaded.model, config)


def pair_loss(logits: Any, targets: Any) -> Any:
    """Return the mean binary cross-entropy of choosing between two labels.

    Args:
        logits: One row per example, with the logits of the first and the second label.
        targets: Probability of the first label for each example.
    """
    import torch

    return torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0] - logits[:, 1], targets)


@dataclass(frozen=True)
class TrainableEncoder:
    """An encoder of question and answer with one output, far smaller than a causal model; all weights are trained."""

    encoder: encoder_judge.PairEncoder

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the encoder."""
        return self.encoder.fingerprint

    def prepare(self, training: JudgeTrainingOptions) -> list[Any]:
        """Freeze the embeddings and lower layers if `frozen_layers` is set, and return the parameters to optimize."""
        if not training.full:
            raise BadSetting("an encoder is always trained with all its weights. Use full=True.")
        body = self.encoder.model.base_model
        if training.frozen_layers and not hasattr(getattr(body, "encoder", None), "layer"):
            raise BadSetting("frozen_layers works only with encoders that are built like BERT. Leave it out.")
        if training.frozen_layers:
            for part in (body.embeddings, *body.encoder.layer[: training.frozen_layers]):
                part.requires_grad_(False)
        return [parameter for parameter in self.encoder.model.parameters() if parameter.requires_grad]

    def set_training(self, on: bool) -> None:
        """Switch between training mode and evaluation mode."""
        self.encoder.model.train(on)

    def compute_loss(self, examples: Sequence[TrainingExample]) -> Any:
        """Return the mean binary cross-entropy of a batch."""
        import torch

        outputs = self._compute_outputs(examples)
        targets = torch.tensor([example.targets[0] for example in examples], device=outputs.device)
        return torch.nn.functional.binary_cross_entropy_with_logits(outputs, targets)

    def compute_margins(self, examples: Sequence[TrainingExample]) -> list[float]:
        """Return the logit of each example."""
        return [float(margin) for margin in self._compute_outputs(examples).tolist()]

    def _compute_outputs(self, examples: Sequence[TrainingExample]) -> Any:
        return self.encoder.compute_logits([example.prompt.ids for example in examples])

    def save(self, folder: Path) -> None:
        """Save model and tokenizer."""
        from knowgate.models.hf.loader import silence_transformers

        with silence_transformers():
            self.encoder.model.save_pretrained(str(folder))
            self.encoder.tokenizer.save_pretrained(str(folder))


# --- kinds of judges ------------------------------------------------------------------------------


class VotingJudge(Protocol):
    """A judge that returns the probabilities of each of its members."""

    def predict_member(self, number: int, prompts: Sequence[LabelPromptTokens]) -> FloatArray: ...


JudgeType = TypeVar("JudgeType", bound=VotingJudge)


@dataclass(frozen=True)
class TrainingSetup(Generic[JudgeType]):
    """A base model that is ready for training.

    Attributes:
        judge: The judge before training. It is used to tokenize the prompts.
        model: The model to train.
        notes: Notes for the model card.
    """

    judge: JudgeType
    model: TrainableModel
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class JudgeKind(Generic[JudgeType]):
    """How to open judges of one kind: causal models or encoders.

    Attributes:
        start: Opens a base for training; takes its spec, the two labels and a seed.
        load: Opens a trained judge; takes its folder, the gate's options and the name of its prompts.
        options: Options that the gate stores for such a judge.
    """

    start: Callable[[str, tuple[str, str], int], TrainingSetup[JudgeType]]
    load: Callable[[Path, Mapping[str, Any], str], JudgeType]
    options: Mapping[str, Any] = field(default_factory=dict)


def _start_causal(
    base: str, labels: tuple[str, str], seed: int, *, bits: int = 0
) -> TrainingSetup[causal_judge.CausalJudge]:
    model = causal_judge.load_judge_base(base, bits=bits)
    judge = causal_judge.CausalJudge(model, labels)
    notes = () if model.loaded.tokenizer.chat_template else (NO_CHAT_TEMPLATE_NOTE,)
    return TrainingSetup(judge, TrainableCausalModel(model, judge.label_tokens), notes)


def _start_encoder(base: str, labels: tuple[str, str], seed: int) -> TrainingSetup[encoder_judge.EncoderJudge]:
    encoder = encoder_judge.PairEncoder(encoder_judge.resolve_encoder(base), seed)
    encoder.load_weights()
    return TrainingSetup(encoder_judge.EncoderJudge((encoder,)), TrainableEncoder(encoder))


def _load_encoder(folder: Path, options: Mapping[str, Any], prompts: str) -> encoder_judge.EncoderJudge:
    return encoder_judge.load_encoder_judge(*causal_judge.check_adapters(folder, options))


CAUSAL_JUDGE = JudgeKind(_start_causal, causal_judge.load_judge)
PAIR_ENCODER_JUDGE = JudgeKind(_start_encoder, _load_encoder, {"pairs": True})


def select_judge_kind(base: str, bits: int = 0) -> JudgeKind[Any]:
    """Select how a judge is trained and loaded, by its base model: as an encoder or as a causal model.

    Args:
        base: Spec of the base model.
        bits: Bits per weight of a causal base, 4 or 8; 0 for its default precision.

    Raises:
        UnknownName: There is no such model. The error also names the encoders.
    """
    if encoder_judge.is_encoder_spec(base):
        return PAIR_ENCODER_JUDGE
    # The model of imported answers has no weights here. Training reports that with better advice.
    if not base.startswith(RECORDED_PREFIX):
        try:
            load_model(base)  # checks the name; reads no weights yet
        except UnknownName:
            names = [*encoder_judge.ENCODER_NAMES, "encoder:DIR", "smollm", "hf:NAME", "gguf:FILE"]
            raise UnknownName("base", base, names) from None
    if not bits:
        return CAUSAL_JUDGE
    return JudgeKind(functools.partial(_start_causal, bits=bits), causal_judge.load_judge, {"bits": bits})
