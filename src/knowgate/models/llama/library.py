"""The C interface of llama.cpp, as the package xllamacpp exports it on Linux and macOS. Knows memory layouts; no model.

Settings travel as whole structures whose layout changes between releases of llama.cpp. So the defaults that the library
itself gives are compared with those known here before any of them is used: a release that lays them out otherwise is
refused, not run.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import struct
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path
from typing import Any

from knowgate.errors import MissingExtra, NotOffered

log = logging.getLogger(__name__)
TRIED = "2026.10"  # of xllamacpp
# n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq, n_threads, n_threads_batch
FIRST = (512, 2048, 512, 1, 0, 0, 1, 4, 4)
OUTPUTS_EACH, CALLBACK, TYPES = 24, 88, 104  # offsets in bytes: of n_outputs_max_per_seq, cb_eval and type_k
# embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified, one byte each, after type_k and some pointers
SWITCHES, UNIFIED = bytes((0, 1, 1, 1, 1, 0)), 5
ERROR, CONTINUED = 4, 5  # levels of its log
SEE = ctypes.CFUNCTYPE(c_bool, c_void_p, c_bool, c_void_p)
SAY = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)


class Settings(ctypes.Structure):
    """Larger than any settings of llama.cpp: what is beyond its own is not looked at, by registers or by stack."""

    _fields_ = (("bytes", ctypes.c_uint8 * 512),)


class Tokens(ctypes.Structure):
    """`llama_batch`: tokens with their positions, rows and whether their logits are wanted."""

    _fields_ = (
        ("n_tokens", c_int32),
        ("token", POINTER(c_int32)),
        ("embd", POINTER(c_float)),
        ("pos", POINTER(c_int32)),
        ("n_seq_id", POINTER(c_int32)),
        ("seq_id", POINTER(POINTER(c_int32))),
        ("logits", POINTER(c_int8)),
    )


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "llama_context_default_params": (Settings, ()),
    "llama_model_default_params": (Settings, ()),
    "llama_log_set": (None, (SAY, c_void_p)),
    "llama_backend_init": (None, ()),
    "llama_model_load_from_file": (c_void_p, (c_char_p, Settings)),
    "llama_model_free": (None, (c_void_p,)),
    "llama_init_from_model": (c_void_p, (c_void_p, Settings)),
    "llama_free": (None, (c_void_p,)),
    "llama_set_n_threads": (None, (c_void_p, c_int32, c_int32)),
    "llama_n_ctx": (c_uint32, (c_void_p,)),
    "llama_n_ctx_seq": (c_uint32, (c_void_p,)),
    "llama_n_batch": (c_uint32, (c_void_p,)),
    "llama_n_ubatch": (c_uint32, (c_void_p,)),
    "llama_n_seq_max": (c_uint32, (c_void_p,)),
    "llama_model_n_ctx_train": (c_int32, (c_void_p,)),
    "llama_model_n_embd": (c_int32, (c_void_p,)),
    "llama_model_n_layer": (c_int32, (c_void_p,)),
    "llama_model_has_encoder": (c_bool, (c_void_p,)),
    "llama_model_is_recurrent": (c_bool, (c_void_p,)),
    "llama_model_is_hybrid": (c_bool, (c_void_p,)),
    "llama_model_chat_template": (c_char_p, (c_void_p, c_char_p)),
    "llama_model_get_vocab": (c_void_p, (c_void_p,)),
    "llama_vocab_n_tokens": (c_int32, (c_void_p,)),
    "llama_vocab_bos": (c_int32, (c_void_p,)),
    "llama_vocab_eos": (c_int32, (c_void_p,)),
    "llama_vocab_get_text": (c_char_p, (c_void_p, c_int32)),
    "llama_vocab_is_eog": (c_bool, (c_void_p, c_int32)),
    "llama_vocab_is_control": (c_bool, (c_void_p, c_int32)),
    "llama_tokenize": (c_int32, (c_void_p, c_char_p, c_int32, POINTER(c_int32), c_int32, c_bool, c_bool)),
    "llama_detokenize": (c_int32, (c_void_p, POINTER(c_int32), c_int32, c_char_p, c_int32, c_bool, c_bool)),
    "llama_batch_init": (Tokens, (c_int32, c_int32, c_int32)),
    "llama_batch_free": (None, (Tokens,)),
    "llama_decode": (c_int32, (c_void_p, Tokens)),
    "llama_get_logits_ith": (POINTER(c_float), (c_void_p, c_int32)),
    "llama_get_memory": (c_void_p, (c_void_p,)),
    "llama_memory_clear": (None, (c_void_p, c_bool)),
    "llama_memory_seq_rm": (c_bool, (c_void_p, c_int32, c_int32, c_int32)),
    "llama_memory_seq_cp": (None, (c_void_p, c_int32, c_int32, c_int32, c_int32)),
    "ggml_get_name": (c_char_p, (c_void_p,)),
    "ggml_nelements": (ctypes.c_int64, (c_void_p,)),
    "ggml_nbytes": (c_size_t, (c_void_p,)),
    "ggml_backend_tensor_get": (None, (c_void_p, c_void_p, c_size_t, c_size_t)),
}


@functools.cache
def library() -> Any:
    """The functions of llama.cpp, found to be laid out as they are known here."""
    loaded = ctypes.CDLL(str(_file()))
    for name, (result, arguments) in SIGNATURES.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise _other(f"it has no {name}") from None
        function.restype, function.argtypes = result, arguments
    check_layout(bytes(loaded.llama_context_default_params().bytes))
    loaded.llama_log_set(hear, None)
    loaded.llama_backend_init()
    return loaded


def _file() -> Path:
    try:
        import xllamacpp
    except ModuleNotFoundError:
        raise MissingExtra("llamacpp:FILE.gguf", "llamacpp") from None
    found = [*Path(str(xllamacpp.__file__)).parent.glob("*.so")]
    if not found:  # on Windows, nothing is exported
        raise _other("its library exports no functions on this system")
    return found[0]


def check_layout(defaults: bytes) -> int:
    """Where `kv_unified` is; an error unless all defaults are where they are expected."""
    place = defaults.find(SWITCHES, TYPES + 8)
    known = struct.unpack_from("<9i", defaults) == FIRST and struct.unpack_from("<2i", defaults, TYPES) == (1, 1)
    empty = not any(defaults[CALLBACK : CALLBACK + 16])
    if not (known and empty and TYPES + 8 <= place <= TYPES + 64 and not any(defaults[TYPES + 8 : place])):
        raise _other("its settings are laid out in another way")
    return place + UNIFIED


def _other(problem: str) -> NotOffered:
    return NotOffered(
        f"this release of xllamacpp cannot be run in-process: {problem}. Install one of {TRIED} (pip install "
        f"'xllamacpp>={TRIED},<{TRIED}.99999'), or use gguf:FILE."
    )


heard: list[str] = []  # what llama.cpp complained of since the list was emptied


def _hear(level: int, text: bytes, _: Any) -> None:
    """Its log: complaints are kept, so that an error can say why; the rest is for nobody."""
    if level == ERROR:
        heard.append(text.decode(errors="replace").strip())


hear = SAY(_hear)  # kept: llama.cpp holds a pointer to it
