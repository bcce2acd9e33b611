"""Looks at requests whose replies have gone out: draws some for audits, asks for the other answer, labels the history.

Whatever fails here is counted and logged; no request ever waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from knowgate.arbiters import RULES
from knowgate.errors import KnowgateError
from knowgate.history import Known, LogEntry, Scope, Source
from knowgate.pipeline import TrafficLog
from knowgate.server.learning.arms import Arm, Arms
from knowgate.server.learning.asking_again import AskingAgain
from knowgate.server.learning.budget import Budget
from knowgate.server.learning.kept import CLEARED, LABEL, LOSS, Audit, Kept
from knowgate.server.learning.labels import by_agreement, by_feedback, differ
from knowgate.server.learning.replies import listen
from knowgate.server.problems import Problem
from knowgate.server.recent import Recent
from knowgate.server.trace import Asked, Trace
from knowgate.types import Note

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
class Learner:
    """kept: None where decisions are not; then nothing is drawn. history: where labels go, None for nowhere.

    asks_llm: whether two answers say the same, where their words do not.
    """

    arms: Arms
    again: AskingAgain
    recent: Recent
    kept: Kept | None = None
    history: TrafficLog | None = None
    share: float = 0.0
    asks_llm: bool = False
    budget: Budget = field(default_factory=lambda: Budget(0))
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    waiting: asyncio.Queue[Job] = field(default_factory=lambda: asyncio.Queue(MOST_WAITING))
    worker: asyncio.Task[None] | None = None
    followed: float = 0.0
    following: asyncio.Task[None] | None = None
    chance: random.Random = field(default_factory=random.SystemRandom)

    def __post_init__(self) -> None:
        if self.kept is not None:
            self._take(self.kept.read())

    async def close(self) -> None:
        """Audits that are waiting are given up; that says nothing about how they would have gone."""
        if self.worker is not None:
            self.worker.cancel()
            await asyncio.gather(self.worker, return_exceptions=True)
        if self.history is not None:
            await asyncio.to_thread(self.history.close)

    # --- a request ---------------------------------------------------------------------------------

    def see(self, response: Response, trace: Trace) -> None:
        """After a chat was answered, before the reply has gone out."""
        if trace.decision is None or trace.question is None or response.status_code != 200:
            return
        self._follow()
        arm = self.arms.arms.get(trace.arm)
        if arm is not None:
            arm.watch.see_distance(trace.decision.distance)
        drawn = arm is not None and self._draws(trace)
        if drawn or self.history is not None or self.recent.keeps_texts:
            listen(response, lambda text: self._heard(trace, text, arm if drawn else None))

    def _follow(self) -> None:
        """Now and then: what other workers found out, an alarm above all."""
        now = time.monotonic()
        if self.kept is None or now < self.followed + FOLLOW:
            return
        self.followed = now
        self.following = asyncio.get_running_loop().create_task(self._read(self.kept))

    async def _read(self, kept: Kept) -> None:
        try:
            self._take(await kept.news())
        except Exception as error:  # noqa: BLE001 - it is tried again
            log.warning("What other workers found out could not be read: %s", error)

    def _draws(self, trace: Trace) -> bool:
        """By chance alone: if the decision, or what an audit costs, played a part, the mean would be no mean."""
        assert trace.decision is not None
        is_of_a_gate = not trace.decision.rule and set(trace.degraded) <= {"alarm"}
        has_room = self.kept is not None and self.budget.is_there and not self.waiting.full()
        return is_of_a_gate and has_room and self.chance.random() < self.share

    def _heard(self, trace: Trace, text: str | None, arm: Arm | None) -> None:
        """The reply has gone out."""
        if text is None or trace.decision is None or trace.asked is None or trace.question is None:
            return
        closed, opened = (self._drafted(trace), text) if trace.passages else (text, None)
        self.recent.add(trace.id, {"closed": closed, "opened": opened})
        if closed is not None and opened is not None:
            self._label(trace.question, by_agreement(closed, opened), Source.AGREEMENT)
        if arm is not None:
            skips = not trace.decision.retrieve or Note.WOULD_SKIP in trace.decision.notes
            self._put(Job(trace.id, trace.asked, trace.question, arm, skips, closed, opened))

    def _drafted(self, trace: Trace) -> str | None:
        """The whole answer from memory, where there is one."""
        draft = trace.draft
        is_piece = trace.asked is not None and bool(trace.asked.body.get("stream"))
        return draft.text if draft is not None and (draft.finished or not is_piece) else None

    def _label(self, question: str, label: Known, source: Source) -> None:
        if self.history is None:
            return
        rag = self.again.keeper.rag
        scope = Scope(rag.model.fingerprint, rag.prompts.fingerprint, self.history.tenant)
        try:
            self.history.put([LogEntry(question, label, scope, source)])
        except KnowgateError as error:
            log.warning("A label could not be logged: %s", error)

    # --- audits ------------------------------------------------------------------------------------

    def _put(self, job: Job) -> None:
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
            if job.opened is None or job.closed is not None or self.history is None:
                return
        closed, opened = job.closed, job.opened
        if closed is None or opened is None:
            other = await self._ask(job, given=closed or opened or "", opened=opened is None)
            closed, opened = (closed, other) if opened is None else (other, opened)
        if closed is None or opened is None:
            self.counts[job.arm.name, "failed"] += 1
            return
        lost = float(await self._differ(job, closed, opened))
        self.recent.add(job.id, {"closed": closed, "opened": opened, "lost": lost})
        self._label(job.question, Known.UNKNOWN if lost else Known.KNOWN, Source.AGREEMENT)
        await self._keep(job, LOSS if job.skips else LABEL, lost, closed, opened)

    async def _differ(self, job: Job, closed: str, opened: str) -> bool:
        """By their words; where those differ, by what the LLM says to that, if it is to be asked."""
        if not differ(closed, opened):
            return False
        if not self.asks_llm or RULES.abstains(closed):
            return True
        self.budget.spend()
        return not await self.again.says_same(job.asked, job.question, closed, opened)

    async def _ask(self, job: Job, *, given: str, opened: bool) -> str | None:
        self.budget.spend()
        return await self.again.answer(job.asked, job.question, given=given, opened=opened)

    async def _keep(
        self, job: Job, kind: str, lost: float, closed: str | None = None, opened: str | None = None
    ) -> None:
        assert self.kept is not None
        texts = (closed, opened) if self.recent.keeps_texts else (None, None)
        self.counts[job.arm.name, kind] += 1
        self._take(await self.kept.add(Audit(job.id, job.arm.name, job.arm.scope, kind, lost, *texts)))

    def _take(self, news: Sequence[Audit]) -> None:
        """What was found out, by this worker or another one, about the gates as they are now."""
        for audit in news:
            for arm in self.arms.arms.values():
                if arm.scope == audit.scope:
                    _tell(arm, audit)

    # --- what people say ---------------------------------------------------------------------------

    async def clear(self, name: str) -> None:
        """Begin to count again, and end an alarm."""
        arm = self.arms.arms.get(name)
        if arm is None or self.kept is None:
            raise Problem(404, f"nothing is watched here under the name '{name[:40]}'.", "no_arm")
        self._take(await self.kept.add(Audit("", name, arm.scope, CLEARED)))
        log.warning("Somebody cleared the alarm of arm %s; the counting begins again.", name)

    def learn(self, id: str, rating: str, correction: str | None, found: dict[str, Any]) -> bool:
        """Whether feedback told something about the LLM, which is then in the history."""
        self.recent.add(id, {"rating": rating})
        question = found.get("question")
        if self.history is None or not isinstance(question, str) or found.get("gated") is False:
            return False
        label = by_feedback(rating, correction, {**found, "retrieved": bool(found.get("passages"))})
        if label is not None:
            self._label(question, label, Source.HUMAN)
        return label is not None

    @property
    def record(self) -> dict[str, Any]:
        """What was found out, as JSON."""
        return {
            "arms": {name: self._about(arm) for name, arm in self.arms.arms.items()},
            "share_b": self.arms.share_b,
            "canary": self.arms.canary,
            "audit": self.share,
            "budget_left": int(self.budget.left),
            "labelled": self.history.labelled if self.history is not None else None,
        }

    def _about(self, arm: Arm) -> dict[str, Any]:
        audits = {result: count for (name, result), count in self.counts.items() if name == arm.name}
        return {"gate": arm.rag.gate.name, "threshold": arm.threshold, "audits": audits, **arm.watch.record}


def _tell(arm: Arm, audit: Audit) -> None:
    if audit.kind == CLEARED:
        arm.watch.begin_again()
    if audit.kind != LOSS or audit.lost is None:
        return
    before, gate = arm.watch.alarm, arm.rag.gate.name
    arm.watch.see_loss(audit.lost)
    if arm.watch.alarm and not before:
        log.error("Alarm, gate %s: %s. Everything is looked up until it is cleared.", gate, arm.watch.alarm)
