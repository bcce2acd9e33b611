"""Looks at requests whose replies have gone out: draws some for audits, labels the history, hears what people say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from knowgate.history import Source
from knowgate.server.learning.arms import Arm
from knowgate.server.learning.auditor import Auditor, Job
from knowgate.server.learning.labelling import Labelling
from knowgate.server.learning.labels import by_agreement, by_feedback
from knowgate.server.learning.replies import listen
from knowgate.server.prompts import FORMS
from knowgate.server.recent import Recent
from knowgate.server.trace import Trace
from knowgate.types import Note


@dataclass
class Learner:
    """share: of the requests, drawn for audits."""

    auditor: Auditor
    labelling: Labelling
    recent: Recent
    share: float = 0.0
    chance: random.Random = field(default_factory=random.SystemRandom)

    async def close(self) -> None:
        await self.auditor.close()
        if self.labelling.history is not None:
            await asyncio.to_thread(self.labelling.history.close)

    def see(self, response: Response, trace: Trace) -> None:
        """After a chat was answered, before the reply has gone out."""
        if trace.decision is None or trace.question is None or response.status_code != 200:
            return
        if trace.asked is not None and trace.asked.body.get("echo"):
            return  # a completion that repeats its prompt
        self.auditor.follow()
        arm = self.auditor.arms.arms.get(trace.arm)
        if arm is not None and not trace.decision.rule:
            arm.watch.see_distance(trace.decision.distance)
        drawn = arm if arm is not None and self._draws(trace) else None
        if drawn is not None or self.labelling.history is not None or self.recent.keeps_texts:
            listen(response, lambda text: self._heard(trace, text, drawn))

    def _draws(self, trace: Trace) -> bool:
        """By chance alone: if the decision, or what an audit costs, played a part, the mean would be no mean."""
        assert trace.decision is not None
        is_of_a_gate = not trace.decision.rule and set(trace.degraded) <= {"alarm"}
        return is_of_a_gate and self.auditor.has_room and self.chance.random() < self.share

    def _heard(self, trace: Trace, text: str | None, drawn: Arm | None) -> None:
        """The reply has gone out. drawn: the arm it belongs to, if it was."""
        if text is None or trace.decision is None or trace.asked is None or trace.question is None:
            return
        given = text if trace.choice is None else trace.choice.open  # an arbiter may have given the draft
        closed, opened = (_drafted(trace), given) if trace.passages else (text, None)
        self.recent.add(trace.id, {"closed": closed, "opened": opened})
        if closed is not None and opened is not None:
            self.labelling.put(trace.question, by_agreement(closed, opened), Source.AGREEMENT)
        if drawn is not None:
            skips = not trace.decision.retrieve or Note.WOULD_SKIP in trace.decision.notes
            self.auditor.put(Job(trace.id, trace.asked, trace.question, drawn, skips, closed, opened))

    async def learn(self, id: str, rating: str, correction: str | None, found: Mapping[str, Any]) -> bool:
        """Whether feedback told something about the LLM: then it is in the history, on disk. found: of the decision."""
        self.recent.add(id, {"rating": rating})
        question = found.get("question")
        if self.labelling.history is None or not isinstance(question, str):
            return False
        label = by_feedback(rating, correction, {**found, "retrieved": bool(found.get("passages"))})
        written = None if label is None else self.labelling.put(question, label, Source.HUMAN)
        return written is not None and await asyncio.wrap_future(written)

    @property
    def record(self) -> dict[str, Any]:
        """What was found out, as JSON."""
        arms, history = self.auditor.arms, self.labelling.history
        return {
            "arms": {name: self._about(arm) for name, arm in arms.arms.items()},
            "share_b": arms.share_b,
            "canary": arms.canary,
            "audit": self.share,
            "budget_left": int(self.auditor.budget.left),
            "labelled": history.labelled if history is not None else None,
        }

    def _about(self, arm: Arm) -> dict[str, Any]:
        audits = {result: count for (name, result), count in self.auditor.counts.items() if name == arm.name}
        return {"gate": arm.rag.gate.name, "threshold": arm.threshold, "audits": audits, **arm.watch.record}


def _drafted(trace: Trace) -> str | None:
    """The whole answer from memory, where there is one."""
    draft, asked = trace.draft, trace.asked
    is_piece = asked is not None and (bool(asked.body.get("stream")) or asked.path in FORMS)
    return draft.text if draft is not None and (draft.finished or not is_piece) else None
