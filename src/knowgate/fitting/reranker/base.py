"""Cross-encoders to start from: any by name or folder, or one made from the packaged MiniLM weights.

Knows how they are opened, cut to length and saved; not what they are trained on.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from knowgate import weights
from knowgate.errors import MissingExtra, ModelError, WeightsError
from knowgate.fitting.reranker.training import PASSAGE_TOKENS, QUERY_TOKENS
from knowgate.rerank import KEPT, check_files

MINILM = "minilm"
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "vocab.txt")
SPECIAL = 4  # tokens that frame a pair, at most
PORTION = 1_000  # texts cut at once


def open_cross_encoder(spec: str, *, seed: int = 0, device: str | None = None) -> Any:
    """A sentence-transformers CrossEncoder with one score, its input no longer than the paper's limits."""
    if spec == MINILM:
        return _from_minilm(seed, device)
    if not Path(spec).is_dir() and "/" not in spec:
        raise WeightsError(f"the base '{spec}' is neither a folder nor a hub name (owner/model) nor '{MINILM}'.")
    return _limited(_load(spec, device, spec))


def _from_minilm(seed: int, device: str | None) -> Any:
    """MiniLM's encoder with a new head for one score: it ranks nothing until it is trained."""
    source = weights.fetch(MINILM)
    with tempfile.TemporaryDirectory() as scratch:
        # the folder is a sentence embedder's; without its modules.json it is a plain encoder
        for name in NEEDED:
            _put(source / name, Path(scratch) / name)
        _seed(seed)
        return _limited(_load(scratch, device, MINILM, num_labels=1, max_length=PASSAGE_TOKENS))


def _put(source: Path, target: Path) -> None:
    """A link where the system allows one, else a copy."""
    try:
        target.symlink_to(source)
    except OSError:  # Windows asks for a privilege
        shutil.copyfile(source, target)


def _load(path: str, device: str | None, name: str, **options: Any) -> Any:
    try:
        from sentence_transformers import CrossEncoder
        from transformers.utils import logging
    except ModuleNotFoundError as error:
        raise MissingExtra("a cross-encoder", "train") from error
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list the new head's weights
    logging.disable_progress_bar()
    if Path(path).is_dir():
        check_files(path)
    try:
        safe = {"use_safetensors": True}
        model = CrossEncoder(path, device=device, local_files_only=Path(path).is_dir(), model_kwargs=safe, **options)
    except (OSError, ValueError, KeyError) as error:
        raise WeightsError(
            f"the cross-encoder '{name}' cannot be loaded: {error}. Give '{MINILM}', a folder or a hub name."
        ) from error
    finally:
        logging.set_verbosity(level)
    if model.num_labels != 1:
        raise ModelError(f"the cross-encoder '{name}' gives {model.num_labels} scores a pair; one is needed.")
    return model


def _limited(model: Any) -> Any:
    """Pairs are cut to the paper's 128 + 512 tokens, or to what the model reads if that is less."""
    longest = QUERY_TOKENS + PASSAGE_TOKENS + SPECIAL
    model.max_seq_length = min(model.max_seq_length or longest, longest)
    return model


def _seed(seed: int) -> None:
    import torch

    torch.manual_seed(seed)


def cut_texts(model: Any, texts: Sequence[str], limit: int) -> list[str]:
    """Texts of at most `limit` tokens; shorter ones stay as they are."""
    cut: list[str] = []
    for start in range(0, len(texts), PORTION):
        part = list(texts[start : start + PORTION])
        encoded = model.tokenizer(part, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        cut += [
            text if len(offsets) <= limit else text[: offsets[limit - 1][1]]
            for text, offsets in zip(part, encoded["offset_mapping"], strict=True)
        ]
    return cut


def save_cross_encoder(model: Any, folder: Path) -> None:
    """Config, tokenizer and safetensors; no card of its own, nothing that runs code."""
    model.save_pretrained(str(folder), create_model_card=False, safe_serialization=True)
    for path in folder.rglob("*"):
        if path.is_file() and path.suffix not in KEPT:
            path.unlink()
