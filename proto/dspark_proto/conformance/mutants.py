"""The gallery: peers with one planted bug each, which the cases must find.

A mutant is a reference peer behind a shell that changes frames on their way in or out (as if the peer did not check, or
answered wrongly), or a reference peer with one method replaced. Called by `selftest` and by tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .as_codec import Codec
from .peers import PeerMachine
from .record import Role


@dataclass(frozen=True)
class Mutant:
    """One bug. ``make`` builds a fresh one: a `PeerMachine`, or a `Codec`. ``secret``: it asks for a proof."""

    name: str
    role: Role
    bug: str
    make: Callable[[], Any] = field(repr=False)
    secret: bool = False

    def machine(self) -> PeerMachine:
        """A network peer."""
        machine: PeerMachine = self.make()
        return machine

    def codec(self) -> Codec:
        """A decoder."""
        codec: Codec = self.make()
        return codec


Filter = Callable[["Shell", bytes], list[bytes]]


class Shell:
    """A peer whose frames pass a filter. ``memory`` is the filter's own; ``inject`` sends at once."""

    def __init__(self, inner: Any, incoming: Filter | None = None, outgoing: Filter | None = None) -> None:
        self.inner = inner
        self.memory: dict[Any, Any] = {}
        self.inject: list[bytes] = []
        self._incoming = incoming
        self._outgoing = outgoing

    def start(self, now_ns: int) -> list[bytes]:
        """See `PeerMachine`."""
        return self._out(self.inner.start(now_ns))

    def receive(self, frame: bytes, now_ns: int) -> list[bytes]:
        """See `PeerMachine`."""
        frames = [frame] if self._incoming is None else self._incoming(self, frame)
        answers = [answer for one in frames for answer in self.inner.receive(one, now_ns)]
        return self._out(answers)

    def expire(self, now_ns: int) -> list[bytes]:
        """See `PeerMachine`."""
        return self._out(self.inner.expire(now_ns))

    def held(self) -> dict[str, int]:
        """See `PeerMachine`."""
        held: dict[str, int] = self.inner.held()
        return held

    def _out(self, frames: list[bytes]) -> list[bytes]:
        if self._outgoing is not None:
            frames = [out for frame in frames for out in self._outgoing(self, frame)]
        injected, self.inject = self.inject, []
        return injected + frames


def repairing(repair: Callable[[bytes], bytes]) -> Filter:
    """An incoming filter that overlooks one kind of fault."""
    return lambda shell, frame: [repair(frame)]


def gallery() -> tuple[Mutant, ...]:
    """Every mutant."""
    from .mutants_codec import codec_mutants
    from .mutants_drafter import drafter_mutants
    from .mutants_verifier import verifier_mutants

    found = (*codec_mutants(), *drafter_mutants(), *verifier_mutants())
    assert len({mutant.name for mutant in found}) == len(found), "a mutant's name is used twice"
    return found
