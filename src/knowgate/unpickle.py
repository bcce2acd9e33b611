"""A pickle of tensors becomes safetensors in a folder that sentence-transformers can load. Knows no names."""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import save

from knowgate.doors import read_json
from knowgate.errors import WeightsError

POOLING = {  # m3e comes without: the mean of the last layer, as its config says (last_mean)
    "modules.json": """[
  {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
  {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
]
""",
    "1_Pooling/config.json": '{"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": true}\n',
}


def convert(source: Path, target: Path) -> None:
    """Tensors out of a pickle by the loader that makes nothing else, and the pickle away."""
    import torch

    try:
        tensors = torch.load(source, map_location="cpu", weights_only=True)
        arrays = {name: tensor.contiguous().numpy() for name, tensor in tensors.items()}
    except Exception as error:  # noqa: BLE001 - whatever it is, it was not a table of tensors
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise WeightsError(f"{source.name} holds more than tensors ({reason}); nothing was kept.") from None
    target.write_bytes(save(arrays, metadata={"format": "pt"}))
    source.unlink()
    _add_pooling(target.parent)


def _add_pooling(folder: Path) -> None:
    """What sentence-transformers would otherwise guess, aloud."""
    width = read_json(folder / "config.json")["hidden_size"]
    for name, text in POOLING.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text.replace("WIDTH", str(width)), encoding="utf-8", newline="\n")
