"""Settings of `ask` and `decide`: built-in defaults, then `knowgate.toml`, then flags."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from knowgate.errors import BadSetting
from knowgate.gates import DEFAULT

FILE = Path("knowgate.toml")


class Settings(BaseModel):
    """Every key of `knowgate.toml`, with its default."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "smollm"
    gate: str = DEFAULT
    threshold: float | None = None
    docs: Path | None = None
    index: str | None = None
    retriever: str | None = None
    rerank: str | None = None
    k: int = 3
    max_tokens: int = 32
    lang: str | None = None
    prompts: Path | None = None


def load_settings(config: Path | None, **flags: Any) -> Settings:
    """Flags that were given override the file, which overrides the defaults."""
    values = {**_read(config), **{key: value for key, value in flags.items() if value is not None}}
    try:
        return Settings(**values)
    except ValidationError as error:
        raise BadSetting(_explain(error)) from None


def _read(config: Path | None) -> dict[str, Any]:
    path = config or FILE
    if config is None and not path.is_file():
        return {}
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadSetting(f"cannot read the config file {path}: {error}.") from None
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        raise BadSetting(f"{path}: unknown key '{unknown[0]}'. Known: {', '.join(Settings.model_fields)}.")
    return values


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"setting '{'.'.join(map(str, first['loc']))}' is {first['input']!r}: {first['msg'].lower()}."
