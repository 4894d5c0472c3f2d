"""The harness judged: every mutant must be found, and every case must find one.

A mutant vouches for a case only when it passes at least half of a sample of the cases of its role; a peer that is
simply dead would otherwise vouch for every case. Not the whole matrix is run: for each case mutants are tried until
one is found, those first that were found by its family. Called by the command line and by tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .as_codec import ReferenceCodec
from .catalogue import all_cases
from .facts import REFERENCE_SECRET, Facts, drafter_parameters, reference_facts, verifier_parameters
from .mutants import Mutant, gallery
from .record import Case, Level, Role
from .reference_drafter import ReferenceDrafter
from .reference_verifier import ReferenceVerifier
from .runner import run_case, run_codec
from .testees import InProcess, MachineFactory
from .verdicts import Behaviour, CaseResult, Unreachable

PEERS = tuple((role, secret) for role in (Role.DRAFTER, Role.VERIFIER) for secret in (b"", REFERENCE_SECRET))
"""Role and secret of each reference peer; cases that need a secret are for the ones that have it."""

SAMPLE = 24
"""About how many cases of each role a mutant is judged specific by."""


@dataclass(frozen=True)
class SelfTest:
    """``survivors``: mutants that no case found. ``idle``: cases that found no specific mutant. ``dead``: found
    mutants that fail more than half of a sample. ``wrong``: cases that the reference peers fail.
    """

    cases: tuple[Case, ...]
    mutants: tuple[Mutant, ...]
    survivors: tuple[Mutant, ...]
    idle: tuple[Case, ...]
    dead: tuple[Mutant, ...]
    wrong: tuple[CaseResult, ...] = ()

    @property
    def idle_must(self) -> tuple[Case, ...]:
        """Idle cases of level MUST."""
        return tuple(case for case in self.idle if case.level is Level.MUST)

    @property
    def holds(self) -> bool:
        """The harness can be trusted."""
        return not self.survivors and not self.idle_must and not self.wrong


def reference_factory(role: Role, facts: Facts) -> MachineFactory:
    """Fresh reference peers of a role, with the secret of ``facts``."""
    if role is Role.DRAFTER:
        return lambda: ReferenceDrafter(drafter_parameters(facts))
    return lambda: ReferenceVerifier(verifier_parameters(facts))


def reference_results(cases: Iterable[Case]) -> list[CaseResult]:
    """All cases against the reference peers, in process."""
    chosen = list(cases)
    results = run_codec(ReferenceCodec(), chosen)
    for role, secret in PEERS:
        facts = reference_facts(secret)
        testee = InProcess(role, facts, reference_factory(role, facts))
        mine = [case for case in chosen if case.role is role and case.needs_secret == bool(secret)]
        results += [run_case(testee, case) for case in mine]
    return results


def finds(case: Case, mutant: Mutant) -> bool:
    """Whether the case tells the mutant from an honest peer."""
    return not _passes(mutant, case)


def _passes(mutant: Mutant, case: Case) -> bool:
    if mutant.role is Role.CODEC:
        (result,) = run_codec(mutant.codec(), [case])
    else:
        if case.needs_secret and not mutant.secret:
            return True
        facts = reference_facts(REFERENCE_SECRET if mutant.secret else b"")
        try:
            result = run_case(InProcess(mutant.role, facts, mutant.machine), case)
        except Unreachable:
            return False
    assert result.behaviour is not Behaviour.ERROR, f"{mutant.name} {case.id}: {result.note}"
    return result.good and result.behaviour is not Behaviour.UNSUPPORTED


class _Matrix:
    """Which case found which mutant, as far as it has been tried."""

    def __init__(self, role: Role, cases: Sequence[Case], mutants: Sequence[Mutant]) -> None:
        self._chosen = {case.id for case in cases}
        self._found: dict[tuple[str, str], bool] = {}
        self._order = list(mutants)
        whole = [case for case in all_cases() if case.role is role]
        step = max(1, len(whole) // SAMPLE)
        self._sample = whole[step // 2 :: step]
        self.killed: set[str] = set()
        self.dead: dict[str, bool] = {}

    def finds(self, case: Case, mutant: Mutant) -> bool:
        """Try, once."""
        key = case.id, mutant.name
        if key not in self._found:
            self._found[key] = finds(case, mutant)
            if self._found[key] and case.id in self._chosen:
                self.killed.add(mutant.name)
        return self._found[key]

    def is_dead(self, mutant: Mutant) -> bool:
        """Whether the mutant fails more than half of a sample of all cases of its role."""
        if mutant.name not in self.dead:
            failed = sum(self.finds(case, mutant) for case in self._sample)
            self.dead[mutant.name] = 2 * failed > len(self._sample)
        return self.dead[mutant.name]

    def is_idle(self, case: Case) -> bool:
        """Whether no specific mutant is found; the one that is goes to the front of the queue."""
        for mutant in self._order:
            if self.finds(case, mutant) and not self.is_dead(mutant):
                self._order.remove(mutant)
                self._order.insert(0, mutant)
                return False
        return True


def _run_role(
    role: Role, cases: Sequence[Case], mutants: Sequence[Mutant], tell: Callable[[str], None]
) -> tuple[list[Mutant], list[Case], list[Mutant]]:
    """(survivors, idle cases, dead mutants) of one role."""
    mine = [case for case in cases if case.role is role]
    peers = [mutant for mutant in mutants if mutant.role is role]
    matrix = _Matrix(role, mine, peers)
    idle = []
    for number, case in enumerate(mine, 1):
        if matrix.is_idle(case):
            idle.append(case)
        if number % 50 == 0:
            tell(f"{role.value}: {number} of {len(mine)} cases judged")
    survivors = [
        mutant
        for mutant in peers
        if mutant.name not in matrix.killed and not any(matrix.finds(c, mutant) for c in mine)
    ]
    return survivors, idle, [mutant for mutant in peers if matrix.dead.get(mutant.name)]


def run_selftest(
    cases: Iterable[Case] | None = None,
    mutants: Iterable[Mutant] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> SelfTest:
    """Every mutant and every case."""
    chosen = tuple(all_cases() if cases is None else cases)
    peers = tuple(gallery() if mutants is None else mutants)
    wrong = tuple(r for r in reference_results(chosen) if not r.good or r.behaviour is not Behaviour.PASS)
    parts = [_run_role(role, chosen, peers, tell) for role in Role]
    survivors, idle, dead = (tuple(one for part in parts for one in part[index]) for index in range(3))
    return SelfTest(chosen, peers, survivors, idle, dead, wrong)  # type: ignore[arg-type]
