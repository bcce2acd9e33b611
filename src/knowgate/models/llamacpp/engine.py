"""A GGUF model run by llama.cpp in this process: tokens in rows go in, logits and hidden states come out.

All rows share one memory of keys and values; what is common to several is copied between rows by reference. Knows
tokens and rows; not prompts, answers or what is done with the logits.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from knowgate.core.files import cache_dir, sha256_file, sha256_text, write_text
from knowgate.errors import MissingExtra, ModelError, WeightsError
from knowgate.models.llamacpp.bindings import (
    CALLBACK_OFFSET,
    EVAL_CALLBACK_TYPE,
    OUTPUTS_PER_SEQUENCE_OFFSET,
    check_params_layout,
    load_library,
    log_callback,
    logged_errors,
)
from knowgate.models.tokenization import escape_special_tokens
from knowgate.types import Vector

MAX_CELLS = 8_192  # tokens that all rows together can hold; memory is taken for them at the start
MAX_SEQUENCES = 67  # side by side; the first ones hold what prompts begin with
BATCH_TOKENS = 512  # tokens computed together
SELF_TEST_TEXT = "The Eiffel Tower stands in Paris, the capital of France, and was built in 1889."
SELF_TEST_TOLERANCE = 0.1  # nats; what float order and quantised activations come to is below 0.05


@dataclass(frozen=True)
class InputToken:
    """One token of a row. wanted: its logits, and its states where layers are."""

    token: int
    position: int
    row: int
    wanted: bool = False


@dataclass
class CapturedStates:
    """What the eval callback takes down while tokens are computed: layer -> states of all tokens, or of wanted ones."""

    names: dict[bytes, int] = field(default_factory=dict)
    states: dict[int, Vector] = field(default_factory=dict)


class LlamaEngine:
    """The model in `file`, loaded. For one thread at a time. Layers are numbered as transformers does: 0 embeddings."""

    def __init__(self, file: Path):
        self._lib = lib = load_library()
        logged_errors.clear()
        lib.llama_log_set(log_callback, None)  # a server of xllamacpp in this process listens instead
        self._model = lib.llama_model_load_from_file(os.fsencode(file), lib.llama_model_default_params())
        if not self._model:
            raise _cannot_open(file)
        if lib.llama_model_has_encoder(self._model) or lib.llama_model_is_recurrent(self._model):
            raise WeightsError(f"'{file}' is no decoder with attention; llamacpp: runs only those. Use another model.")
        self.vocabulary = lib.llama_model_get_vocab(self._model)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self.vocabulary))
        self.width, self.depth = int(lib.llama_model_n_embd(self._model)), int(lib.llama_model_n_layer(self._model)) + 1
        self.cells = min(MAX_CELLS, int(lib.llama_model_n_ctx_train(self._model)))
        self._seen = CapturedStates()
        self._see = EVAL_CALLBACK_TYPE(self._look)  # kept: llama.cpp holds a pointer to it
        self._context = self._new_context(file)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = lib.llama_batch_init(BATCH_TOKENS, 0, 1)
        self.filled: set[int] = set()  # rows that hold tokens
        self.times_cleared = 0

    @property
    def template(self) -> str:
        """The chat template, as Jinja; '' where there is none."""
        return str((self._lib.llama_model_chat_template(self._model, None) or b"").decode())

    def _new_context(self, file: Path) -> Any:
        lib, settings = self._lib, self._lib.llama_context_default_params()
        unified = check_params_layout(bytes(settings.bytes))
        struct.pack_into("<4I", settings.bytes, 0, self.cells, BATCH_TOKENS, BATCH_TOKENS, MAX_SEQUENCES)
        struct.pack_into("<I", settings.bytes, OUTPUTS_PER_SEQUENCE_OFFSET, 0)
        struct.pack_into("<Q", settings.bytes, CALLBACK_OFFSET, ctypes.cast(self._see, ctypes.c_void_p).value or 0)
        settings.bytes[unified] = 1
        context = lib.llama_init_from_model(self._model, settings)
        if not context:
            raise _cannot_open(file)
        shapes = [
            int(f(context)) for f in (lib.llama_n_ctx, lib.llama_n_ctx_seq, lib.llama_n_batch, lib.llama_n_seq_max)
        ]
        if not (shapes[0] == shapes[1] >= self.cells and shapes[2:] == [BATCH_TOKENS, MAX_SEQUENCES]):
            raise ModelError(f"llama.cpp took other settings than it was given ({shapes}); use gguf:FILE instead.")
        cores = count_usable_cores()
        lib.llama_set_n_threads(context, cores, cores)
        return context

    # --- tokens -----------------------------------------------------------------------------------

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        """special: with what the model wants at the beginning of a text."""
        raw = text.encode()
        room = len(raw) + 8
        ids = (ctypes.c_int32 * room)()
        n = self._lib.llama_tokenize(self.vocabulary, raw, len(raw), ids, room, special, True)
        if n < 0:
            raise ModelError(f"llama.cpp could not tokenize a text of {len(raw)} bytes.")
        return list(ids[:n])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of tokens; a character that is cut off in the middle is a replacement character."""
        given, room = (ctypes.c_int32 * len(ids))(*ids), 64 * len(ids) + 64
        text = ctypes.create_string_buffer(room)
        arguments = (self.vocabulary, given, len(ids), text, room, False, not skip_special_tokens)
        n = self._lib.llama_detokenize(*arguments)
        if n < 0:
            raise ModelError("llama.cpp could not write out the tokens of an answer.")
        return text.raw[:n].decode(errors="replace")

    def ends(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_eog(self.vocabulary, token))

    def special(self, token: int) -> bool:
        return bool(self._lib.llama_vocab_is_control(self.vocabulary, token))

    def spelling(self, token: int) -> str:
        """A token as it stands in the vocabulary."""
        return str((self._lib.llama_vocab_get_text(self.vocabulary, token) or b"").decode(errors="replace"))

    @property
    def bos(self) -> str:
        return self._named(self._lib.llama_vocab_bos(self.vocabulary))

    @property
    def eos(self) -> str:
        return self._named(self._lib.llama_vocab_eos(self.vocabulary))

    def _named(self, token: int) -> str:
        """A token that a vocabulary may lack."""
        return self.spelling(token) if token >= 0 else ""

    # --- rows -------------------------------------------------------------------------------------

    def clear(self) -> None:
        self._lib.llama_memory_clear(self._memory, False)
        self.filled.clear()
        self.times_cleared += 1

    def copy(self, source: int, target: int, length: int) -> None:
        """The first tokens of a row in another, too."""
        self._lib.llama_memory_seq_cp(self._memory, source, target, 0, length)
        self.filled.add(target)

    def cut(self, row: int, length: int = 0) -> None:
        """Keep so many tokens of a row."""
        self._lib.llama_memory_seq_rm(self._memory, row, length, -1)
        if not length:
            self.filled.discard(row)

    def feed(self, tokens: Sequence[InputToken], layers: Sequence[int] = ()) -> tuple[Vector, dict[int, Vector]]:
        """Logits of the wanted tokens, in their order, and their states by layer."""
        logits: list[Vector] = []
        states: dict[int, list[Vector]] = {layer: [] for layer in layers}
        for start in range(0, len(tokens), BATCH_TOKENS):
            part = tokens[start : start + BATCH_TOKENS]
            self._compute(part, layers)
            places = [place for place, one in enumerate(part) if one.wanted]
            logits += [self._logits(place) for place in places]
            for layer in layers if places else ():
                states[layer].append(self._rows(layer, len(part), places))
        found = {layer: np.concatenate(blocks) for layer, blocks in states.items() if blocks}
        return np.stack(logits) if logits else np.empty((0, self.n_vocab), dtype=np.float32), found

    def _compute(self, part: Sequence[InputToken], layers: Sequence[int]) -> None:
        batch = self._batch
        for place, one in enumerate(part):
            batch.token[place], batch.pos[place] = one.token, one.position
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, one.row
            batch.logits[place] = one.wanted
        batch.n_tokens = len(part)
        self.filled.update(one.row for one in part)
        self._seen.names = {name: layer for layer in layers for name in self._tensors(layer)}
        self._seen.states = {}
        status = self._lib.llama_decode(self._context, batch)
        if status:
            raise ModelError(f"llama.cpp could not compute {len(part)} tokens (status {status}): {_complaint()}")

    def _logits(self, place: int) -> Vector:
        pointer = self._lib.llama_get_logits_ith(self._context, place)
        if not pointer:
            raise ModelError("llama.cpp gave no logits where they were asked for.")
        values: Vector = np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()
        if not np.isfinite(values).any() or np.isnan(values).any():
            raise ModelError("the model gave NaN instead of token probabilities: its weights are bad.")
        return values

    # --- hidden states ----------------------------------------------------------------------------

    def _tensors(self, layer: int) -> tuple[bytes, ...]:
        """What llama.cpp calls it; the last of several counts. transformers' last one is behind the final norm."""
        if layer == self.depth - 1:
            return (b"result_norm",)
        return (f"l_out-{layer - 1}".encode(),) if layer else (b"embd", b"inp_embd")

    def _look(self, tensor: Any, ask: bool, _: Any) -> bool:
        """Called by llama.cpp for every tensor: first whether it is wanted, then with its values."""
        if not self._seen.names:
            return not ask
        layer = self._seen.names.get(self._lib.ggml_get_name(tensor))
        if ask or layer is None:
            return layer is not None or not ask
        size = self._lib.ggml_nbytes(tensor)
        if size == 4 * self._lib.ggml_nelements(tensor):
            block = np.empty(size // 4, dtype=np.float32)
            self._lib.ggml_backend_tensor_get(tensor, block.ctypes.data, 0, size)
            self._seen.states[layer] = block.reshape(-1, self.width)
        return True

    def _rows(self, layer: int, n_tokens: int, places: Sequence[int]) -> Vector:
        """The last layers are computed for wanted tokens alone."""
        block = self._seen.states.get(layer)
        if block is None or len(block) not in (n_tokens, len(places)):
            raise ModelError(f"llama.cpp did not give the hidden states of layer {layer} of this model.")
        rows: Vector = block[list(places)] if len(block) == n_tokens else block
        return rows

    # --- is it right? -----------------------------------------------------------------------------

    def self_test(self) -> float:
        """The largest difference, in nats, between log-probabilities from one pass and token by token."""
        ids = self.tokenize(SELF_TEST_TEXT, special=True)
        self.clear()
        together, _ = self.feed([InputToken(token, place, 1, wanted=True) for place, token in enumerate(ids)])
        single = [self.feed([InputToken(token, place, 2, wanted=True)])[0][0] for place, token in enumerate(ids)]
        self.clear()
        following = ids[1:]
        pairs = zip(log_softmax(together)[:-1], log_softmax(np.stack(single))[:-1], following, strict=True)
        return max(abs(float(one[token] - other[token])) for one, other, token in pairs)


def check_engine(engine: LlamaEngine, file: Path) -> None:
    """A runtime whose two ways of computing the same differ is wrong in one of them."""
    if not (off := engine.self_test()) <= SELF_TEST_TOLERANCE:
        raise ModelError(
            f"llama.cpp computes '{file}' wrongly here: log-probabilities from one pass and token by token differ by "
            f"{off:.2f} nats (allowed: {SELF_TEST_TOLERANCE}). Use gguf:{file}, or another release of xllamacpp."
        )


def log_softmax(logits: Vector) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float32] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def count_usable_cores() -> int:
    """As many as this process may use; OMP_NUM_THREADS has a say, as it has for torch."""
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named):
        return int(named)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cannot_open(file: Path) -> WeightsError:
    return WeightsError(
        f"llama.cpp cannot open '{file}': {_complaint()}. It must be a GGUF file of an architecture that it knows; "
        "transformers may know others: gguf:FILE."
    )


def _complaint() -> str:
    """The most telling of what it said: the first line names the cause, those after it who noticed."""
    said = [line.partition(": ")[2] or line for line in logged_errors]
    return said[0].rstrip(".") if said else "it does not say why"


class EngineTokenizer:
    """What `GrowingText` and rendering need of a tokenizer."""

    clean_up_tokenization_spaces = False

    def __init__(self, engine: LlamaEngine):
        self._engine = engine
        self.template = engine.template

    @functools.cached_property
    def specials(self) -> list[str]:
        """Tokens that stand for no text: what somebody wrote must not become one."""
        numbers = range(self._engine.n_vocab)
        return [text for n in numbers if self._engine.special(n) and (text := self._engine.spelling(n))]

    @functools.cached_property
    def _template(self) -> Any:
        """As transformers runs it: in a sandbox, with lines of tags leaving no trace."""
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ModuleNotFoundError:
            raise MissingExtra("a chat template", "llamacpp") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            return environment.from_string(self.template)
        except TemplateError as error:
            raise WeightsError(f"the chat template of the GGUF file cannot be read: {error}.") from None

    def render(self, text: str) -> str:
        """The text as a user turn, up to where the answer begins. Models without a chat template get it bare."""
        if not self.template:
            return text
        turn = [{"role": "user", "content": escape_special_tokens(text, self.specials)}]
        named = {"bos_token": self._engine.bos, "eos_token": self._engine.eos}
        return str(self._template.render(messages=turn, add_generation_prompt=True, **named))

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return self._engine.decode(tokens, skip_special_tokens=skip_special_tokens) if tokens else ""

    def convert_ids_to_tokens(self, tokens: Sequence[int]) -> list[str]:
        return [self._engine.spelling(token) for token in tokens]


def compute_file_digest(file: Path) -> str:
    """sha256 of the file, remembered by path, size and time: hashing a gigabyte at every start would be slow."""
    stat = file.stat()
    note = cache_dir() / "digests" / sha256_text(f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}")
    if note.is_file() and re.fullmatch(r"[0-9a-f]{64}", said := note.read_text(encoding="ascii")):
        return said
    found = sha256_file(file)
    write_text(note, found)
    return found
