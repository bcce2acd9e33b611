"""The server behind this one: requests go to it, its replies come back as they are. Redirects are not followed.

Its address comes from the settings alone. The key is the one of the environment; where there is none, and clients of
this server need no key, it is the client's own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.client_exceptions import ClientError
from starlette.datastructures import Headers
from yarl import URL

from knowgate.models import find_key
from knowgate.server.breaker import Breaker
from knowgate.server.problems import Problem

PASSED_ON = ("content-type", "retry-after", "x-request-id", "openai-processing-ms")  # headers of a reply
PASSED_UP = (  # headers of a request
    "openai-organization",
    "openai-project",
    "openai-beta",
    "x-request-id",
    "traceparent",
    "tracestate",
)
CONNECTIONS = 256
CONNECT = 10.0  # seconds


class Upstream:
    """A client; opened when it is first used, on the event loop that uses it."""

    def __init__(self, url: str, *, passes_keys: bool, name: str = "upstream"):
        self.url = url
        self.breaker = Breaker(name)
        self._passes_keys = passes_keys
        self._session: aiohttp.ClientSession | None = None
        self._model: str | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
                skip_auto_headers=("User-Agent",),
                **_proxy(self.url),
            )
        return self._session

    async def send(
        self, method: str, path: str, content: bytes | None, given: Headers, *, guarded: bool = True
    ) -> aiohttp.ClientResponse:
        """The reply, not yet read. Whoever gets it closes it. guarded: failures count for the breaker."""
        if guarded and not self.breaker.allows():
            wait = f"{max(1, round(self.breaker.left))}"
            raise Problem(
                503, "the upstream failed too often and is left alone.", "upstream_down", {"retry-after": wait}
            )
        try:
            reply = await self.session.request(
                method, f"{self.url}{path}", data=content, headers=self._headers(given), allow_redirects=False
            )
        except asyncio.CancelledError:
            self.breaker.forget()
            raise
        except (ClientError, OSError) as error:
            self.breaker.fail()
            raise unreachable(error) from None
        self.breaker.succeed() if reply.status < 500 else self.breaker.fail()
        return reply

    def _headers(self, given: Headers) -> dict[str, str]:
        headers = {name: given[name] for name in PASSED_UP if name in given}
        headers["Content-Type"] = "application/json"
        headers["Accept-Encoding"] = "identity"  # what is streamed is not unpacked and packed again
        key, _ = find_key()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        elif self._passes_keys and "authorization" in given:
            headers["Authorization"] = given["authorization"]
        return headers

    async def models(self, given: Headers) -> list[dict[str, Any]]:
        reply = await self.send("GET", "/models", None, given, guarded=False)
        async with reply:
            try:
                cards = (await reply.json(content_type=None))["data"] if reply.status == 200 else []
            except (ValueError, KeyError, TypeError, ClientError):
                return []
        return [card for card in cards if isinstance(card, dict)] if isinstance(cards, list) else []

    async def default_model(self, given: Headers) -> str:
        """The first one it lists."""
        if self._model is None:
            names = [card.get("id") for card in await self.models(given)]
            if not names or not isinstance(names[0], str):
                raise Problem(
                    404, "the upstream lists no models: name one, or start with --upstream-model.", "model_not_found"
                )
            self._model = names[0]
        return self._model


def _proxy(url: str) -> dict[str, Any]:
    """The environment's proxy for this address. Read once: aiohttp's own `trust_env` goes to a thread twice for each
    request, which cost more than all else."""
    parts = urlsplit(url)
    found = getproxies().get(parts.scheme)
    if not found or proxy_bypass(parts.hostname or ""):
        return {}
    proxy = URL(found)
    login = aiohttp.BasicAuth(proxy.user, proxy.password or "") if proxy.user else None
    return {"proxy": str(proxy.with_user(None)), "proxy_auth": login}


def headers_of(reply: aiohttp.ClientResponse, added: Mapping[str, str]) -> dict[str, str]:
    return {**{name: reply.headers[name] for name in PASSED_ON if name in reply.headers}, **added}


def unreachable(error: BaseException) -> Problem:
    return Problem(502, f"the upstream cannot be reached ({type(error).__name__}).", "upstream_unreachable")
