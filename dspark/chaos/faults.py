"""The kinds of faults: how each is injected, shown to have taken effect, healed, and shown to be healed.

`verify` gives evidence, or raises `Unverified`: a process that is stopped says T in /proc, one that was killed was
waited for, a proxy has counted the frames that it changed, and the endpoint's own counters moved wherever the fault
must be noticed there. A fault that missed is no fault, and fails the run.

Invariants: a fault holds the locks of the links that it touches, so that evidence is its own; `heal` is called whatever
happened before it; nothing is signalled but this run's children.

Called by `nemesis`.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, ClassVar

from dspark.chaos.cluster import Cluster, Link
from dspark.chaos.endpoint_view import Metrics
from dspark.chaos.load import Load
from dspark.chaos.processes import Child, process_state
from dspark.chaos.proxy_handle import ProxyError

EFFECT_S, HEALED_S, EXIT_S, START_S = 25.0, 60.0, 20.0, 120.0
FRAMES_HOLD_S, STOPPED_HOLD_S = (1.0, 4.0), (0.0, 2.0)
PAUSE_S = 0.1
FEWEST_FRAMES = 3
Evidence = dict[str, Any]


class Unverified(Exception):
    """The fault, or its healing, cannot be shown to have taken effect."""


def wait_for(what: str, condition: Callable[[], Any], timeout_s: float) -> Any:
    """The first true value of `condition`. Raises Unverified. A reading that fails is tried again."""
    until = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            if last := condition():
                return last
        except (OSError, ValueError, KeyError, ProxyError) as error:
            last = error
        if time.monotonic() > until:
            raise Unverified(f"{what}: not within {timeout_s:.0f} s ({last!r})")
        time.sleep(PAUSE_S)


class Fault(ABC):
    """One fault on `link`. `random` is the fault's own. `links` are those that nobody else may touch meanwhile."""

    kind: ClassVar[str]

    def __init__(self, cluster: Cluster, link: Link, load: Load, random: Random) -> None:
        self.cluster, self.link, self.load, self.random = cluster, link, load, random
        self._before: Metrics | None = None

    def hold_s(self) -> float:
        """How long it goes on after it has been verified."""
        return 0.0

    @property
    def links(self) -> list[Link]:
        """In the order of their numbers, so that two faults never wait for each other."""
        return [self.link]

    def prepare(self) -> None:
        """Note the endpoint's counters for `noticed`; some kinds wait until they can hit something."""
        self._before = self.cluster.view.metrics()

    @abstractmethod
    def inject(self) -> Evidence:
        """Do it."""

    @abstractmethod
    def verify(self) -> Evidence:
        """Evidence that it took effect. Raises Unverified."""

    @abstractmethod
    def heal(self) -> None:
        """Undo it. Harmless when nothing was injected."""

    def verify_healed(self) -> Evidence:
        """Evidence that the links serve again. Raises Unverified."""
        addresses = [link.address for link in self.links]
        wait_for(
            f"{addresses} up",
            lambda: all(self.cluster.view.state(address) == "up" for address in addresses),
            HEALED_S,
        )
        return {"state": "up"}

    def noticed(self, name: str, label: str, values: Sequence[str]) -> Evidence:
        """By how much the endpoint's counters have grown since `prepare`, once one has. Raises Unverified."""
        before = self._before
        assert before is not None

        def grown() -> Evidence:
            now = self.cluster.view.metrics()
            found = {
                value: now.total(name, **{label: value}) - before.total(name, **{label: value}) for value in values
            }
            return {f"{name} {value}": count for value, count in found.items() if count > 0}

        found: Evidence = wait_for(f"the endpoint's {name} of {', '.join(values)} to grow", grown, EFFECT_S)
        return found


def _leaves_up(cluster: Cluster, link: Link) -> str:
    """The worker's state at the endpoint once it is not up any more. Raises Unverified."""

    def state() -> str:
        found = cluster.view.state(link.address)
        return "" if found == "up" else found

    found: str = wait_for(f"{link.address} not up", state, EFFECT_S)
    return found


def _kill(child: Child) -> Evidence:
    child.signal(signal.SIGKILL)
    return {"pid": child.pid}


def _was_killed(child: Child) -> Evidence:
    status = child.ended(EXIT_S)
    if status != -signal.SIGKILL:
        raise Unverified(f"{child.name} ended with {status}, not by SIGKILL")
    return {"status": status}


def _start_again(child: Child) -> None:
    """A successor on the same port, when the process has ended."""
    if child.ended(0) is not None:
        child.start()
    child.wait_ready(START_S)


class KillWorker(Fault):
    """SIGKILL; started again on the same port."""

    kind = "kill"

    def inject(self) -> Evidence:
        return _kill(self.link.worker)

    def verify(self) -> Evidence:
        return {**_was_killed(self.link.worker), "state": _leaves_up(self.cluster, self.link)}

    def heal(self) -> None:
        _start_again(self.link.worker)


class Takeover(KillWorker):
    """SIGKILL to a worker that drafts for somebody, while all others are up and nothing else goes wrong."""

    kind = "takeover"

    @property
    def links(self) -> list[Link]:
        return self.cluster.links

    def prepare(self) -> None:
        super().prepare()
        self.verify_healed()
        wait_for(f"requests at {self.link.address}", self._leases, HEALED_S)

    def inject(self) -> Evidence:
        return {"leases": self._leases(), **super().inject()}

    def _leases(self) -> int:
        return int(self.cluster.view.workers()[self.link.address]["leases"])


class KillAll(Fault):
    """SIGKILL to every worker at once: nobody is left to draft."""

    kind = "kill_all"

    @property
    def links(self) -> list[Link]:
        return self.cluster.links

    def inject(self) -> Evidence:
        return {link.worker.name: _kill(link.worker) for link in self.links}

    def verify(self) -> Evidence:
        for link in self.links:
            _was_killed(link.worker)
        wait_for("worker_up to be 0", lambda: self.cluster.view.metrics().series["worker_up"] == 0, EFFECT_S)
        return {"worker_up": 0}

    def heal(self) -> None:
        for link in self.links:
            if link.worker.ended(0) is not None:
                link.worker.start()
        for link in self.links:
            link.worker.wait_ready(START_S)


class Stopped(Fault):
    """SIGSTOP, and SIGCONT when the endpoint has noticed."""

    @abstractmethod
    def child(self) -> Child:
        """Who is stopped."""

    def inject(self) -> Evidence:
        self.child().signal(signal.SIGSTOP)
        return {"pid": self.child().pid}

    def verify(self) -> Evidence:
        pid = self.child().pid
        wait_for(f"{self.child().name} in state T", lambda: process_state(pid) == "T", EXIT_S)
        return {"process": "T", "state": _leaves_up(self.cluster, self.link)}

    def hold_s(self) -> float:
        return self.random.uniform(*STOPPED_HOLD_S)

    def heal(self) -> None:
        self.child().signal(signal.SIGCONT)

    def verify_healed(self) -> Evidence:
        pid = self.child().pid
        wait_for(f"{self.child().name} running", lambda: process_state(pid) in ("R", "S", "D"), EXIT_S)
        return super().verify_healed()


class StopWorker(Stopped):
    """The worker is stopped."""

    kind = "stop_worker"

    def child(self) -> Child:
        return self.link.worker


class StopProxy(Stopped):
    """The proxy is stopped: connections stay open and nothing passes."""

    kind = "stop_proxy"

    def child(self) -> Child:
        return self.link.proxy.child


class Frames(Fault):
    """A rule of the proxy, until enough frames are hurt; `must_notice`: causes of drops that must grow."""

    action: ClassVar[str]
    probability: ClassVar[float]
    fields: ClassVar[dict[str, Any]] = {}
    must_notice: ClassVar[tuple[str, ...]] = ()

    def rule_fields(self) -> dict[str, Any]:
        """Fields of the rule, as drawn for this fault."""
        return self.fields

    def inject(self) -> Evidence:
        self._harmed_before = self._harmed()
        fields = self.rule_fields()
        self.link.proxy.switch_on(self.action, self.probability, **fields)
        return {"action": self.action, "p": self.probability, **fields}

    def verify(self) -> Evidence:
        wait_for(f"frames to {self.action}", lambda: self._new() >= FEWEST_FRAMES, EFFECT_S)
        seen = self.noticed("wire_drops_total", "cause", self.must_notice) if self.must_notice else {}
        return {"frames": self._new(), **seen}

    def hold_s(self) -> float:
        return self.random.uniform(*FRAMES_HOLD_S)

    def heal(self) -> None:
        self.link.proxy.clear()

    def verify_healed(self) -> Evidence:
        evidence = super().verify_healed()
        frames = self._harmed()
        passed = self.link.proxy.counts()["passed"]
        wait_for("frames to pass again", lambda: self.link.proxy.counts()["passed"] > passed, EFFECT_S)
        if self._harmed() != frames:
            raise Unverified(f"the proxy still hurts frames ({self.action})")
        return evidence

    def _new(self) -> int:
        return self._harmed() - self._harmed_before

    def _harmed(self) -> int:
        return int(self.link.proxy.counts()["harmed"].get(self.action, 0))


class Delay(Frames):
    """Every frame comes later than the watchdog waits."""

    kind, action, probability = "delay", "delay", 1.0
    must_notice = ("late", "step_timed_out")

    def rule_fields(self) -> dict[str, Any]:
        return {"ms": round(self.cluster.pair.draft_deadline_ms * self.random.uniform(1.2, 2.5))}


class Drop(Frames):
    """Some frames are lost, both ways."""

    kind, action, probability = "drop", "drop", 0.25
    must_notice = ("step_timed_out", "rows_missing", "context_gap")


class Partition(Frames):
    """Every frame is lost, both ways or one way."""

    kind, action, probability = "partition", "drop", 1.0

    def rule_fields(self) -> dict[str, Any]:
        way = self.random.choice((None, "up", "down"))
        return {} if way is None else {"dir": way}

    def verify(self) -> Evidence:
        return {**super().verify(), "state": _leaves_up(self.cluster, self.link)}


class Duplicate(Frames):
    """Some answers come three times."""

    kind, action, probability = "duplicate", "duplicate", 0.5
    fields: ClassVar[dict[str, Any]] = {"copies": 3, "dir": "down"}
    must_notice = ("duplicate",)


class DuplicateUp(Frames):
    """Some requests come twice: the worker answers each once, or repeats its answer."""

    kind, action, probability = "duplicate_up", "duplicate", 0.5
    fields: ClassVar[dict[str, Any]] = {"copies": 2, "dir": "up"}


class Reorder(Frames):
    """Some frames are overtaken by two later ones."""

    kind, action, probability = "reorder", "reorder", 0.3
    fields: ClassVar[dict[str, Any]] = {"behind": 2}


class Corrupt(Frames):
    """One bit of some answers is flipped, anywhere."""

    kind, action, probability = "corrupt", "corrupt", 0.25
    fields: ClassVar[dict[str, Any]] = {"dir": "down"}
    must_notice = ("bad_prefix_crc", "bad_control_crc", "bad_body_checksum")


class CorruptUp(Frames):
    """One bit of some requests is flipped, anywhere."""

    kind, action, probability = "corrupt_up", "corrupt", 0.25
    fields: ClassVar[dict[str, Any]] = {"dir": "up"}


class Truncate(Frames):
    """Some answers are cut short."""

    kind, action, probability = "truncate", "truncate", 0.25
    fields: ClassVar[dict[str, Any]] = {"dir": "down"}
    must_notice = ("wrong_size",)


class Cut(Fault):
    """The verifier's connections are ended under it."""

    how: ClassVar[str]

    def inject(self) -> Evidence:
        before = self.link.proxy.counts()
        self._cut, self._accepted = before["cut"][self.how], before["accepted"]
        self.link.proxy.cut(self.how)
        return {}

    def verify(self) -> Evidence:
        cut = wait_for(
            f"connections to {self.how}", lambda: self.link.proxy.counts()["cut"][self.how] - self._cut, EFFECT_S
        )
        accepted = wait_for(
            "the verifier to connect anew", lambda: self.link.proxy.counts()["accepted"] - self._accepted, EFFECT_S
        )
        return {"cut": cut, "accepted": accepted}

    def heal(self) -> None:
        """The verifier connects by itself."""


class Reset(Cut):
    """RST in the middle of a stream of frames."""

    kind = how = "reset"


class HalfClose(Cut):
    """FIN one way, while the other way stays open."""

    kind = how = "half_close"


class Drain(Fault):
    """SIGTERM: the worker says that it goes, gives its leases back, ends by itself, and is started again."""

    kind = "drain"

    def inject(self) -> Evidence:
        self.link.worker.signal(signal.SIGTERM)
        return {"pid": self.link.worker.pid}

    def verify(self) -> Evidence:
        status = self.link.worker.ended(EXIT_S)
        if status != 0:
            raise Unverified(f"{self.link.worker.name} ended with {status} after SIGTERM, not with 0")
        return {"status": status, "state": _leaves_up(self.cluster, self.link)}

    def heal(self) -> None:
        _start_again(self.link.worker)


class Swap(Fault):
    """The workers file loses the worker, and gets it back with another checkpoint version: one by one, all links."""

    kind = "swap"

    @property
    def links(self) -> list[Link]:
        return self.cluster.links

    def inject(self) -> Evidence:
        self._versions = {link.number: 1 - link.version for link in self.links}
        self._swapped: list[int] = []
        return {"versions": self._versions}

    def verify(self) -> Evidence:
        for link in self.links:
            self._swap(link)
        return {"swapped": self._swapped}

    def _swap(self, link: Link) -> None:
        view = self.cluster.view
        self.cluster.list_worker(link.number, False)
        wait_for(f"{link.address} to be left", lambda: view.state(link.address) == "gone", EFFECT_S)
        link.worker.signal(signal.SIGTERM)
        if (status := link.worker.ended(EXIT_S)) != 0:
            raise Unverified(f"{link.worker.name} ended with {status} after SIGTERM, not with 0")
        self.cluster.use_version(link, self._versions[link.number])
        link.worker.start()
        link.worker.wait_ready(START_S)
        self.cluster.list_worker(link.number, True)
        wait_for(f"{link.address} up", lambda: view.state(link.address) == "up", HEALED_S)
        self._swapped.append(link.number)

    def heal(self) -> None:
        for link in self.links:
            _start_again(link.worker)
        self.cluster.list_workers({link.number for link in self.links})


class Disconnect(Fault):
    """Clients leave in the middle of their streams."""

    kind = "disconnect"
    count = 3

    @property
    def links(self) -> list[Link]:
        return []

    def inject(self) -> Evidence:
        self._left = self.load.left
        self.load.leave(self.count)
        return {"clients": self.count}

    def verify(self) -> Evidence:
        left = wait_for("clients to leave", lambda: max(0, self.load.left - self._left - self.count + 1), EFFECT_S)
        return {"left": left, **self.noticed("request_success_total", "finished_reason", ("abort",))}

    def heal(self) -> None:
        """Nothing to undo: the clients are gone."""


FAULTS: dict[str, type[Fault]] = {
    fault.kind: fault
    for fault in (
        KillWorker, StopWorker, StopProxy, Delay, Drop, Partition, Duplicate, DuplicateUp, Reorder, Corrupt, CorruptUp,
        Truncate, Reset, HalfClose, Drain, Disconnect, KillAll, Swap, Takeover,
    )
}  # fmt: skip
