"""The server behind this one: requests go to it, its replies come back as they are. Redirects are not followed.

Its address comes from the settings alone. The key is the one of the environment; where there is none, and clients of
this server need no key, it is the client's own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.client_exceptions import ClientError
from starlette.datastructures import Headers
from yarl import URL

from knowgate.errors import BadSetting
from knowgate.models.openai.client import find_api_key
from knowgate.server.circuit_breaker import CircuitBreaker
from knowgate.server.json_api import ApiError

FORWARDED_RESPONSE_HEADERS = (
    "content-type",
    "retry-after",
    "x-request-id",
    "openai-processing-ms",
)  # headers of a reply
FORWARDED_REQUEST_HEADERS = (  # headers of a request
    "openai-organization",
    "openai-project",
    "openai-beta",
    "x-request-id",
    "traceparent",
    "tracestate",
)
MAX_CONNECTIONS = 256
CONNECT_TIMEOUT = 10.0  # seconds


class UpstreamClient:
    """A client; opened when it is first used, on the event loop that uses it."""

    def __init__(self, url: str, *, passes_keys: bool, name: str = "upstream"):
        self.url = url
        self.breaker = CircuitBreaker(name)
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
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT),
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
            raise ApiError(
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
            raise make_unreachable_error(error) from None
        self.breaker.succeed() if reply.status < 500 else self.breaker.fail()
        return reply

    def _headers(self, given: Headers) -> dict[str, str]:
        headers = {name: given[name] for name in FORWARDED_REQUEST_HEADERS if name in given}
        headers["Content-Type"] = "application/json"
        headers["Accept-Encoding"] = "identity"  # what is streamed is not unpacked and packed again
        key, _ = find_api_key()
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
                raise ApiError(
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


def build_response_headers(reply: aiohttp.ClientResponse, added: Mapping[str, str]) -> dict[str, str]:
    return {**{name: reply.headers[name] for name in FORWARDED_RESPONSE_HEADERS if name in reply.headers}, **added}


def make_unreachable_error(error: BaseException) -> ApiError:
    return ApiError(502, f"the upstream cannot be reached ({type(error).__name__}).", "upstream_unreachable")


TOO_MANY_REQUESTS = 429  # of one server, not of the next
SERVER_ERROR = 500
WEIGHT_SUFFIX = ",weight="
MAX_WEIGHT = 1_000_000.0


@dataclass(frozen=True)
class WeightedAddress:
    """Where an upstream is, and how much of the traffic it gets beside the others. 0: only where others fail."""

    url: str
    weight: float = 1.0


def parse_weighted_address(written: str) -> WeightedAddress:
    """`URL` or `URL,weight=3`."""
    url, found, weight = written.partition(WEIGHT_SUFFIX)
    if not found:
        return WeightedAddress(written)
    try:
        value = float(weight)
    except ValueError:
        value = -1.0
    if not 0 <= value <= MAX_WEIGHT:
        raise BadSetting(f"the weight '{weight[:40]}' of an upstream is no number of at least 0: URL,weight=3.")
    return WeightedAddress(url, value)


class UpstreamPool:
    """Stands where one `Upstream` stands. draw: a random number in [0, 1)."""

    def __init__(
        self, addresses: Sequence[WeightedAddress], *, passes_keys: bool, draw: Callable[[], float] = random.random
    ):
        names = ["upstream", *(f"upstream {number}" for number in range(2, len(addresses) + 1))]
        self.members = [
            UpstreamClient(one.url, passes_keys=passes_keys, name=name)
            for one, name in zip(addresses, names, strict=True)
        ]
        self._weights = {member.url: one.weight for member, one in zip(self.members, addresses, strict=True)}
        self._draw = draw

    @property
    def breakers(self) -> list[CircuitBreaker]:
        return [member.breaker for member in self.members]

    @property
    def is_down(self) -> bool:
        """All of them are left alone."""
        return all(breaker.state == "open" for breaker in self.breakers)

    async def close(self) -> None:
        for member in self.members:
            await member.close()

    async def send(
        self, method: str, path: str, content: bytes | None, given: Headers, *, guarded: bool = True
    ) -> aiohttp.ClientResponse:
        """The first good reply, else the last one; not yet read. Whoever gets it closes it."""
        *first, last = self._order()
        for member in first:
            try:
                reply = await member.send(method, path, content, given, guarded=guarded)
            except ApiError:
                continue
            if reply.status < SERVER_ERROR and reply.status != TOO_MANY_REQUESTS:
                return reply
            reply.close()
        return await last.send(method, path, content, given, guarded=guarded)

    def _order(self) -> list[UpstreamClient]:
        """Drawn by weight, one after the other; those that are left alone come last."""
        if len(self.members) == 1:
            return self.members
        waiting, order = list(self.members), list[UpstreamClient]()
        while waiting:
            order.append(self._drawn(waiting))
            waiting.remove(order[-1])
        return sorted(order, key=lambda member: member.breaker.state == "open")

    def _drawn(self, members: Sequence[UpstreamClient]) -> UpstreamClient:
        left = self._draw() * sum(self._weights[member.url] for member in members)
        for member in members:
            left -= self._weights[member.url]
            if left < 0:
                return member
        return members[-1]

    async def models(self, given: Headers) -> list[dict[str, Any]]:
        """Those of all that can be reached, each once."""
        cards: dict[str, dict[str, Any]] = {}
        problem: ApiError | None = None
        for member in self.members:
            try:
                found = await member.models(given)
            except ApiError as error:
                problem = error
                continue
            cards = {str(card.get("id")): card for card in found} | cards
        if problem is not None and not cards:
            raise problem
        return list(cards.values())

    async def default_model(self, given: Headers) -> str:
        """The first one that the first of them lists which can be reached."""
        *first, last = sorted(self.members, key=lambda member: member.breaker.state == "open")
        for member in first:
            try:
                return await member.default_model(given)
            except ApiError:
                continue
        return await last.default_model(given)
