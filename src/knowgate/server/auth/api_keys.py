"""API keys: kept as hashes in a file, compared in constant time. A key is shown once, when it is made.

Keys are 256 random bits, so one round of SHA-256 is enough: there is nothing to guess from.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from knowgate.core.files import write_json
from knowgate.core.schema import NumberRange, read_record
from knowgate.core.validation import parse_json, read_text
from knowgate.errors import ArtifactError, BadInput, BadSetting

KEY_PREFIX = "kg-"
MAX_KEY_FILE_BYTES = 1 << 20  # bytes of a file of keys


@dataclass(frozen=True)
class ApiKey:
    """What is kept of a key. rate: requests a minute; budget: tokens a day (UTC); None: as many as there are."""

    name: str
    hash: str
    created: float
    rate: Annotated[int, NumberRange(1)] | None = None
    budget: Annotated[int, NumberRange(1)] | None = None


@dataclass(frozen=True)
class KeyFile:
    keys: tuple[ApiKey, ...] = ()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """None where there is no file yet."""
    if not path.exists():
        return ()
    try:
        value = parse_json(read_text(path, maximum=MAX_KEY_FILE_BYTES), f"the keys in '{path}'")
        return read_record(KeyFile, value, f"the keys in '{path}'").keys
    except BadInput as error:
        raise ArtifactError(str(error)) from None


def add_key(path: Path, name: str, *, rate: int | None = None, budget: int | None = None) -> str:
    """A new key; it can be read here and nowhere else."""
    there = read_keys(path)
    if not name.strip() or len(name) > 100:
        raise BadSetting("a key needs a name of 1 to 100 characters: who is it for?")
    if name in {key.name for key in there}:
        raise BadSetting(f"there is a key '{name}' already. Revoke it first: knowgate keys revoke '{name}'")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    _write(path, (*there, ApiKey(name, hash_key(key), time.time(), rate, budget)))
    return key


def revoke_key(path: Path, name: str) -> None:
    there = read_keys(path)
    left = tuple(key for key in there if key.name != name)
    if len(left) == len(there):
        known = ", ".join(key.name for key in there) or "none"
        raise BadSetting(f"there is no key '{name}'. Known: {known}.")
    _write(path, left)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def match_key(keys: tuple[ApiKey, ...], given: str) -> ApiKey | None:
    """Which key it is; None for nobody's. All keys are looked at, so that time tells nothing."""
    hashed, found = hash_key(given), None
    for key in keys:
        if hmac.compare_digest(key.hash, hashed):
            found = key
    return found


def _write(path: Path, keys: tuple[ApiKey, ...]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"keys": [asdict(key) for key in keys]})
    path.chmod(0o600)
