"""Parses the spec of a Ray cluster, connects to it, and decides how many workers to start.

A spec is 'ray' (a running cluster), 'ray:local' (a new one on this machine) or 'ray:HOST:PORT'. Worker options follow
a '?', as in 'ray:local?workers=2'.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from knowgate.core import VERSION
from knowgate.core.registry import parse_options, split_spec
from knowgate.core.validation import check_number
from knowgate.errors import BadSetting, ServerError, require_extra

LOCAL_CLUSTER, ANY_CLUSTER = "local", "auto"
CONNECT_TIMEOUT = 5.0  # seconds; Ray itself would try for minutes
OBJECT_STORE_BYTES = 256 << 20  # shared memory of a cluster started here; enough, since rows arrive in batches
MAX_WORKERS = 10_000
START_HINT = (
    "Start a cluster with `ray start`, and set runner='ray:HOST:PORT'. Or use only this machine: runner='ray:local'"
)


@dataclass(frozen=True)
class WorkerResources:
    """Requested number of workers, and the resources of each.

    Attributes:
        workers: Number of workers. 0 means one per GPU, or one per machine if the cluster has no GPUs.
        gpus: GPUs per worker; 0.5 lets two workers share a GPU. None means one if the cluster has GPUs, otherwise none.
        cpus: CPU cores per worker. 0 shares the cores evenly between workers.
    """

    workers: int = 0
    gpus: float | None = None
    cpus: float = 0.0

    def __post_init__(self) -> None:
        """Raise BadSetting if a number is negative or too large."""
        check_number(self.workers, "the runner's 'workers'", maximum=MAX_WORKERS)
        check_number(self.cpus, "the runner's 'cpus'", maximum=MAX_WORKERS)
        if self.gpus is not None:
            check_number(self.gpus, "the runner's 'gpus'", maximum=MAX_WORKERS)


@dataclass(frozen=True)
class RayCluster:
    """The address of a Ray cluster, and the workers to start on it."""

    address: str = ANY_CLUSTER
    resources: WorkerResources = WorkerResources()

    @classmethod
    def from_spec(cls, spec: str) -> RayCluster:
        """Parse a runner spec: 'ray', 'ray:local' or 'ray:HOST:PORT', with options such as '?workers=8&gpus=0.5'."""
        location, _, query = spec.partition("?")
        name, address = split_spec(location)
        if name != "ray":
            raise BadSetting(f"unknown runner '{spec}'. Use local, ray, ray:local or ray:HOST:PORT.")
        options = ",".join(f"{key}={value}" for key, value in parse_qsl(query, keep_blank_values=True))
        address = address or ANY_CLUSTER
        if address not in (LOCAL_CLUSTER, ANY_CLUSTER):
            _parse_address(address)  # raises BadSetting if it is invalid
        return cls(address, WorkerResources(**parse_options(WorkerResources, options, f"runner '{location}'")))

    @contextlib.contextmanager
    def connect(self) -> Iterator[Any]:
        """Connect to the cluster and yield the `ray` module. A connection that existed before stays open."""
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
        """Start a local cluster, or connect to a running one."""
        quiet = {"log_to_driver": False, "configure_logging": False}
        if self.address == LOCAL_CLUSTER:
            ray.init(address="local", include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, **quiet)
            return
        if self.address != ANY_CLUSTER:
            _check_listening(self.address)
        try:
            ray.init(address=self.address, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300].rstrip(".")
            cluster = "on this machine or at RAY_ADDRESS" if self.address == ANY_CLUSTER else self.address
            raise ServerError(f"cannot connect to a Ray cluster ({cluster}): {reason}. {START_HINT}") from None


def import_ray() -> Any:
    """Import Ray without authentication and usage reports. Authentication would write a key into the home folder."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with require_extra("the Ray runner", "ray"):
        import ray
    return ray


def _parse_address(address: str) -> tuple[str, int]:
    """Parse 'HOST:PORT'. An IPv6 host may be in brackets."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        message = f"invalid address of a Ray cluster: '{address}'. Write ray:HOST:PORT, for example ray:10.0.0.5:6379."
        raise BadSetting(message)
    return host.strip("[]"), int(port)


def _check_listening(address: str) -> None:
    """Raise ServerError if nothing listens at the address. Ray would keep trying for minutes."""
    try:
        socket.create_connection(_parse_address(address), timeout=CONNECT_TIMEOUT).close()
    except OSError as error:
        raise ServerError(f"no Ray cluster answers at {address} ({error.strerror or error}). {START_HINT}") from None


# --- nodes and workers ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterNode:
    """A machine of the cluster, with its numbers of CPU cores and GPUs."""

    id: str
    host: str
    cpus: float
    gpus: float

    def count_workers(self, cpus: float, gpus: float) -> int:
        """Return how many workers with these cores and GPUs fit on the machine."""
        available_and_needed = ((self.cpus, cpus), (self.gpus, gpus))
        # In floating point, 0.3 / 0.1 is slightly less than 3, so a small number is added before rounding down.
        counts = [int(available / needed + 1e-9) for available, needed in available_and_needed if needed]
        return min(counts, default=MAX_WORKERS)


def list_nodes(ray: Any) -> list[ClusterNode]:
    """List the living machines of the connected cluster."""
    nodes = []
    for node in ray.nodes():
        if node["Alive"]:
            cpus = float(node["Resources"].get("CPU", 0.0))
            gpus = float(node["Resources"].get("GPU", 0.0))
            nodes.append(ClusterNode(node["NodeID"], node["NodeManagerAddress"], cpus, gpus))
    return nodes


def plan_workers(resources: WorkerResources, nodes: Sequence[ClusterNode]) -> WorkerResources:
    """Decide how many workers to start, and how many cores and GPUs each gets.

    Args:
        resources: What the user has asked for. Numbers left open (0 or None) are chosen here.
        nodes: The machines of the cluster.
    """
    has_gpus = any(node.gpus >= 1 for node in nodes)
    gpus = resources.gpus if resources.gpus is not None else float(has_gpus)
    n_workers = resources.workers or _count_default_workers(nodes, gpus)
    cpus = resources.cpus or _share_cores(nodes, gpus, n_workers)
    capacity = sum(node.count_workers(cpus, gpus) for node in nodes)
    if n_workers > capacity:
        total = f"{sum(node.cpus for node in nodes):g} cores and {sum(node.gpus for node in nodes):g} GPUs"
        raise BadSetting(
            f"the {len(nodes)} machines of the Ray cluster have {total}, too little for {n_workers} workers. Each worker needs "
            f"{cpus:g} cores and {gpus:g} GPUs. Use fewer or smaller workers: runner='ray:...?workers={max(capacity, 1)}'"
        )
    return WorkerResources(n_workers, gpus, cpus)


def _count_default_workers(nodes: Sequence[ClusterNode], gpus: float) -> int:
    """Return the default number of workers: as many as the GPUs allow, or one per machine without GPUs."""
    if gpus:
        return max(1, sum(node.count_workers(0, gpus) for node in nodes))
    return max(1, sum(node.cpus >= 1 for node in nodes))


def _share_cores(nodes: Sequence[ClusterNode], gpus: float, n_workers: int) -> float:
    """Return the most cores per worker with which all workers run at once. With a GPU, one core is enough."""
    if gpus:
        return 1.0
    max_cores = int(max((node.cpus for node in nodes), default=1))
    for cpus in range(max_cores, 1, -1):
        capacity = sum(node.count_workers(cpus, 0) for node in nodes)
        if capacity >= n_workers:
            return float(cpus)
    return 1.0


def check_versions(ray: Any, nodes: Sequence[ClusterNode]) -> None:
    """Check that all machines of the cluster have the same version of knowgate."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Ray sends the code of a nested function. A function of this module would be imported on the other machine, which
    # fails if knowgate is missing there.
    def get_version() -> str:
        """Return the version of knowgate on the other machine, or 'none'."""
        try:
            from knowgate import core
        except ImportError:
            return "none"
        return str(core.VERSION)

    task = ray.remote(num_cpus=0, max_retries=2)(get_version)
    strategies = [NodeAffinitySchedulingStrategy(node.id, soft=False) for node in nodes]
    versions = ray.get([task.options(scheduling_strategy=strategy).remote() for strategy in strategies])
    others = [f"{node.host}: {version}" for node, version in zip(nodes, versions, strict=True) if version != VERSION]
    if others:
        raise BadSetting(
            f"some machines of the Ray cluster have another version of knowgate: {'; '.join(others)}. Install version {VERSION} "
            f"there: pip install 'knowgate=={VERSION}'"
        )
