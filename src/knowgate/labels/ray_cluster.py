"""Which Ray cluster, and how many workers on it: 'ray', 'ray:local' or 'ray:HOST:PORT', with options after a '?'.

Knows Ray; nothing of what the workers do.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from knowgate.core import VERSION
from knowgate.core.registry import parse_options, split_spec
from knowgate.core.validation import check_number
from knowgate.errors import BadSetting, MissingExtra, ServerError

LOCAL_CLUSTER, ANY_CLUSTER = "local", "auto"
CONNECT_TIMEOUT = 5.0  # seconds for an address to answer; Ray itself would try for minutes
OBJECT_STORE_BYTES = (
    256 << 20
)  # bytes of shared memory for a cluster of our own: rows and states pass through it, batch by batch
MAX_WORKERS = 10_000  # workers
START_HINT = (
    "Start one there (`ray start --head`), name it (--runner ray:HOST:PORT), or use this machine: --runner ray:local"
)


@dataclass(frozen=True)
class WorkerResources:
    """What each worker gets. workers: 0 for one per GPU, or per machine where there are none.

    gpus: the share of a GPU that one worker takes, such as 0.5; None for a whole one where there are any.
    cpus: cores of one worker; 0 for as many as there are for each.
    """

    workers: int = 0
    gpus: float | None = None
    cpus: float = 0.0

    def __post_init__(self) -> None:
        check_number(self.workers, "the runner's 'workers'", maximum=MAX_WORKERS)
        check_number(self.cpus, "the runner's 'cpus'", maximum=MAX_WORKERS)
        if self.gpus is not None:
            check_number(self.gpus, "the runner's 'gpus'", maximum=MAX_WORKERS)


@dataclass(frozen=True)
class RayCluster:
    """Where workers run."""

    address: str = ANY_CLUSTER
    share: WorkerResources = WorkerResources()

    @classmethod
    def from_spec(cls, spec: str) -> RayCluster:
        """'ray', 'ray:local?workers=2' or 'ray:HOST:PORT?workers=8&gpus=0.5'."""
        place, _, query = spec.partition("?")
        name, address = split_spec(place)
        if name != "ray":
            raise BadSetting(f"unknown runner '{spec}'. Known: local, ray, ray:local, ray:HOST:PORT.")
        options = ",".join(f"{key}={value}" for key, value in parse_qsl(query, keep_blank_values=True))
        if query and not options:
            raise BadSetting(f"the runner '{spec}' has no options after '?'. Write: ray:local?workers=2&gpus=0.5")
        address = address or ANY_CLUSTER
        if address not in (LOCAL_CLUSTER, ANY_CLUSTER):
            _host_and_port(address)
        return cls(address, WorkerResources(**parse_options(WorkerResources, options, f"runner '{place}'")))

    @contextlib.contextmanager
    def connected(self) -> Iterator[Any]:
        """Ray, connected; a program that is connected already stays so."""
        ray = import_ray()
        if ray.is_initialized():
            yield ray
            return
        self._connect(ray)
        try:
            yield ray
        finally:
            ray.shutdown()

    def _connect(self, ray: Any) -> None:
        quiet = {"log_to_driver": False, "configure_logging": False}
        if self.address == LOCAL_CLUSTER:
            own = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
            ray.init(address="local", **own, **quiet)
            return
        if self.address != ANY_CLUSTER:
            _check_listening(self.address)
        try:
            ray.init(address=self.address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            said = " ".join(str(error).split())[:300].rstrip(".")
            raise ServerError(f"cannot join a Ray cluster ({_shown(self.address)}): {said}. {START_HINT}") from None


def import_ray() -> Any:
    """Ray as we want it: no key written into the home folder, no report to its makers, unless someone wishes it."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise MissingExtra("--runner ray", "ray") from None
    return ray


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise BadSetting(f"'{address}' is no address of a Ray cluster. Write ray:HOST:PORT, such as ray:10.0.0.5:6379.")
    return host.strip("[]"), int(port)


def _check_listening(address: str) -> None:
    try:
        socket.create_connection(_host_and_port(address), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ServerError(f"no Ray cluster answers at {address} ({error.strerror or error}). {START_HINT}") from None


def _shown(address: str) -> str:
    return "one that runs here or that RAY_ADDRESS names" if address == ANY_CLUSTER else address


# --- what there is on it --------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterNode:
    """A node of the cluster."""

    id: str
    host: str
    cpus: float
    gpus: float

    def room(self, cpus: float, gpus: float) -> int:
        """How many workers of this size it can hold."""
        rooms = [int(have / each + 1e-9) for have, each in ((self.cpus, cpus), (self.gpus, gpus)) if each]
        return min(rooms, default=MAX_WORKERS)


@dataclass(frozen=True)
class WorkerPool:
    """How many workers, and what each takes."""

    size: int
    cpus: float
    gpus: float


def list_nodes(ray: Any) -> list[ClusterNode]:
    found = [node for node in ray.nodes() if node["Alive"]]
    return [
        ClusterNode(
            node["NodeID"], node["NodeManagerAddress"], *(_amount(node["Resources"], key) for key in ("CPU", "GPU"))
        )
        for node in found
    ]


def _amount(resources: Mapping[str, float], key: str) -> float:
    return float(resources.get(key, 0.0))


def plan_workers(share: WorkerResources, nodes: Sequence[ClusterNode]) -> WorkerPool:
    """What a share comes to on these machines; more than they can hold is refused: it would wait for ever."""
    has_gpus = any(node.gpus >= 1 for node in nodes)
    gpus = share.gpus if share.gpus is not None else float(has_gpus)
    size = share.workers or _natural(nodes, gpus)
    cpus = share.cpus or _cores(nodes, gpus, size)
    room = sum(node.room(cpus, gpus) for node in nodes)
    if size > room:
        have = f"{sum(node.cpus for node in nodes):g} cores and {sum(node.gpus for node in nodes):g} GPUs"
        raise BadSetting(
            f"{size} workers with {cpus:g} cores and {gpus:g} GPUs each do not fit the Ray cluster, whose "
            f"{len(nodes)} machines have {have}: {room} would. Ask for fewer or smaller ones: "
            f"--runner 'ray:...?workers={max(room, 1)}'"
        )
    return WorkerPool(size, cpus, gpus)


def _natural(nodes: Sequence[ClusterNode], gpus: float) -> int:
    """As many as the GPUs hold, or one on each machine."""
    return max(1, sum(node.room(0, gpus) for node in nodes)) if gpus else max(1, sum(node.cpus >= 1 for node in nodes))


def _cores(nodes: Sequence[ClusterNode], gpus: float, size: int) -> float:
    """The most whole cores that let all of them run at once; beside a GPU, one is enough."""
    if gpus:
        return 1.0
    most = int(max((node.cpus for node in nodes), default=1))
    return float(next((c for c in range(most, 1, -1) if sum(node.room(c, 0) for node in nodes) >= size), 1))


def check_versions(ray: Any, nodes: Sequence[ClusterNode]) -> None:
    """Every machine must have this knowgate: another one would make other rows, or fail half-way."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = ray.remote(num_cpus=0, max_retries=2)(_version_teller())
    told = ray.get(
        [
            asked.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote()
            for node in nodes
        ]
    )
    other = [
        f"{node.host}: {version or 'none'}" for node, version in zip(nodes, told, strict=True) if version != VERSION
    ]
    if other:
        raise BadSetting(
            f"the machines of the Ray cluster have other versions of knowgate than this one ({VERSION}): "
            f"{'; '.join(other)}. Install the same there: pip install 'knowgate=={VERSION}'"
        )


def _version_teller() -> Any:
    """A function made here travels as code, not as a name: it runs where knowgate is missing, too."""

    def told() -> str:
        try:
            from knowgate import core as version
        except ImportError:
            return ""
        return version.VERSION

    return told
