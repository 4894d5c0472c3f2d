"""Drafters with one bug each in what they take for life of a verifier. Called by `mutants_drafter`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ..hello import Hello
from ..prefix import read_prefix
from ..states import DrafterState
from . import repairs
from .facts import drafter_parameters, reference_facts
from .filters import read
from .reference_drafter import ReferenceDrafter


class _Clocked(ReferenceDrafter):
    """One wrong clock. ``kind`` says which; ``family`` are the last machines, for clocks that connections share."""

    kind = ""
    family: deque[Any]

    def __init__(self) -> None:
        super().__init__(drafter_parameters(reference_facts()))
        self.family.append(self)
        self._offered_ms = 0
        self._waits = False

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """See `PeerMachine`."""
        connection = self.connection
        heard, live = connection._heard_ns, connection.state is DrafterState.ACTIVE
        message = getattr(read(frame), "message", None)
        if isinstance(message, Hello):
            self._offered_ms, self._waits = message.heartbeat_ms, True
        else:
            self._waits = False
        answers = super().receive(frame, now_ns)
        if self.kind == "lost-told" and connection.state is DrafterState.LOST:
            connection._told_hello_required = False
        if live and not self._is_life(frame, message):
            connection._heard_ns = heard
        if live and self.kind == "junk-lives":
            connection._heard_ns = now_ns
        if self.kind == "one-clock":
            for machine in self.family:
                machine.connection._heard_ns = now_ns
        return answers

    def _is_life(self, frame: bytes, message: object) -> bool:
        match self.kind:
            case "readable-lives":
                return message is not None or not repairs.sound(frame)
            case "keyed-lives":
                return not repairs.sound(frame) or not self._is_stale(frame)
            case "pong-dead":
                return frame[6:7] != b"\x21"
            case "old-clock":
                return not isinstance(message, Hello)
        return True

    def _is_stale(self, frame: bytes) -> bool:
        prefix, slots = read_prefix(memoryview(frame)), self.connection._slots
        return prefix.slot < len(slots) and prefix.generation < slots[prefix.slot].generation

    def expire(self, now_ns: int) -> list[bytes]:
        """See `PeerMachine`."""
        heard, terms = self.connection._heard_ns, self.connection.negotiated
        if self.kind == "first-frame" and self._waits:
            return super().expire(min(now_ns, heard))
        if self.kind == "offered-interval" and terms is not None and self._offered_ms > terms.heartbeat_ms:
            return super().expire(heard + (now_ns - heard) * terms.heartbeat_ms // self._offered_ms)
        live = self.connection.state is DrafterState.ACTIVE
        frames = super().expire(now_ns)
        if self.kind == "ends-all" and live and self.connection.state is DrafterState.LOST:
            for machine in self.family:
                for slot in machine.connection._slots:
                    slot.state = type(slot.state).FREE
        return frames


def _clocked(kind: str) -> Callable[[], ReferenceDrafter]:
    made = type("Clocked", (_Clocked,), {"kind": kind, "family": deque(maxlen=4)})
    return partial(made)


KINDS: tuple[tuple[str, str, Callable[[], Any]], ...] = tuple(
    (name, bug, _clocked(name))
    for name, bug in (
        ("junk-lives", "takes junk for life"),
        ("readable-lives", "takes only messages that it can read for life"),
        ("keyed-lives", "does not take stale frames for life"),
        ("pong-dead", "does not take PONG for life"),
        ("one-clock", "has one clock for all connections"),
        ("ends-all", "ends every connection's slots when one is silent"),
        ("lost-told", "asks for HELLO again and again after silence"),
        ("offered-interval", "counts in the verifier's intervals"),
        ("first-frame", "waits for ever for the first frame after ACCEPT"),
        ("old-clock", "does not start its clock again at HELLO"),
    )
)
