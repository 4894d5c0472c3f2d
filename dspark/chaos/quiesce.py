"""After the load: what is still held somewhere although nobody asks for anything any more.

The endpoint's gauges and its view of each worker must come to zero within `QUIET_S`; then each worker is asked over its
link (STATS) how many slots it holds open for the endpoint. Called by `run`.
"""

from __future__ import annotations

import time

from dspark.chaos.cluster import Cluster, Link
from dspark.chaos.proxy_handle import ProxyError

QUIET_S, STATS_S = 15.0, 3.0
_GAUGES = ("num_requests_running", "num_requests_waiting", "pool_leases")


def leaks(cluster: Cluster, quiet_s: float = QUIET_S) -> list[str]:
    """What was not given back, in words; empty when all was."""
    until = time.monotonic() + quiet_s
    while (held := _held(cluster)) and time.monotonic() < until:
        time.sleep(0.2)
    return held


def _held(cluster: Cluster) -> list[str]:
    try:
        metrics = cluster.view.metrics()
        held = [f"{name} is {metrics.total(name):g}" for name in _GAUGES if metrics.total(name)]
        for address, worker in cluster.view.workers().items():
            if worker["leases"]:
                held.append(f"the endpoint has {worker['leases']} leases at {address}")
    except (OSError, ValueError, KeyError) as error:
        return [f"the endpoint does not say what it holds: {error!r}"]
    return held + [found for link in cluster.links if (found := _open_slots(link))]


def _open_slots(link: Link) -> str:
    try:
        link.proxy.ask_stats()
        until = time.monotonic() + STATS_S
        while not (counts := link.proxy.counts())["reports"] and time.monotonic() < until:
            time.sleep(0.05)
    except ProxyError as error:
        return str(error)
    if not counts["reports"]:
        return f"{link.worker.name} does not say what it holds"
    return f"{link.worker.name} holds {counts['slots_open']} slots open" if counts["slots_open"] else ""
