"""API keys: stored as hashes in a JSON file and compared in constant time.

A key has 256 random bits, so a single round of SHA-256 is enough: it cannot be guessed from its hash.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from knowgate.core.files import write_json
from knowgate.core.options import describe_requirement
from knowgate.core.validation import parse_json, read_text
from knowgate.errors import ArtifactError, BadInput, BadSetting

KEY_PREFIX = "kg-"
MAX_KEY_FILE_BYTES = 1 << 20


class ApiKey(BaseModel):
    """A stored API key: its owner, its hash, and how many requests per minute it allows (None: unlimited)."""

    model_config = ConfigDict(frozen=True, strict=True)  # other fields, written by earlier versions, are ignored

    name: str
    hash: str
    created: float
    rate: int | None = Field(default=None, ge=1)


class KeyFile(BaseModel):
    """Content of a file of API keys."""

    keys: tuple[ApiKey, ...] = ()


def read_keys(path: Path) -> tuple[ApiKey, ...]:
    """Read a file of API keys; a file that does not exist holds none.

    Raises:
        ArtifactError: The file is not a valid file of keys.
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
        raise ArtifactError(
            f"'{path}' is not a file of API keys: {location}: {describe_requirement(detail)}."
        ) from None


def add_key(path: Path, name: str, *, rate: int | None = None) -> str:
    """Create an API key and store its hash.

    Args:
        path: File of keys; created if it does not exist.
        name: Owner of the key, unique in the file.
        rate: Requests per minute; None for no limit.

    Returns:
        The key. It cannot be recovered later.
    """
    keys = read_keys(path)
    if not name.strip() or len(name) > 100:
        raise BadSetting("the name of a key must have 1 to 100 characters. Name the person or application it is for.")
    if name in {key.name for key in keys}:
        raise BadSetting(f"a key named '{name}' already exists. Revoke it first: knowgate keys revoke '{name}'")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    _write_keys(path, [*keys, ApiKey(name=name, hash=hash_key(key), created=time.time(), rate=rate)])
    return key


def revoke_key(path: Path, name: str) -> None:
    """Delete a key. Running servers reject it from then on."""
    keys = read_keys(path)
    remaining = [key for key in keys if key.name != name]
    if len(remaining) == len(keys):
        raise BadSetting(f"there is no key '{name}'. Known: {', '.join(key.name for key in keys) or 'none'}.")
    _write_keys(path, remaining)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode(errors="replace")).hexdigest()


def match_key(keys: Sequence[ApiKey], candidate: str) -> ApiKey | None:
    """Return the stored key that the candidate matches, or None. Takes the same time whether or not it matches."""
    candidate_hash, match = hash_key(candidate), None
    for key in keys:
        if hmac.compare_digest(key.hash, candidate_hash):
            match = key
    return match


def _write_keys(path: Path, keys: Sequence[ApiKey]) -> None:
    """Write the key file, readable only for its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"keys": [key.model_dump() for key in keys]})
    path.chmod(0o600)
