"""Several servers that answer the same requests: shared out by weight, and where one fails the next is asked.

Another one is asked only while the client has heard nothing: a reply that has begun is never begun again. The error of
the last one is the reply, unchanged. Which LLM a server runs is its own business: all are taken to be the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from starlette.datastructures import Headers

from knowgate.errors import BadSetting
from knowgate.server.breaker import Breaker
from knowgate.server.problems import Problem
from knowgate.server.upstream import Upstream

BUSY = 429  # of one server, not of the next
BROKEN = 500
WEIGHT = ",weight="
HEAVIEST = 1_000_000.0


@dataclass(frozen=True)
class Address:
    """Where an upstream is, and how much of the traffic it gets beside the others. 0: only where others fail."""

    url: str
    weight: float = 1.0


def read_address(written: str) -> Address:
    """`URL` or `URL,weight=3`."""
    url, found, weight = written.partition(WEIGHT)
    if not found:
        return Address(written)
    try:
        value = float(weight)
    except ValueError:
        value = -1.0
    if not 0 <= value <= HEAVIEST:
        raise BadSetting(f"the weight '{weight[:40]}' of an upstream is no number of at least 0: URL,weight=3.")
    return Address(url, value)


class Upstreams:
    """Stands where one `Upstream` stands. draw: a random number in [0, 1)."""

    def __init__(self, addresses: Sequence[Address], *, passes_keys: bool, draw: Callable[[], float] = random.random):
        names = ["upstream", *(f"upstream {number}" for number in range(2, len(addresses) + 1))]
        self.members = [
            Upstream(one.url, passes_keys=passes_keys, name=name) for one, name in zip(addresses, names, strict=True)
        ]
        self._weights = {member.url: one.weight for member, one in zip(self.members, addresses, strict=True)}
        self._draw = draw

    @property
    def breakers(self) -> list[Breaker]:
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
            except Problem:
                continue
            if reply.status < BROKEN and reply.status != BUSY:
                return reply
            reply.close()
        return await last.send(method, path, content, given, guarded=guarded)

    def _order(self) -> list[Upstream]:
        """Drawn by weight, one after the other; those that are left alone come last."""
        if len(self.members) == 1:
            return self.members
        waiting, order = list(self.members), list[Upstream]()
        while waiting:
            order.append(self._drawn(waiting))
            waiting.remove(order[-1])
        return sorted(order, key=lambda member: member.breaker.state == "open")

    def _drawn(self, members: Sequence[Upstream]) -> Upstream:
        left = self._draw() * sum(self._weights[member.url] for member in members)
        for member in members:
            left -= self._weights[member.url]
            if left < 0:
                return member
        return members[-1]

    async def models(self, given: Headers) -> list[dict[str, Any]]:
        """Those of all that can be reached, each once."""
        cards: dict[str, dict[str, Any]] = {}
        problem: Problem | None = None
        for member in self.members:
            try:
                found = await member.models(given)
            except Problem as error:
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
            except Problem:
                continue
        return await last.default_model(given)
