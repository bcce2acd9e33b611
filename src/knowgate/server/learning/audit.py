"""Audits of skipped searches: compare the answers with and without passages of a sample of requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from knowgate.data.history.entries import KnowledgeLabel, LabelSource
from knowgate.gates.arbiters.abstention import RULES_ARBITER, answers_differ
from knowgate.server.json_api import ApiError
from knowgate.server.learning.answers import (
    CounterfactualAnswerer,
    HistoryLabeler,
    cut_optional_answer,
    label_by_agreement,
    make_label,
)
from knowgate.server.learning.arms import Experiment, ExperimentArm
from knowgate.server.learning.audit_store import CLEARED, FAILED, LABEL, LOSS, AuditRecord, AuditStore
from knowgate.server.learning.loss_monitor import LossMonitor
from knowgate.server.load_limits import MAX_CALLS_PER_AUDIT, BodyBudget, CallBudget, get_reason
from knowgate.server.telemetry.snapshot import RecentDecisions
from knowgate.server.telemetry.trace import ClientRequest, RequestTrace
from knowgate.types import DecisionNote

log = logging.getLogger(__name__)


POLL_SECONDS = 1.0  # interval at which the audits of other server processes are read
MAX_POLL_WAIT_SECONDS = 0.25  # a request does not wait longer for them, so that a hanging database does not block it
MAX_PENDING_AUDITS = 64  # if as many audits of an API key are waiting, none of its requests is sampled
MAX_AUDIT_BYTES = 256 << 20  # memory of the large requests that wait for audits


@dataclass
class AuditJob:
    """A request that was sampled for an audit.

    Attributes:
        trace: Trace of the request, with its decision.
        request: The request of the client.
        question: The question that was decided on.
        arm: The gate that decided, as an arm of an A/B test.
        closed_answer: The answer without passages, if it exists already.
        open_answer: The answer with passages, if it exists already.
        call_count: Number of LLM calls that the audit has made.
    """

    trace: RequestTrace
    request: ClientRequest
    question: str
    arm: ExperimentArm
    closed_answer: str | None
    open_answer: str | None
    call_count: int = 0

    @property
    def earlier_label(self) -> KnowledgeLabel | None:
        """Label that the question got when its answer was sent. None if only one answer existed then."""
        if self.closed_answer is None or self.open_answer is None:
            return None
        return label_by_agreement(self.closed_answer, self.open_answer)

    @property
    def may_have_changed_answer(self) -> bool:
        """Whether the gate or the arbiter may have changed the answer. In shadow mode, a would-be skip counts, too."""
        decision, choice = self.trace.decision, self.trace.choice
        skips = decision is not None and (not decision.retrieve or DecisionNote.WOULD_SKIP in decision.notes)
        sent_draft = choice is not None and choice.is_closed_book  # the arbiter preferred the answer without passages
        return skips or sent_draft


@dataclass
class Auditor:
    """Runs audits, and adds their results to the loss monitors of the gates.

    Attributes:
        experiment: The A/B test whose gates are monitored.
        answerer: Generates the second answer for the comparison.
        recent: Recent decisions, which the dashboard shows with both answers.
        labeler: Adds labels to the history of questions.
        store: Stored audits. None if there is no decision log; then no audits are run.
        budget: Limits the LLM calls for audits. They are reserved when a request is sampled.
        asks_llm: Whether the LLM compares two answers whose words differ.
        on_result: Called with the name of the arm and the result of an audit: "loss", "label", "failed" or "dropped".
        pending_count: Number of audits that were submitted and have not ended.
        bodies: Memory of the large requests that are audited.
    """

    experiment: Experiment
    answerer: CounterfactualAnswerer
    recent: RecentDecisions
    labeler: HistoryLabeler
    store: AuditStore | None
    budget: CallBudget
    asks_llm: bool = False
    on_result: Callable[[str, str], None] = lambda arm, result: None
    pending_count: int = 0
    bodies: BodyBudget = field(default_factory=lambda: BodyBudget(MAX_AUDIT_BYTES, 0))
    # Each API key has a queue and a task of its own, so that slow audits of one key do not delay those of others.
    _queues: dict[str, asyncio.Queue[AuditJob]] = field(default_factory=dict)
    _workers: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    _poll_task: asyncio.Task[None] | None = None
    _last_poll: float = 0.0
    _is_stopped: bool = False

    def __post_init__(self) -> None:
        if self.store is not None:
            self._apply(self.store.read_all())

    def stop(self) -> list[asyncio.Task[None]]:
        """Cancel all audits that have not ended, and return the tasks of those that run. This does not bias the measured loss."""
        if self.pending_count:
            log.warning(
                "%d audits had not ended and were dropped. They do not count for the measured share of changed answers.",
                self.pending_count,
            )
        self._is_stopped = True
        for queue in self._queues.values():
            while not queue.empty():
                self.release(queue.get_nowait().trace)
        tasks = list(self._workers.values())
        if self._poll_task is not None:
            tasks.append(self._poll_task)
        for task in tasks:
            task.cancel()
        return tasks

    async def close(self) -> None:
        """Cancel all audits that have not ended, and wait for their tasks."""
        await asyncio.gather(*self.stop(), return_exceptions=True)

    @property
    def calls_per_audit(self) -> int:
        """Maximum number of LLM calls of one audit."""
        return MAX_CALLS_PER_AUDIT if self.asks_llm else 1

    @property
    def pause_reason(self) -> str:
        """Why audits pause for lack of budget, or "" if they do not."""
        return self.budget.describe_pause(self.calls_per_audit)

    def reserve(self, trace: RequestTrace) -> bool:
        """Reserve LLM calls and memory for an audit, and return whether this succeeded. Then call `submit` or `release`."""
        if self.store is None:
            return False
        if self._get_queue(trace.owner).full() or not self.bodies.has_room(trace.owner, trace.body_memory):
            self.on_result(trace.arm, "dropped")
            return False
        if not self.budget.reserve(trace.owner, self.calls_per_audit):
            return False
        self.bodies.reserve(trace.owner, trace.body_memory)
        return True

    def _get_queue(self, owner: str) -> asyncio.Queue[AuditJob]:
        """Return the queue of audits of an API key."""
        return self._queues.setdefault(owner, asyncio.Queue(MAX_PENDING_AUDITS))

    def release(self, trace: RequestTrace, call_count: int = 0) -> None:
        """Give back the memory of an audit that has ended or does not take place, and the calls that it did not make."""
        self.budget.release(trace.owner, self.calls_per_audit - call_count)
        self.bodies.reserve(trace.owner, -trace.body_memory)

    def submit(self, job: AuditJob) -> None:
        """Queue an audit, and return at once. It is dropped if the queue is full, or after `stop`."""
        queue = self._get_queue(job.trace.owner)
        if self._is_stopped or queue.full():
            self.on_result(job.arm.name, "dropped")
            self.release(job.trace)
            return
        if job.trace.owner not in self._workers:
            self._workers[job.trace.owner] = asyncio.get_running_loop().create_task(self._run_jobs(queue))
        queue.put_nowait(job)
        self.pending_count += 1

    async def _run_jobs(self, queue: asyncio.Queue[AuditJob]) -> None:
        """Run the audits of one API key one after the other, until the task is canceled."""
        while True:
            job = await queue.get()
            try:
                await self._audit(job)
            except Exception as error:  # noqa: BLE001 - the next audit may succeed
                # Only the message of an ApiError is logged in full, because other messages can quote the question.
                reason = str(error) if isinstance(error, ApiError) else get_reason(error, self.answerer.timeout)
                log.warning("An audit failed: %s", reason)
                await self._store_failure(job)
            finally:  # also if the task is canceled
                self.release(job.trace, job.call_count)
                self.pending_count -= 1
                del job  # its request would stay in memory until the next audit of this key

    async def _audit(self, job: AuditJob) -> None:
        """Compare the answers with and without passages, and store whether they differ.

        For a client that got the answer with passages, nothing can have changed, which is stored at once. Then the answers
        are compared only if that gives a label (whether the LLM knows the answer).
        """
        kind = LOSS
        if not job.may_have_changed_answer:
            await self._store_result(job, LOSS, 0.0)
            kind = LABEL
            if not self._can_label(job):
                return
        closed_answer, open_answer = await self._get_both_answers(job)
        if closed_answer is None or open_answer is None:
            await self._store_failure(job)
            return
        changed = float(await self._answers_differ(job, closed_answer, open_answer))
        self.recent.update(job.trace.id, {"closed": closed_answer, "opened": open_answer, "lost": changed})
        await self._store_label(job, make_label(closed_answer, is_changed=bool(changed)))
        await self._store_result(job, kind, changed, closed_answer, open_answer)

    def _can_label(self, job: AuditJob) -> bool:
        """Return whether a request that was answered with passages can give a label."""
        stores_labels = self.labeler.history is not None and job.trace.shares_labels
        # A missing answer without passages is generated only for a label that is stored.
        return bool(job.open_answer) and (job.closed_answer is not None or stores_labels)

    async def _store_label(self, job: AuditJob, label: KnowledgeLabel) -> None:
        """Add a new label to the history, unless the decision was deleted meanwhile."""
        is_new_label = job.trace.shares_labels and label != await asyncio.to_thread(lambda: job.earlier_label)
        if is_new_label and self.store is not None and not await self.store.is_deleted(job.trace.id):
            self.labeler.add(job.question, label, LabelSource.AGREEMENT)

    async def _get_both_answers(self, job: AuditJob) -> tuple[str | None, str | None]:
        """Return the answers without and with passages, and generate the missing one. None means that this failed."""
        closed_answer, open_answer = job.closed_answer, job.open_answer
        if closed_answer is None and open_answer is None:  # the reply cannot be compared: it may be a tool call
            return None, None
        if open_answer is None:
            job.call_count += 1
            open_answer = await self.answerer.answer_with_passages(job.request, job.question, closed_answer or "")
        elif closed_answer is None:
            job.call_count += 1
            closed_answer = await self.answerer.answer_closed_book(job.request, job.question)
        return cut_optional_answer(closed_answer), cut_optional_answer(open_answer)

    async def _answers_differ(self, job: AuditJob, closed_answer: str, open_answer: str) -> bool:
        """Return whether the answers differ in words. With `asks_llm`, they must also differ in meaning."""
        if not await asyncio.to_thread(answers_differ, closed_answer, open_answer):  # long answers take a while
            return False
        if not self.asks_llm or RULES_ARBITER.abstains(closed_answer):  # such as "I don't know"
            return True
        job.call_count += 1
        return not await self.answerer.compare(job.request, job.question, closed_answer, open_answer)

    async def _store_result(
        self, job: AuditJob, kind: str, changed: float, closed: str | None = None, opened: str | None = None
    ) -> None:
        """Store the result of an audit, and add it to the monitor of its gate. Answers are stored only if texts may be.

        Args:
            job: The audited request.
            kind: "loss" or "label", as in `AuditRecord`.
            changed: 1 if the answers without and with passages differ, otherwise 0.
            closed: The answer without passages, if it was compared.
            opened: The answer with passages, if it was compared.
        """
        assert self.store is not None
        if not self.recent.stores_texts:
            closed, opened = None, None
        self.on_result(job.arm.name, kind)
        record = AuditRecord(job.trace.id, job.arm.name, job.arm.scope, kind, changed, closed, opened, job.trace.owner)
        self._apply(await self.store.add(record))

    async def _store_failure(self, job: AuditJob) -> None:
        """Count an audit without a result. Store it, unless it was made only to get a label."""
        self.on_result(job.arm.name, FAILED)
        if self.store is not None and job.may_have_changed_answer:
            record = AuditRecord(job.trace.id, job.arm.name, job.arm.scope, FAILED, owner=job.trace.owner)
            with suppress(ApiError):  # the decision log has already logged the error
                self._apply(await self.store.add(record))

    # --- results of all server processes ------------------------------------------------------------

    async def poll(self) -> None:
        """Read the audits of other server processes, once in POLL_SECONDS. Requests wait for this only briefly."""
        now = time.monotonic()
        is_idle = self._poll_task is None or self._poll_task.done()
        is_due = now >= self._last_poll + POLL_SECONDS
        if self.store is not None and is_idle and is_due:
            self._last_poll = now
            self._poll_task = asyncio.get_running_loop().create_task(self._read_new(self.store))
        wait_seconds = self._last_poll + MAX_POLL_WAIT_SECONDS - now
        if self._poll_task is not None and not self._poll_task.done() and wait_seconds > 0:
            await asyncio.wait([self._poll_task], timeout=wait_seconds)

    async def _read_new(self, store: AuditStore) -> None:
        """Read new audits of other server processes, and add them to the monitors."""
        try:
            self._apply(await store.read_new())
        except Exception as error:  # noqa: BLE001 - the next poll tries again
            log.warning("The audits of other server processes could not be read: %s", error)

    async def clear_alarm(self, arm_name: str) -> None:
        """Discard the audits of an arm of the A/B test, and clear its alarm.

        Raises:
            ApiError: 404 if there is no such arm, or no decision log. 503 if the log does not respond.
        """
        arm = self.experiment.arms.get(arm_name)
        if arm is None or self.store is None:
            known = ", ".join(self.experiment.arms)
            message = f"no audits are stored for the arm '{arm_name[:40]}'. Arms of this server: {known}."
            raise ApiError(404, message, "no_arm")
        await self.store.check()
        await asyncio.shield(self._store_clearing(self.store, arm))  # what is stored must be applied, too
        log.warning("The alarm of arm %s was cleared. Its audits start again from zero.", arm_name)

    async def _store_clearing(self, store: AuditStore, arm: ExperimentArm) -> None:
        """Store that the audits of an arm no longer count, and apply this."""
        self._apply(await store.add(AuditRecord("", arm.name, arm.scope, CLEARED)))

    def _apply(self, audits: Sequence[AuditRecord]) -> None:
        """Add stored audits to the monitors of their gates. The scope of an audit identifies its gate, LLM, index and so on."""
        arms = self.experiment.arms
        is_only_arm = len(arms) == 1  # then audits of the same gate count, even if it was arm "b" before
        for arm in arms.values():
            own_audits = [item for item in audits if item.scope == arm.scope and (is_only_arm or item.arm == arm.name)]
            _update_monitor(arm, own_audits)


def _update_monitor(arm: ExperimentArm, audits: Sequence[AuditRecord]) -> None:
    """Add stored audits to the monitor of a gate. Then log new alarms, unless one of the audits has cleared them."""
    monitor = arm.monitor
    owners = {audit.owner or "" for audit in audits}
    owners_without_alarm = sorted(owner for owner in owners if not monitor.get_alarm(owner))
    had_alarm = bool(monitor.alarm)
    for audit in audits:
        _add_to_monitor(monitor, audit)
    alarm = monitor.alarm
    if alarm and not had_alarm:
        message = "Alarm for gate %s: %s. All requests retrieve until the alarm is cleared."
        log.error(message, arm.gate_spec, monitor.alarm_with_key)
    for owner in owners_without_alarm:
        key_alarm = monitor.get_alarm(owner)
        if key_alarm not in ("", alarm):  # the alarm for all keys was logged above
            log.error("Alarm for gate %s: %s. All requests of this API key retrieve.", arm.gate_spec, key_alarm)


def _add_to_monitor(monitor: LossMonitor, audit: AuditRecord) -> None:
    """Add a stored audit to the statistics of a gate. A record of the kind CLEARED resets the statistics instead."""
    if audit.kind == CLEARED:
        monitor.reset_loss()
    elif audit.kind == FAILED:
        monitor.add_failure()
    elif audit.kind == LOSS and audit.lost is not None:  # audits that were made only for a label do not count
        monitor.add_audit(audit.lost, audit.owner or "")
