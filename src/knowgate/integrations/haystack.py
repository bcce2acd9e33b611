"""A Haystack component that sends a query to the retriever only if it needs retrieval (extra `haystack`).

The component contains only settings, so Haystack can serialize it. It loads the model and the gate when the pipeline
warms up.
"""

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
    """Haystack component that decides whether a query needs retrieval.

    The query goes to the output `retrieve` or `skip`. `need` is the gate's score, from 0 (known) to 1 (retrieve).

    Args:
        config: A settings file. Default: `knowgate.toml` in the current folder, if it exists.
        settings: Settings that override the file, such as model, gate and threshold.
        fall_open: If the gate fails, decide to retrieve instead of raising an error.

    Example:
        >>> pipeline.add_component("gate", KnowgateGate(settings={"model": "smollm"}))  # doctest: +SKIP
        >>> pipeline.connect("gate.retrieve", "retriever.query")  # doctest: +SKIP
    """

    def __init__(self, config: str | None = None, settings: dict[str, Any] | None = None, fall_open: bool = False):
        self.config = config
        self.settings = dict(settings or {})
        self.fall_open = fall_open
        self._decider: Decider | None = None

    def warm_up(self) -> None:
        """Load the model and the gate, unless they are already loaded."""
        if self._decider is None:
            self._decider = open_decider(self.config, fall_open=self.fall_open, **self.settings)

    @component.output_types(retrieve=str, skip=str, need=float, decision=dict[str, Any])  # type: ignore[untyped-decorator,unused-ignore]  # fmt: skip
    def run(self, query: str) -> dict[str, Any]:
        """Decide whether a query needs retrieval, and return the outputs of the component."""
        self.warm_up()
        assert self._decider is not None
        decision = self._decider.decide(query)
        output = "retrieve" if decision.retrieve else "skip"
        return {output: query, "need": decision.need, "decision": decision_record(decision)}

    @component.output_types(retrieve=str, skip=str, need=float, decision=dict[str, Any])  # type: ignore[untyped-decorator,unused-ignore]  # fmt: skip
    async def run_async(self, query: str) -> dict[str, Any]:
        """Decide whether a query needs retrieval, without blocking the event loop."""
        return await asyncio.to_thread(self.run, query)

    def to_dict(self) -> dict[str, Any]:
        return default_to_dict(self, config=self.config, settings=self.settings, fall_open=self.fall_open)  # type: ignore[no-any-return,unused-ignore]  # fmt: skip

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KnowgateGate:
        return default_from_dict(cls, data)  # type: ignore[no-any-return,unused-ignore]
