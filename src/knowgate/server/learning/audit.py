"""So many calls an hour and no more: what is not used is saved up for one hour at most."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from knowgate.data.history.entries import KnowledgeLabel, LabelSource
from knowgate.gates.arbiters.abstention import RULES_ARBITER
from knowgate.server.database import Store
from knowgate.server.json_api import ApiError
from knowgate.server.learning.answers import CounterfactualAnswerer
from knowgate.server.learning.arms import Experiment, ExperimentArm
from knowgate.server.learning.history_labels import HistoryLabeler, answers_differ
from knowgate.server.telemetry.decision_log import DecisionLog, RecentDecisions
from knowgate.server.telemetry.trace import ClientRequest

HOUR_SECONDS = 3600.0


@dataclass
class CallBudget:
    """per_hour: calls."""

    per_hour: int
    clock: Callable[[], float] = time.monotonic
    left: float = field(init=False)
    seen: float = field(init=False)

    def __post_init__(self) -> None:
        self.left, self.seen = float(self.per_hour), self.clock()

    @property
    def is_there(self) -> bool:
        """Whether another call may be made."""
        now = self.clock()
        self.left = min(float(self.per_hour), self.left + (now - self.seen) * self.per_hour / HOUR_SECONDS)
        self.seen = now
        return self.left >= 1

    def spend(self) -> None:
        self.left -= 1


LOSS, LABEL, CLEARED = "loss", "label", "cleared"
AUDIT_COLUMNS = "decision, arm, scope, kind, lost, closed, opened"
AUDIT_LOCK = (
    "audits"  # numbers are given in the order in which rows can be seen: who reads on from the last misses none
)
INSERT_AUDIT = f"INSERT INTO audits ({AUDIT_COLUMNS}, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"


@dataclass(frozen=True)
class AuditRecord:
    """kind: `loss` of a drawn request; `label`, where one that was looked up was also answered from memory; `cleared`,
    where somebody said that the counting begins again. closed, opened: the answers, if their texts may be kept."""

    decision: str
    arm: str
    scope: str
    kind: str
    lost: float | None = None
    closed: str | None = None
    opened: str | None = None


class AuditStore:
    """The tables. All that is done with them happens in the thread of the decision log."""

    def __init__(self, log: DecisionLog):
        self._log = log
        self._last = 0

    def read(self) -> list[AuditRecord]:
        """All there is, when a server starts."""
        return self._log.begin(self._news)

    async def add(self, audit: AuditRecord) -> list[AuditRecord]:
        """Once this is over it is on disk. Gives back what is new since last time, of other workers, too."""

        def work(store: Store) -> list[AuditRecord]:
            values = [getattr(audit, name) for name in AUDIT_COLUMNS.split(", ")]
            with store.writing(AUDIT_LOCK) as writes:
                writes.execute(INSERT_AUDIT, [*values, time.time()])
            return self._news(store)

        return await self._log.beside(work)

    async def news(self) -> list[AuditRecord]:
        """What other workers found out since last time."""
        return await self._log.beside(self._news)

    def _news(self, store: Store) -> list[AuditRecord]:
        query = f"SELECT number, {AUDIT_COLUMNS} FROM audits WHERE number > ? ORDER BY number"
        rows = store.rows(query, (self._last,))
        self._last = rows[-1][0] if rows else self._last
        return [AuditRecord(*row[1:]) for row in rows]

    async def correct(self, decision: str, answer: str) -> None:
        def work(store: Store) -> None:
            with store.writing() as writes:
                writes.execute("INSERT INTO corrections VALUES (?, ?, ?)", (decision, time.time(), answer))

        await self._log.beside(work)

    async def answers(self, decision: str) -> dict[str, Any]:
        """Both answers of a decision that was audited, as far as their texts were kept."""
        query = "SELECT closed, opened FROM audits WHERE decision = ? AND closed IS NOT NULL ORDER BY number DESC"
        rows = await self._log.beside(lambda store: store.rows(query, (decision,)))
        return {"closed": rows[0][0], "opened": rows[0][1]} if rows else {}


async def delete_audit_texts(log: DecisionLog, ids: Sequence[str]) -> None:
    """Both answers and corrections of these decisions; that something was lost stays counted."""

    def work(store: Store) -> None:
        with store.writing() as writes:
            for id in ids:
                writes.execute("UPDATE audits SET closed = NULL, opened = NULL WHERE decision = ?", (id,))
                writes.execute("DELETE FROM corrections WHERE decision = ?", (id,))
        store.wipe(["audits", "corrections"])

    if ids:
        await log.beside(work)


POLL_SECONDS = 2.0  # seconds between looks at what other workers found out
MAX_PENDING_AUDITS = 64  # audits; while there are so many nothing is drawn
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AuditJob:
    """A request that was drawn. skips: the gate would skip it, whether or not it was obeyed."""

    id: str
    asked: ClientRequest
    question: str
    arm: ExperimentArm
    skips: bool
    closed: str | None
    opened: str | None


@dataclass
class Auditor:
    """kept: None where decisions are not; then there is no room for anything.

    asks_llm: whether two answers say the same, where their words do not.
    """

    arms: Experiment
    again: CounterfactualAnswerer
    recent: RecentDecisions
    labelling: HistoryLabeler
    kept: AuditStore | None
    budget: CallBudget
    asks_llm: bool = False
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    waiting: asyncio.Queue[AuditJob] = field(default_factory=lambda: asyncio.Queue(MAX_PENDING_AUDITS))
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

    def put(self, job: AuditJob) -> None:
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

    async def _audit(self, job: AuditJob) -> None:
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
        self.labelling.put(
            job.question, KnowledgeLabel.UNKNOWN if lost else KnowledgeLabel.KNOWN, LabelSource.AGREEMENT
        )
        await self._keep(job, LOSS if job.skips else LABEL, lost, closed, opened)

    async def _both(self, job: AuditJob) -> tuple[str | None, str | None]:
        """From memory and with passages; at least one is there."""
        if job.opened is None:
            return job.closed, await self._ask(job, given=job.closed or "", opened=True)
        if job.closed is None:
            return await self._ask(job, given=job.opened, opened=False), job.opened
        return job.closed, job.opened

    async def _ask(self, job: AuditJob, *, given: str, opened: bool) -> str | None:
        self.budget.spend()
        return await self.again.answer(job.asked, job.question, given=given, opened=opened)

    async def _differ(self, job: AuditJob, closed: str, opened: str) -> bool:
        """By their words; where those differ, by what the LLM says to that, if it is to be asked."""
        if not answers_differ(closed, opened):
            return False
        if not self.asks_llm or RULES_ARBITER.abstains(closed):
            return True
        self.budget.spend()
        return not await self.again.says_same(job.asked, job.question, closed, opened)

    async def _keep(
        self, job: AuditJob, kind: str, lost: float, closed: str | None = None, opened: str | None = None
    ) -> None:
        assert self.kept is not None
        texts = (closed, opened) if self.recent.keeps_texts else (None, None)
        self.counts[job.arm.name, kind] += 1
        self._take(await self.kept.add(AuditRecord(job.id, job.arm.name, job.arm.scope, kind, lost, *texts)))

    # --- what was found out ------------------------------------------------------------------------

    def follow(self) -> None:
        """Now and then: what other workers found out, an alarm above all."""
        now = time.monotonic()
        if self.kept is not None and now >= self.followed + POLL_SECONDS:
            self.followed = now
            self.following = asyncio.get_running_loop().create_task(self._read(self.kept))

    async def _read(self, kept: AuditStore) -> None:
        try:
            self._take(await kept.news())
        except Exception as error:  # noqa: BLE001 - it is tried again
            log.warning("What other workers found out could not be read: %s", error)

    async def clear(self, name: str) -> None:
        """Begin to count again, and end an alarm."""
        arm = self.arms.arms.get(name)
        if arm is None or self.kept is None:
            raise ApiError(404, f"nothing is watched here under the name '{name[:40]}'.", "no_arm")
        self._take(await self.kept.add(AuditRecord("", name, arm.scope, CLEARED)))
        log.warning("Somebody cleared the alarm of arm %s; the counting begins again.", name)

    def _take(self, news: Sequence[AuditRecord]) -> None:
        """Of the gates as they are now, found out by this worker or another one."""
        for audit in news:
            for arm in self.arms.arms.values():
                if arm.scope == audit.scope:
                    _tell(arm, audit)


def _tell(arm: ExperimentArm, audit: AuditRecord) -> None:
    if audit.kind == CLEARED:
        arm.watch.begin_again()
    if audit.kind != LOSS or audit.lost is None:
        return
    before, gate = arm.watch.alarm, arm.rag.gate.name
    arm.watch.see_loss(audit.lost)
    if arm.watch.alarm and not before:
        log.error("Alarm, gate %s: %s. Everything is looked up until it is cleared.", gate, arm.watch.alarm)
