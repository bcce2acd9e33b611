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
    plug_in: bool = False
    threshold: float | None = None
    docs: Path | None = None
    index: str | None = None
    retriever: str | None = None
    rerank: str | None = None
    rerank_margin: float | None = None
    preset: str | None = None
    beta: float | None = None
    second_look: str | None = None
    k: int = 3
    max_tokens: int = 32
    lang: str | None = None
    prompts: Path | None = None


def load_settings(config: str | Path | None = None, **flags: Any) -> Settings:
    """Flags that were given override the file, which overrides the defaults."""
    values = {**_read(config), **{key: value for key, value in flags.items() if value is not None}}
    empty = [key for key, value in values.items() if value == ""]
    if empty:
        raise BadSetting(f"setting '{empty[0]}' is empty: give it a value or leave it out.")
    try:
        return Settings(**values)
    except ValidationError as error:
        raise BadSetting(_explain(error)) from None


def _read(config: str | Path | None) -> dict[str, Any]:
    if config is None and not FILE.is_file():
        return {}
    path = Path(config) if config is not None else FILE
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadSetting(f"cannot read the config file '{path}': {error.strerror}.") from None
    except ValueError as error:  # not UTF-8, or not TOML
        raise BadSetting(f"the config file '{path}' is not valid TOML: {error}.") from None
    unknown = sorted(set(values) - set(Settings.model_fields))
    if unknown:
        raise BadSetting(f"{path}: unknown key '{unknown[0]}'. Known: {', '.join(Settings.model_fields)}.")
    return values


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"setting '{'.'.join(map(str, first['loc']))}' is {first['input']!r}: {first['msg'].lower()}."
