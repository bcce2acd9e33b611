"""A GGUF model loaded by llama.cpp: tokens of sequences go in, logits and hidden states come out.

All sequences share one cache of keys and values, and copying the beginning of a sequence to another copies no memory.
"""

from __future__ import annotations

import ctypes
import functools
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core import split_batches
from knowgate.core.stop_flag import check_stop_flag
from knowgate.errors import ModelError, WeightsError, require_extra
from knowgate.models.llamacpp import bindings
from knowgate.types import Vector

MAX_CELLS = 8_192  # tokens in the cache, over all sequences; allocated at the start
MAX_SEQUENCES = 67
BATCH_TOKENS = 512  # tokens per call of llama_decode
SELF_TEST_TEXT = "The Eiffel Tower stands in Paris, the capital of France, and was built in 1889."
SELF_TEST_TOLERANCE = 0.1  # nats; rounding and quantized activations stay below 0.05


@dataclass(frozen=True)
class InputToken:
    """A token for the model to read, with its place.

    Args:
        token: The token id.
        position: Index of the token in its sequence.
        sequence: Number of the sequence.
        needs_output: Whether the logits and hidden states after this token are returned.
    """

    token: int
    position: int
    sequence: int
    needs_output: bool = False


class LlamaEngine:
    """The model in a GGUF file, for use by one thread at a time.

    Layer 0 is the embeddings.

    Raises:
        WeightsError: llama.cpp cannot open the file, or the model is not a decoder with attention.
        ModelError: llama.cpp computes wrong results on this machine.
    """

    def __init__(self, file: Path):
        self.lib = lib = bindings.load_library()
        bindings.logged_errors.clear()
        lib.llama_log_set(bindings.log_callback, None)  # a server of xllamacpp in this process replaces the callback
        self._model = lib.llama_model_load_from_file(os.fsencode(file), lib.llama_model_default_params())
        if not self._model:
            raise _make_open_error(file)
        if lib.llama_model_has_encoder(self._model) or lib.llama_model_is_recurrent(self._model):
            raise WeightsError(f"the model in '{file}' is recurrent or has an encoder. Use a decoder-only transformer.")
        self.vocabulary = lib.llama_model_get_vocab(self._model)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocabulary))
        self.width = int(lib.llama_model_n_embd(self._model))
        self.depth = int(lib.llama_model_n_layer(self._model)) + 1
        self.cells = min(MAX_CELLS, int(lib.llama_model_n_ctx_train(self._model)))
        # What `_capture` copies: name of a tensor -> layer number, and the states of each layer, one row per token.
        self._captured_tensors: dict[bytes, int] = {}
        self._captured_states: dict[int, Vector] = {}
        # The callback must stay alive, because llama.cpp keeps a pointer to it.
        self._eval_callback = bindings.EVAL_CALLBACK_TYPE(self._capture)
        self._context = self._create_context(file)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.filled: set[int] = set()  # sequences that hold tokens
        self.times_cleared = 0
        check_engine(self, file)

    def _create_context(self, file: Path) -> Any:
        """Create a llama.cpp context, and check its sizes.

        The context holds the key-value cache of all sequences.
        """
        context = self.lib.llama_init_from_model(self._model, self._make_params())
        if not context:
            raise _make_open_error(file)
        self._check_sizes(context)
        threads = count_usable_cores()
        self.lib.llama_set_n_threads(context, threads, threads)
        return context

    def _make_params(self) -> bindings.OpaqueParams:
        """Return llama.cpp's default parameters of a context, with other values for some of them.

        The C structure is opaque here, so each value is written at its offset in bytes.
        """
        params: bindings.OpaqueParams = self.lib.llama_context_default_params()
        kv_unified_offset = bindings.check_params_layout(bytes(params.bytes))
        # The first four fields are n_ctx, n_batch, n_ubatch and n_seq_max.
        struct.pack_into("<4I", params.bytes, 0, self.cells, BATCH_TOKENS, BATCH_TOKENS, MAX_SEQUENCES)
        # By default, a sequence may have one output per batch. With 0, it may have several.
        struct.pack_into("<I", params.bytes, bindings.OUTPUTS_PER_SEQUENCE_OFFSET, 0)
        callback = ctypes.cast(self._eval_callback, ctypes.c_void_p).value or 0
        struct.pack_into("<Q", params.bytes, bindings.CALLBACK_OFFSET, callback)
        params.bytes[kv_unified_offset] = True  # all sequences share one key-value cache
        return params

    def _check_sizes(self, context: Any) -> None:
        """Raise ModelError unless the context has the requested sizes."""
        lib = self.lib
        sizes = [int(lib.llama_n_ctx(context)), int(lib.llama_n_batch(context)), int(lib.llama_n_seq_max(context))]
        is_unified = sizes[0] == int(lib.llama_n_ctx_seq(context))  # each sequence may use the whole cache
        if not is_unified or sizes[0] < self.cells or sizes[1:] != [BATCH_TOKENS, MAX_SEQUENCES]:
            raise ModelError(f"llama.cpp changed the context sizes to {sizes}. Use gguf:FILE instead of llamacpp:FILE.")

    @property
    def template(self) -> str:
        """The Jinja chat template, or '' if there is none."""
        return str((self.lib.llama_model_chat_template(self._model, None) or b"").decode())

    def is_end(self, token: int) -> bool:
        """Return whether the token ends an answer."""
        return bool(self.lib.llama_vocab_is_eog(self.vocabulary, token))

    # --- sequences --------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove all sequences."""
        self.lib.llama_memory_clear(self._memory, False)
        self.filled.clear()
        self.times_cleared += 1

    def copy(self, source: int, target: int, length: int) -> None:
        """Add the first `length` tokens of one sequence to another, by reference."""
        self.lib.llama_memory_seq_cp(self._memory, source, target, 0, length)
        self.filled.add(target)

    def truncate(self, sequence: int, length: int = 0) -> None:
        """Remove the tokens of a sequence after the first `length`."""
        self.lib.llama_memory_seq_rm(self._memory, sequence, length, -1)
        if not length:
            self.filled.discard(sequence)

    def feed(self, tokens: Sequence[InputToken], layers: Sequence[int] = ()) -> tuple[Vector, dict[int, Vector]]:
        """Let the model read tokens, in batches of BATCH_TOKENS.

        Args:
            tokens: The tokens.
            layers: Layers whose hidden states are returned.

        Returns:
            The logits (tokens x vocabulary), and the hidden states by layer (tokens x width), only of tokens with
            `needs_output`.
        """
        logits: list[Vector] = []  # one array per token
        states: dict[int, list[Vector]] = {layer: [] for layer in layers}  # one array per batch
        for batch in split_batches(tokens, BATCH_TOKENS):
            check_stop_flag()
            self._compute(batch, layers)
            outputs = [index for index, token in enumerate(batch) if token.needs_output]
            logits += [self._get_logits(index) for index in outputs]
            for layer in layers if outputs else ():
                states[layer].append(self._get_states(layer, len(batch), outputs))
        stacked_logits = np.stack(logits) if logits else np.empty((0, self.n_vocab), dtype=np.float32)
        return stacked_logits, {layer: np.concatenate(blocks) for layer, blocks in states.items() if blocks}

    def _compute(self, tokens: Sequence[InputToken], layers: Sequence[int]) -> None:
        """Run llama_decode on at most BATCH_TOKENS tokens."""
        self._fill_batch(tokens)
        self.filled.update(token.sequence for token in tokens)
        self._captured_tensors = {name: layer for layer in layers for name in self._get_tensor_names(layer)}
        self._captured_states = {}
        status = self.lib.llama_decode(self._context, self._batch)
        if status:
            raise ModelError(f"llama.cpp could not compute {len(tokens)} tokens (status {status}): {_get_log_error()}")

    def _fill_batch(self, tokens: Sequence[InputToken]) -> None:
        """Write tokens to the batch, the C structure that llama_decode reads."""
        batch = self._batch
        for index, token in enumerate(tokens):
            batch.token[index] = token.token
            batch.pos[index] = token.position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = token.sequence
            batch.logits[index] = token.needs_output
        batch.n_tokens = len(tokens)

    def _get_logits(self, index: int) -> Vector:
        """Copy the logits of one token of the last batch."""
        pointer = self.lib.llama_get_logits_ith(self._context, index)
        if not pointer:
            raise ModelError("llama.cpp returned no probabilities of the next token. Use gguf:FILE, not llamacpp:FILE.")
        values: Vector = np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()
        # Single infinite values are fine: -inf forbids a token.
        if not np.isfinite(values).any() or np.isnan(values).any():
            raise ModelError("the model returned NaN probabilities. Download its file again: it may be damaged.")
        return values

    # --- hidden states ----------------------------------------------------------------------------

    def _get_tensor_names(self, layer: int) -> tuple[bytes, ...]:
        """Return llama.cpp's possible names for the hidden state of a layer. Layer 0 is the embeddings."""
        if layer == 0:
            return (b"embd", b"inp_embd")
        if layer == self.depth - 1:  # as in transformers, the last hidden state is taken after the final norm
            return (b"result_norm",)
        return (f"l_out-{layer - 1}".encode(),)  # llama.cpp does not count the embeddings

    def _capture(self, tensor: Any, ask: bool, _: Any) -> bool:
        """Copy the hidden states of the requested layers.

        llama.cpp calls this before and after it computes a tensor.

        Args:
            tensor: The tensor.
            ask: Whether llama.cpp asks if the values are needed.
            _: Not used.

        Returns:
            With `ask`, whether the values are needed. Otherwise True, which makes llama.cpp go on.
        """
        layers = self._captured_tensors
        layer = layers.get(self.lib.ggml_get_name(tensor)) if layers else None
        if ask:
            return layer is not None
        if layer is None:
            return True
        size = self.lib.ggml_nbytes(tensor)
        if size == 4 * self.lib.ggml_nelements(tensor):  # float32 has four bytes per value
            block = np.empty(size // 4, dtype=np.float32)
            self.lib.ggml_backend_tensor_get(tensor, block.ctypes.data, 0, size)
            self._captured_states[layer] = block.reshape(-1, self.width)
        return True

    def _get_states(self, layer: int, n_tokens: int, outputs: Sequence[int]) -> Vector:
        """Return the captured hidden states of the tokens that need output.

        Args:
            layer: The layer.
            n_tokens: Number of tokens in the batch.
            outputs: Indices in the batch of the tokens that need output.
        """
        states = self._captured_states.get(layer)
        if states is not None and len(states) == n_tokens:
            return states[list(outputs)]
        if states is not None and len(states) == len(outputs):
            return states  # for the last layers, llama.cpp computes only the tokens that need output
        raise ModelError(
            f"llama.cpp returned no hidden states of layer {layer}. Use gguf:FILE instead of llamacpp:FILE."
        )


class EngineTokenizer:
    """The tokenizer and chat template of an engine, with methods like in transformers."""

    clean_up_tokenization_spaces = False

    def __init__(self, engine: LlamaEngine):
        self._lib = engine.lib
        self._vocabulary = engine.vocabulary
        self._n_vocab = engine.n_vocab
        self.chat_template = engine.template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text, optionally with special tokens at the start."""
        data = text.encode()
        size = len(data) + 8  # a text has at most one token per byte, plus a few special tokens
        ids = (ctypes.c_int32 * size)()
        n = self._lib.llama_tokenize(self._vocabulary, data, len(data), ids, size, add_special_tokens, True)
        if n < 0:
            raise ModelError(f"llama.cpp could not tokenize a text of {len(data)} bytes. Shorten the text.")
        return list(ids[:n])

    def __call__(self, texts: Sequence[str], *, add_special_tokens: bool, **_: Any) -> dict[str, list[list[int]]]:
        """Return the token ids of many texts, in the form in which transformers returns them."""
        return {"input_ids": [self.encode(text, add_special_tokens=add_special_tokens) for text in texts]}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of tokens; an incomplete character becomes a replacement character."""
        if not tokens:
            return ""
        ids = (ctypes.c_int32 * len(tokens))(*tokens)
        size = 64 * len(tokens) + 64  # more bytes than tokens have
        text = ctypes.create_string_buffer(size)
        n = self._lib.llama_detokenize(self._vocabulary, ids, len(tokens), text, size, False, not skip_special_tokens)
        if n < 0:
            raise ModelError("llama.cpp could not convert tokens to text. Use gguf:FILE instead of llamacpp:FILE.")
        return text.raw[:n].decode(errors="replace")

    def convert_ids_to_tokens(self, tokens: Sequence[int]) -> list[str]:
        """Return tokens as they are written in the vocabulary, with '' for negative ids."""
        names = [self._lib.llama_vocab_get_text(self._vocabulary, token) if token >= 0 else b"" for token in tokens]
        return [(name or b"").decode(errors="replace") for name in names]

    @functools.cached_property
    def all_special_tokens(self) -> list[str]:
        """Control tokens, which must not occur in user text."""
        is_control = self._lib.llama_vocab_is_control
        control_tokens = [token for token in range(self._n_vocab) if is_control(self._vocabulary, token)]
        return [name for name in self.convert_ids_to_tokens(control_tokens) if name]

    @functools.cached_property
    def _compiled_template(self) -> Any:
        """The chat template, compiled in a sandbox with the options that transformers uses."""
        with require_extra("a chat template", "llamacpp"):
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            return environment.from_string(self.chat_template)
        except TemplateError as error:
            raise WeightsError(f"the GGUF file has an invalid chat template: {error}. Use another GGUF file.") from None

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], *, tokenize: bool, **values: Any) -> str:
        """Return the messages in the chat template as text. `tokenize` is ignored."""
        bos = self._lib.llama_vocab_bos(self._vocabulary)
        eos = self._lib.llama_vocab_eos(self._vocabulary)
        bos_token, eos_token = self.convert_ids_to_tokens([bos, eos])
        text = self._compiled_template.render(messages=messages, bos_token=bos_token, eos_token=eos_token, **values)
        return str(text)


def run_self_test(engine: LlamaEngine) -> float:
    """Compute a test text in one pass and again token by token, and compare the log-probabilities.

    Returns:
        The largest difference in nats. It is near 0 if llama.cpp computes correctly.
    """
    ids = EngineTokenizer(engine).encode(SELF_TEST_TEXT, add_special_tokens=True)
    engine.clear()
    tokens = [InputToken(token, position, sequence=1, needs_output=True) for position, token in enumerate(ids)]
    one_pass, _ = engine.feed(tokens)
    steps = [InputToken(token, position, sequence=2, needs_output=True) for position, token in enumerate(ids)]
    stepwise = np.stack([engine.feed([step])[0][0] for step in steps])
    engine.clear()
    # The logits after each token predict the next token, so the last row predicts nothing that is in the text.
    differences = (log_softmax(one_pass) - log_softmax(stepwise))[range(len(ids) - 1), ids[1:]]
    return float(np.abs(differences).max())


def check_engine(engine: LlamaEngine, file: Path) -> None:
    """Run the engine's self-test; raises ModelError if llama.cpp computes wrong results on this machine."""
    difference = run_self_test(engine)
    if not difference <= SELF_TEST_TOLERANCE:  # also true if the difference is NaN
        raise ModelError(
            f"llama.cpp computes wrong log-probabilities for '{file}' on this machine. Batched and single tokens differ by "
            f"{difference:.2f} nats. Use gguf:{file}, or another release of xllamacpp."
        )


def log_softmax(logits: Vector) -> NDArray[np.float32]:
    """Return log-probabilities along the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def count_usable_cores() -> int:
    """Return the number of usable cores. OMP_NUM_THREADS overrides the number."""
    override = os.environ.get("OMP_NUM_THREADS", "")
    if override.isdigit() and int(override):
        return int(override)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _make_open_error(file: Path) -> WeightsError:
    """Return the error for a file that llama.cpp cannot open."""
    return WeightsError(
        f"llama.cpp cannot open '{file}': {_get_log_error()}. Check that it is a GGUF file. If llama.cpp does not know "
        "its architecture, run it with transformers: gguf:FILE."
    )


def _get_log_error() -> str:
    """Return the first error logged by llama.cpp. It usually names the cause."""
    if not bindings.logged_errors:
        return "no reason given"
    function, _, message = bindings.logged_errors[0].partition(": ")  # the line may begin with the name of a C function
    return (message or function).rstrip(".")
