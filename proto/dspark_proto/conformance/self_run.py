"""`run --self`: peers of this process under all cases of their side, in process and over transports.

Over real transports testees are run beside each other, for most of a case is waiting there. A transport that is not
available here is named with its reason. Called by the command line, which adds the product's peers, and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from .as_codec import ReferenceCodec
from .catalogue import all_cases
from .doors import SCHEMES, unavailable
from .facts import Facts, reference_facts
from .peers import VerifierHost
from .record import Case, Role
from .runner import Report, merged, run, run_codec
from .selftest import PEERS, reference_factory
from .testees import InProcess, MachineFactory, ServedDrafter, ServedVerifier, Testee
from .verdicts import CaseResult

QUIET_MS = 10
"""How long the harness listens after a PONG on a real transport."""

PARTS = 3
"""A peer's cases over a real transport are dealt out to as many testees."""

BESIDE = 12
"""Testees on real transports at a time."""

Open = Callable[[str, Facts], Testee]
"""Makes a testee for a transport; its facts may differ from the peer's in times only."""


@dataclass(frozen=True)
class Peer:
    """One of the run's testees. ``transports``: where it can be run; ``skips``: tags of cases that it is not asked over
    a real transport, where their waits are real. In process it is asked everything.
    """

    name: str
    role: Role
    facts: Facts
    open: Open
    transports: tuple[str, ...] = SCHEMES
    skips: frozenset[str] = frozenset({"slow"})

    def cases(self, cases: Iterable[Case], transport: str) -> list[Case]:
        """Those that it is asked over ``transport``."""
        skips: frozenset[str] = frozenset() if transport == "inproc" else self.skips
        secret = bool(self.facts.secret)
        return [c for c in cases if c.role is self.role and c.needs_secret == secret and not skips & set(c.tags)]

    def run(self, cases: Iterable[Case], transport: str, on_result: Callable[[CaseResult], None]) -> list[CaseResult]:
        """Its results on one transport. Raises `Unreachable`."""
        mine = self.cases(cases, transport)
        if not mine:
            return []
        facts = self.facts if transport == "inproc" else replace(self.facts, quiet_ms=QUIET_MS)
        testee = self.open(transport, facts)
        try:
            return [replace(result, testee=self.name) for result in run(testee, mine, on_result)]
        finally:
            testee.close()


def reference_peers() -> tuple[Peer, ...]:
    """The peers of this package: each role, with and without a secret."""
    found = []
    for role, secret in PEERS:
        facts = reference_facts(secret)
        make = reference_factory(role, facts)
        found.append(Peer(f"reference {role}", role, facts, _opener(role, make)))
    return tuple(found)


def _opener(role: Role, make: MachineFactory) -> Open:
    def opened(transport: str, facts: Facts) -> Testee:
        if transport == "inproc":
            return InProcess(role, facts, make)
        if role is Role.DRAFTER:
            return ServedDrafter(transport, facts, make)
        return ServedVerifier(transport, facts, lambda client: VerifierHost(client, make()))

    return opened


def run_self(
    cases: Iterable[Case] | None = None,
    transports: Iterable[str] = SCHEMES,
    on_result: Callable[[CaseResult], None] = lambda result: None,
    peers: Sequence[Peer] | None = None,
    name: str = "reference peers",
) -> Report:
    """All ``peers`` on all ``transports``, and the codec."""
    chosen = list(all_cases() if cases is None else cases)
    asked = reference_peers() if peers is None else peers
    missing = {transport: reason for transport in transports if (reason := unavailable(transport))}
    usable = [transport for transport in transports if transport not in missing]
    pairs = [(peer, transport) for transport in usable for peer in asked if transport in peer.transports]
    parts = [run_codec(ReferenceCodec(), chosen)]
    parts += [peer.run(chosen, transport, on_result) for peer, transport in pairs if transport == "inproc"]
    with ThreadPoolExecutor(BESIDE) as pool:
        over = [pair for pair in pairs if pair[1] != "inproc"]
        real = [
            pool.submit(peer.run, peer.cases(chosen, transport)[part::PARTS], transport, on_result)
            for peer, transport in over
            for part in range(PARTS)
        ]
        parts += [one.result() for one in real]
    return merged(name, parts, missing)
