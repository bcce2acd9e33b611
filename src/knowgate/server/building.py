"""From settings to a server whose parts are loaded and found to work together."""

from __future__ import annotations

from knowgate.errors import BadSetting
from knowgate.pipeline import AdaptiveRAG, Settings, build_pipeline
from knowgate.server.drafts import AskedModel
from knowgate.server.forwarding import Forwarding
from knowgate.server.gatekeeper import Gatekeeper
from knowgate.server.local_chat import LocalChat
from knowgate.server.options import ServeOptions
from knowgate.server.remembering import RememberingRetriever
from knowgate.server.service import Service
from knowgate.server.upstreams import Upstreams, read_address
from knowgate.types import Model


def build_service(settings: Settings, options: ServeOptions) -> Service:
    """Everything loaded and found to work together."""
    service = _build_parts(settings, options)
    service.learn(settings)
    return service


def _build_parts(settings: Settings, options: ServeOptions) -> Service:
    keeper = build_keeper(settings, options)
    if options.upstream is None:
        return Service(options, keeper, local=LocalChat(keeper, options))
    addresses = [read_address(written) for written in options.upstream]
    upstream = Upstreams(addresses, passes_keys=options.keys is None)
    return Service(options, keeper, forwarding=Forwarding(upstream, keeper, options))


def build_keeper(settings: Settings, options: ServeOptions, model: Model | None = None) -> Gatekeeper:
    """Who decides and looks up. model: one that is loaded already."""
    if options.upstream is None:
        if options.way is not None:
            raise BadSetting("--way belongs to --upstream; a model in this process needs one pass.")
        rag = _build_rag(settings, model)
        return Gatekeeper(rag, seconds=options.gate_seconds, strict=options.strict)
    asked = model or AskedModel(read_address(options.upstream[0]).url, options.upstream_model)
    rag = _build_rag(settings, asked)
    keeper = Gatekeeper(rag, seconds=options.gate_seconds, strict=options.strict)
    if options.way == "question" and not keeper.want_of(rag).is_nothing:
        raise BadSetting(f"gate '{rag.gate.name}' reads a draft: use --way draft or race, or a gate that reads none.")
    if rag.weighing is not None and settings.arbiter is not None and keeper.want_of(rag).is_nothing:
        raise BadSetting(f"--arbiter weighs drafts, and the gate '{rag.gate.name}' reads none: leave it away.")
    return keeper


def _build_rag(settings: Settings, model: Model | None) -> AdaptiveRAG:
    rag = build_pipeline(settings, model=model)
    return rag if rag.retriever is None else rag.altered(retriever=RememberingRetriever(rag.retriever))
