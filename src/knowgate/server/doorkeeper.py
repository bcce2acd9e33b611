"""Who may come in: holders of a key, where there are keys; else programs of this machine, but no web pages in them.

A browser sends `Origin` with what a page of another site asks for; that is refused, and no header allows it (CORS is
closed). Without keys a `Host` that is not this machine's is refused, too: a page whose name was made to point here.
"""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlsplit

from starlette.requests import Request

from knowgate.errors import KnowgateError
from knowgate.server.keys import ApiKey, find_key, read_keys
from knowgate.server.options import LOOPBACK, ServeOptions
from knowgate.server.problems import Problem

OPEN = ("/health", "/ready")


class Doorkeeper:
    """Reads the keys again when their file changes, so that a revoked one is refused at once."""

    def __init__(self, options: ServeOptions):
        self.file = None if options.keys is None else Path(options.keys).expanduser()
        self.is_local = options.is_local
        self._keys: tuple[ApiKey, ...] = ()
        self._state: tuple[int, int] | None = None

    def check(self, request: Request) -> ApiKey | None:
        """Whose key it is, where there are keys; raises for who may not come in."""
        if request.scope["path"] in OPEN:
            return None
        origin, host = request.headers.get("origin"), request.headers.get("host", "")
        if origin is not None and urlsplit(origin).netloc != host:
            raise Problem(403, "pages of other sites are not answered.", "cross_origin")
        if self.file is not None:
            return self._check_key(request.headers.get("authorization", ""))
        if self.is_local and urlsplit(f"//{host}").hostname not in LOOPBACK:
            raise Problem(403, "without API keys only this machine is answered, by its own name.", "wrong_host")
        return None

    def _check_key(self, given: str) -> ApiKey:
        kind, _, key = given.partition(" ")
        found = find_key(self._read(), key.strip())
        if kind.lower() != "bearer" or found is None:
            raise Problem(401, "this server wants an API key: Authorization: Bearer KEY.", "invalid_api_key")
        return found

    def _read(self) -> tuple[ApiKey, ...]:
        assert self.file is not None
        try:
            stat = self.file.stat()
            if (state := (stat.st_mtime_ns, stat.st_size)) != self._state:
                self._keys, self._state = read_keys(self.file), state
        except (OSError, KnowgateError):
            raise Problem(503, "the API keys cannot be read.", "keys_unreadable") from None
        return self._keys
