"""Haystack: a component before the retriever, with outputs `retrieve` and `skip`, one of which carries the query on
(extra `haystack`). Serialisable: it is made of settings, and opens model and gate when the pipeline warms up."""

from __future__ import annotations

import asyncio
from typing import Any

from knowgate.core.frameworks import check_framework_version
from knowgate.integrations.decider import Decider, open_decider
from knowgate.pipeline.answer_json import decision_record

check_framework_version("haystack-ai", "haystack", majors=("2", "3"))

from haystack import component, default_from_dict, default_to_dict  # noqa: E402


@component
class KnowgateGate:
    """The query goes on by `retrieve` where it must be looked up, by `skip` where not; `need` and `decision` always.

    config: of `knowgate.toml`. settings: model, gate, threshold, ...; as in `knowgate decide`.

    Example:
        >>> pipeline.add_component("gate", KnowgateGate(settings={"model": "smollm"}))  # doctest: +SKIP
        >>> pipeline.connect("gate.retrieve", "retriever.query")  # doctest: +SKIP
    """

    def __init__(self, config: str | None = None, settings: dict[str, Any] | None = None, fall_open: bool = False):
        self.config, self.settings, self.fall_open = config, dict(settings or {}), fall_open
        self._decider: Decider | None = None

    def warm_up(self) -> None:
        if self._decider is None:
            self._decider = open_decider(self.config, fall_open=self.fall_open, **self.settings)

    @component.output_types(retrieve=str, skip=str, need=float, decision=dict[str, Any])  # type: ignore[untyped-decorator,unused-ignore]  # fmt: skip
    def run(self, query: str) -> dict[str, Any]:
        """Which way the query goes."""
        self.warm_up()
        assert self._decider is not None
        decision = self._decider.decide(query)
        way = "retrieve" if decision.retrieve else "skip"
        return {way: query, "need": decision.need, "decision": decision_record(decision)}

    @component.output_types(retrieve=str, skip=str, need=float, decision=dict[str, Any])  # type: ignore[untyped-decorator,unused-ignore]  # fmt: skip
    async def run_async(self, query: str) -> dict[str, Any]:
        """The same, beside an event loop."""
        return await asyncio.to_thread(self.run, query)

    def to_dict(self) -> dict[str, Any]:
        made: dict[str, Any] = default_to_dict(
            self, config=self.config, settings=self.settings, fall_open=self.fall_open
        )
        return made

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KnowgateGate:
        made: KnowgateGate = default_from_dict(cls, data)
        return made
