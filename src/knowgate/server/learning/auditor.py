"""Asks for the other answer to requests that were drawn, one after the other, and keeps whether it is another one.

Knows nothing of how requests are drawn. Whatever fails here is counted and logged; no request ever waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from knowgate.arbiters import RULES
from knowgate.history import Known, Source
from knowgate.server.learning.arms import Arm, Arms
from knowgate.server.learning.asking_again import AskingAgain
from knowgate.server.learning.budget import Budget
from knowgate.server.learning.kept import CLEARED, LABEL, LOSS, Audit, Kept
from knowgate.server.learning.labelling import Labelling
from knowgate.server.learning.labels import differ
from knowgate.server.problems import Problem
from knowgate.server.recent import Recent
from knowgate.server.trace import Asked

FOLLOW = 2.0  # seconds between looks at what other workers found out
MOST_WAITING = 64  # audits; while there are so many nothing is drawn
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """A request that was drawn. skips: the gate would skip it, whether or not it was obeyed."""

    id: str
    asked: Asked
    question: str
    arm: Arm
    skips: bool
    closed: str | None
    opened: str | None


@dataclass
class Auditor:
    """kept: None where decisions are not; then there is no room for anything.

    asks_llm: whether two answers say the same, where their words do not.
    """

    arms: Arms
    again: AskingAgain
    recent: Recent
    labelling: Labelling
    kept: Kept | None
    budget: Budget
    asks_llm: bool = False
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    waiting: asyncio.Queue[Job] = field(default_factory=lambda: asyncio.Queue(MOST_WAITING))
    worker: asyncio.Task[None] | None = None
    followed: float = 0.0
    following: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        if self.kept is not None:
            self._take(self.kept.read())

    async def close(self) -> None:
        await asyncio.gather(*self.stop(), return_exceptions=True)

    def stop(self) -> list[asyncio.Task[None]]:
        """Audits that are waiting are given up; that says nothing about how they would have gone."""
        tasks = [task for task in (self.worker, self.following) if task is not None]
        for task in tasks:
            task.cancel()
        return tasks

    @property
    def has_room(self) -> bool:
        return self.kept is not None and self.budget.is_there and not self.waiting.full()

    def put(self, job: Job) -> None:
        """Returns at once."""
        if self.worker is None:
            self.worker = asyncio.get_running_loop().create_task(self._work())
        try:
            self.waiting.put_nowait(job)
        except asyncio.QueueFull:
            self.counts[job.arm.name, "dropped"] += 1

    async def _work(self) -> None:
        while True:
            job = await self.waiting.get()
            try:
                await self._audit(job)
            except Exception as error:  # noqa: BLE001 - the next one may go better
                self.counts[job.arm.name, "failed"] += 1
                log.warning("An audit failed: %s", str(error) or type(error).__name__)

    async def _audit(self, job: Job) -> None:
        if not job.skips:
            await self._keep(job, LOSS, 0.0)  # it was looked up, so nothing is lost
            if job.opened is None or job.closed is not None or self.labelling.history is None:
                return
        closed, opened = await self._both(job)
        if closed is None or opened is None:
            self.counts[job.arm.name, "failed"] += 1
            return
        lost = float(await self._differ(job, closed, opened))
        self.recent.add(job.id, {"closed": closed, "opened": opened, "lost": lost})
        self.labelling.put(job.question, Known.UNKNOWN if lost else Known.KNOWN, Source.AGREEMENT)
        await self._keep(job, LOSS if job.skips else LABEL, lost, closed, opened)

    async def _both(self, job: Job) -> tuple[str | None, str | None]:
        """From memory and with passages; at least one is there."""
        if job.opened is None:
            return job.closed, await self._ask(job, given=job.closed or "", opened=True)
        if job.closed is None:
            return await self._ask(job, given=job.opened, opened=False), job.opened
        return job.closed, job.opened

    async def _ask(self, job: Job, *, given: str, opened: bool) -> str | None:
        self.budget.spend()
        return await self.again.answer(job.asked, job.question, given=given, opened=opened)

    async def _differ(self, job: Job, closed: str, opened: str) -> bool:
        """By their words; where those differ, by what the LLM says to that, if it is to be asked."""
        if not differ(closed, opened):
            return False
        if not self.asks_llm or RULES.abstains(closed):
            return True
        self.budget.spend()
        return not await self.again.says_same(job.asked, job.question, closed, opened)

    async def _keep(
        self, job: Job, kind: str, lost: float, closed: str | None = None, opened: str | None = None
    ) -> None:
        assert self.kept is not None
        texts = (closed, opened) if self.recent.keeps_texts else (None, None)
        self.counts[job.arm.name, kind] += 1
        self._take(await self.kept.add(Audit(job.id, job.arm.name, job.arm.scope, kind, lost, *texts)))

    # --- what was found out ------------------------------------------------------------------------

    def follow(self) -> None:
        """Now and then: what other workers found out, an alarm above all."""
        now = time.monotonic()
        if self.kept is not None and now >= self.followed + FOLLOW:
            self.followed = now
            self.following = asyncio.get_running_loop().create_task(self._read(self.kept))

    async def _read(self, kept: Kept) -> None:
        try:
            self._take(await kept.news())
        except Exception as error:  # noqa: BLE001 - it is tried again
            log.warning("What other workers found out could not be read: %s", error)

    async def clear(self, name: str) -> None:
        """Begin to count again, and end an alarm."""
        arm = self.arms.arms.get(name)
        if arm is None or self.kept is None:
            raise Problem(404, f"nothing is watched here under the name '{name[:40]}'.", "no_arm")
        self._take(await self.kept.add(Audit("", name, arm.scope, CLEARED)))
        log.warning("Somebody cleared the alarm of arm %s; the counting begins again.", name)

    def _take(self, news: Sequence[Audit]) -> None:
        """Of the gates as they are now, found out by this worker or another one."""
        for audit in news:
            for arm in self.arms.arms.values():
                if arm.scope == audit.scope:
                    _tell(arm, audit)


def _tell(arm: Arm, audit: Audit) -> None:
    if audit.kind == CLEARED:
        arm.watch.begin_again()
    if audit.kind != LOSS or audit.lost is None:
        return
    before, gate = arm.watch.alarm, arm.rag.gate.name
    arm.watch.see_loss(audit.lost)
    if arm.watch.alarm and not before:
        log.error("Alarm, gate %s: %s. Everything is looked up until it is cleared.", gate, arm.watch.alarm)
