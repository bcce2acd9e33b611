"""API keys, which are stored as hashes in a JSON file and compared in constant time.

A key has 256 random bits, so it cannot be guessed from its hash. That is why one round of SHA-256 is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from knowgate.core.files import file_lock, write_json
from knowgate.core.options import describe_requirement
from knowgate.core.validation import parse_json, read_text
from knowgate.errors import ArtifactError, BadInput, BadSetting

KEY_PREFIX = "kg-"
MAX_KEY_FILE_BYTES = 1 << 20


class ApiKey(BaseModel):
    """A stored API key.

    Attributes:
        name: Person or application that the key is for.
        hash: SHA-256 hash of the key.
        created: When the key was created, in seconds since 1970.
        rate: Maximum requests per minute. None means no limit.
        admin: Whether the key may see and delete the data of all keys.
    """

    model_config = ConfigDict(frozen=True, strict=True)  # other fields, written by earlier versions, are ignored

    name: str
    hash: str
    created: float
    rate: int | None = Field(default=None, ge=1)
    admin: bool = False


class KeyFile(BaseModel):
    """Content of the JSON file that stores API keys."""

    keys: tuple[ApiKey, ...] = ()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a file of API keys. Returns no keys if the file does not exist.

    Raises:
        ArtifactError: The file cannot be read or is not a file of API keys.
    """
    if not path.exists():
        return ()
    try:
        return KeyFile.model_validate(parse_json(read_text(path, maximum=MAX_KEY_FILE_BYTES), f"'{path}'")).keys
    except BadInput as error:
        raise ArtifactError(str(error)) from None
    except ValidationError as error:
        detail = error.errors()[0]
        location = ".".join(map(str, detail["loc"]))
        message = f"'{path}' is not a file of API keys: {location}: {describe_requirement(detail)}."
        raise ArtifactError(message) from None


def add_key(path: Path, name: str, *, rate: int | None = None, admin: bool = False) -> str:
    """Create an API key and store its hash.

    Args:
        path: File of keys. It is created if it does not exist.
        name: Person or application that the key is for, unique in the file.
        rate: Maximum requests per minute. None means no limit.
        admin: Whether the key may see and delete the data of all keys.

    Returns:
        The key. Only its hash is stored, so the key cannot be recovered later.

    Raises:
        BadSetting: The name is blank, too long, has characters other than printable ASCII or spaces at its ends, or is already
            in the file.
    """
    # Letters of other alphabets can look like ASCII letters, so that two names could not be told apart.
    if name != name.strip() or not 0 < len(name) <= 100 or not name.isascii() or not name.isprintable():
        raise BadSetting(
            "the name of an API key must have 1 to 100 printable ASCII characters, without spaces at its ends. Name the "
            "person or application that uses the key."
        )
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    stored = ApiKey(name=name, hash=hash_key(key), created=time.time(), rate=rate, admin=admin)
    with _lock_keys(path):
        keys = read_keys(path)
        if name in {key.name for key in keys}:
            raise BadSetting(
                f"an API key named '{name}' already exists. Revoke it first: knowgate keys revoke '{name}'"
            )
        _write_keys(path, [*keys, stored])
    return key


def revoke_key(path: Path, name: str) -> None:
    """Delete an API key from the file. Running servers reject it from then on.

    Raises:
        BadSetting: There is no key with this name.
    """
    with _lock_keys(path):
        keys = read_keys(path)
        remaining = [key for key in keys if key.name != name]
        if len(remaining) == len(keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise BadSetting(f"there is no API key named '{name}'. Known names: {known}.")
        _write_keys(path, remaining)


def hash_key(key: str) -> str:
    """Return the SHA-256 hash of an API key, as hexadecimal digits."""
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def match_key(keys: Sequence[ApiKey], candidate: str) -> ApiKey | None:
    """Return the stored key with the hash of the candidate, or None. The duration reveals nothing about the keys."""
    candidate_hash, match = hash_key(candidate), None
    for key in keys:
        if hmac.compare_digest(key.hash, candidate_hash):
            match = key
    return match


def _lock_keys(path: Path) -> AbstractContextManager[None]:
    """Lock the file of keys while it is changed, so that two commands at once do not undo each other."""
    lock = path.with_name(f"{path.name}.lock")
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock.touch(mode=0o600)
    return file_lock(lock)


def _write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Write the file of keys, and allow only its owner to read it."""
    write_json(path, {"keys": [key.model_dump() for key in keys]}, mode=0o600)
