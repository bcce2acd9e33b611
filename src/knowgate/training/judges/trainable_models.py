"""Models that can be trained as judges: causal models that answer with one of two labels, and encoders of text pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from knowgate.data.runs.folder import is_recorded_model
from knowgate.errors import BadSetting, UnknownName, require_extra
from knowgate.gates.judges import ANSWER_LABELS, ANSWER_PROMPTS, causal_judge, encoder_judge
from knowgate.models import load_model
from knowgate.training.judges.training_options import JudgeTrainingOptions

if TYPE_CHECKING:
    from knowgate.models.hf.model import HFModel
    from knowgate.models.tokenization import LabelPromptTokens

LORA_DROPOUT = 0.05
NO_CHAT_TEMPLATE_NOTE = "the base has no chat template: it is prompted in plain text, as fits models not tuned for chat"


@dataclass(frozen=True)
class TrainingExample:
    """A tokenized prompt with the label probabilities that a judge should predict.

    Attributes:
        prompt: Token ids and the positions at which a label is predicted.
        targets: Probability of the first label at each position: 1, 0, or between for soft labels.
    """

    prompt: LabelPromptTokens
    targets: tuple[float, ...]


class BatchOutput(NamedTuple):
    """What a model predicts for a batch of examples.

    Attributes:
        loss: Mean loss, a tensor.
        margins: Logit of the first label minus logit of the second label, at the last label position of each example. A
            tensor.
    """

    loss: Any
    margins: Any


@dataclass
class TrainableCausalModel:
    """A causal model, trained to answer with one of two labels, such as Yes and No.

    Attributes:
        judge: The judge with the base model that is trained.
        trained: The model with trainable weights; set by `prepare`.
        whole_vocabulary: Whether the label competes with every token in the loss. If not, only with the other label.
    """

    judge: causal_judge.CausalJudge
    trained: Any = field(default=None, repr=False)
    whole_vocabulary: bool = False

    @property
    def base(self) -> HFModel:
        """The model to train."""
        return self.judge.model

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the base model."""
        return self.base.fingerprint

    @property
    def notes(self) -> Sequence[str]:
        """A note if the base has no chat template."""
        return [] if self.base.loaded.tokenizer.chat_template else [NO_CHAT_TEMPLATE_NOTE]

    def prepare(self, training: JudgeTrainingOptions) -> list[Any]:
        """Add LoRA layers or make all weights trainable, and return the parameters to optimize."""
        self.whole_vocabulary = training.whole_vocabulary
        model = self.base.loaded.model
        self.trained = model.float().requires_grad_(True) if training.full else _add_lora(model, training.rank)
        return [value for value in self.trained.parameters() if value.requires_grad]

    def set_training(self, on: bool) -> None:
        """Switch between training mode and evaluation mode."""
        self.base.loaded.model.train(on)

    def compute_output(self, examples: Sequence[TrainingExample]) -> BatchOutput:
        """Compute the mean cross-entropy of the labels in a batch, and the margin of the last label of each example.

        A label competes with the other label, or with all tokens if `whole_vocabulary` is set.
        """
        import torch

        label_logits, all_logits = self._compute_logits(examples)
        margins = label_logits[:, 0] - label_logits[:, 1]
        first_label_probabilities = [target for example in examples for target in example.targets]
        targets = torch.tensor(first_label_probabilities, device=margins.device)
        if all_logits is None:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(margins, targets)
        else:
            first_token, second_token = self.judge.label_tokens
            target_tokens = torch.where(targets >= 0.5, first_token, second_token)
            loss = torch.nn.functional.cross_entropy(all_logits, target_tokens)
        # An example may have several labels. The last one is the judge's prediction.
        last_labels = np.cumsum([len(example.targets) for example in examples]) - 1
        return BatchOutput(loss, margins[last_labels])

    def _compute_logits(self, examples: Sequence[TrainingExample]) -> tuple[Any, Any]:
        """Compute the logits at each label position of a batch.

        Returns:
            The logits of the two label tokens, and the logits of the whole vocabulary (None unless `whole_vocabulary`).
        """
        import torch

        from knowgate.models.hf.local_model import apply_lm_head

        device, model = self.base.loaded.device, self.base.loaded.model
        ids, mask = encoder_judge.pad_rows([example.prompt.ids for example in examples], self.base.pad_id, device)
        rows: list[int] = []  # the row in the batch of each label
        positions: list[int] = []  # the position of each label in its row
        for row, example in enumerate(examples):
            rows += [row] * len(example.prompt.positions)
            positions += example.prompt.positions
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            output = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False)
            states = output.last_hidden_state[rows, positions]
            label_logits = apply_lm_head(model, states, self.judge.label_tokens)
            return label_logits, apply_lm_head(model, states) if self.whole_vocabulary else None

    def save(self, folder: Path) -> None:
        """Save the LoRA adapter, or the whole model with its tokenizer.

        Files of types that judges may not contain are deleted.
        """
        if hasattr(self.trained, "peft_config"):
            self.trained.save_pretrained(str(folder), save_embedding_layers=False)
        else:
            weights = self.trained.state_dict()
            if self.base.loaded.device.type == "cuda":  # on a GPU, the judge will be used in bfloat16
                weights = {name: value.bfloat16() for name, value in weights.items()}
            self.trained.save_pretrained(str(folder), state_dict=weights)
            self.base.loaded.tokenizer.save_pretrained(str(folder))
        for path in folder.iterdir():
            if path.suffix not in causal_judge.ADAPTER_SUFFIXES:
                path.unlink()  # such as README.md, the model card that peft writes


def _add_lora(model: Any, rank: int) -> Any:
    """Add LoRA layers to a model. Its other weights are no longer trained."""
    with require_extra("LoRA", "train"):
        from peft import LoraConfig, get_peft_model
    layers = {"r": rank, "lora_alpha": 2 * rank, "lora_dropout": LORA_DROPOUT, "target_modules": "all-linear"}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **layers))
    adapted.create_or_update_model_card = lambda folder: None  # a gate has a card of its own
    return adapted


@dataclass(frozen=True)
class TrainableEncoder:
    """An encoder, trained to predict whether an answer is right.

    The encoder reads question and answer and outputs one logit. `notes` are lines for the model card.
    """

    encoder: encoder_judge.PairEncoder
    notes: Sequence[str] = ()

    @property
    def judge(self) -> encoder_judge.EncoderJudge:
        """The encoder as a judge."""
        return encoder_judge.EncoderJudge((self.encoder,))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the encoder."""
        return self.encoder.fingerprint

    def prepare(self, training: JudgeTrainingOptions) -> list[Any]:
        """Return the parameters to optimize. `frozen_layers` excludes embeddings and lower layers."""
        if training.frozen_layers:
            body = self.encoder.model.base_model
            if not hasattr(getattr(body, "encoder", None), "layer"):
                raise BadSetting("`frozen_layers` works only with encoders of BERT's architecture. Leave it out.")
            for part in (body.embeddings, *body.encoder.layer[: training.frozen_layers]):
                part.requires_grad_(False)
        return [parameter for parameter in self.encoder.model.parameters() if parameter.requires_grad]

    def set_training(self, on: bool) -> None:
        """Switch between training mode and evaluation mode."""
        self.encoder.model.train(on)

    def compute_output(self, examples: Sequence[TrainingExample]) -> BatchOutput:
        """Compute the mean binary cross-entropy of a batch, and the logit of each example."""
        import torch

        margins = self.encoder.compute_logits([example.prompt.ids for example in examples])
        targets = torch.tensor([example.targets[0] for example in examples], device=margins.device)
        return BatchOutput(torch.nn.functional.binary_cross_entropy_with_logits(margins, targets), margins)

    def save(self, folder: Path) -> None:
        """Save model and tokenizer."""
        from knowgate.models.hf.loader import silence_transformers

        with silence_transformers():
            self.encoder.model.save_pretrained(str(folder))
            self.encoder.tokenizer.save_pretrained(str(folder))


# A model that can be trained as a judge. `prepare` must be called before the other methods.
TrainableModel = TrainableCausalModel | TrainableEncoder


# --- opening and loading --------------------------------------------------------------------------


@dataclass(frozen=True)
class JudgeSpec:
    """The model to fine-tune as a judge, and its prompts and labels.

    Attributes:
        base: Spec of the model to fine-tune.
        labels: The two words that the judge chooses from.
        prompts: Name of the packaged prompt templates.
        bits: Bits per weight of a causal base, 4 or 8; 0 for its default precision.
        is_encoder: Whether the base is an encoder of question and answer instead of a causal model.
    """

    base: str
    labels: tuple[str, str]
    prompts: str
    bits: int = 0
    is_encoder: bool = False

    def open_base(self, seed: int) -> TrainableModel:
        """Load the base for training. The seed is for an encoder's new output layer."""
        if self.is_encoder:
            encoder = encoder_judge.PairEncoder(encoder_judge.resolve_encoder(self.base), seed)
            encoder.load_weights()
            return TrainableEncoder(encoder)
        model = causal_judge.load_judge_base(self.base, bits=self.bits)
        return TrainableCausalModel(causal_judge.CausalJudge(model, self.labels))

    def load_trained(self, folder: Path, options: Mapping[str, Any]) -> Any:
        """Load the trained judge from its folder, with the loader that the fitted gate uses, too."""
        if self.is_encoder:
            return encoder_judge.load_encoder_judge(*causal_judge.check_adapters(folder, options))
        return causal_judge.load_judge(folder, options, self.prompts)

    @property
    def options(self) -> dict[str, Any]:
        """The gate options about the kind of judge."""
        if self.is_encoder:
            return {"pairs": True}
        return {"bits": self.bits} if self.bits else {}


def make_answer_judge_spec(prompt_name: str, base: str, bits: int = 0) -> JudgeSpec:
    """Make the spec of a judge of answers. The base is a causal model or an encoder.

    Args:
        prompt_name: What the judge is asked, a key of `ANSWER_PROMPTS`.
        base: Spec of the base model.
        bits: Bits per weight of a causal base.

    Raises:
        UnknownName: There is no such model. The error also names the encoders.
    """
    is_encoder = encoder_judge.is_encoder_spec(base)
    # The LLM of imported answers is a mere name that cannot be checked here. `open_base` rejects it with better advice.
    if not is_encoder and not is_recorded_model(base):
        _check_base_name(base)
    return JudgeSpec(base, ANSWER_LABELS, ANSWER_PROMPTS[prompt_name].templates, bits, is_encoder)


def _check_base_name(base: str) -> None:
    """Raise UnknownName if there is no such model. The error also names the encoders."""
    try:
        load_model(base)  # reads no weights yet
    except UnknownName:
        names = [*encoder_judge.PACKAGED_ENCODERS, "encoder:DIR", "smollm", "hf:NAME", "gguf:FILE"]
        raise UnknownName("base", base, names) from None
