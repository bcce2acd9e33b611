"""`GET /v1/learning` and `POST /v1/learning/clear`: what was found out from traffic, and to begin to count again."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from knowgate.server.learning.learner import Learner
from knowgate.server.problems import Problem, json_response
from knowgate.server.service import Service
from knowgate.server.trace import Trace


async def learning(service: Service, request: Request, trace: Trace) -> Response:
    return json_response(_learner(service).record)


async def clear_alarm(service: Service, request: Request, trace: Trace) -> Response:
    """{"arm": "a" or "b"}."""
    learner = _learner(service)
    _, body = await service.body(request)
    await learner.auditor.clear(str(body.get("arm", "a")))
    return json_response(learner.record)


def _learner(service: Service) -> Learner:
    if service.learner is None:
        raise Problem(404, "nothing is learnt from traffic here: start with --audit, --shadow or --log.", "off")
    return service.learner
