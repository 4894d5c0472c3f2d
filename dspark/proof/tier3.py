"""Tier 3: the same laws while deadlines are missed, leases are set up again, and the worker is killed and restarted.

Invariants: faults come by the clock, never by what was drafted; that they came is a fact of its own, so a run without
faults fails. The texts of two runs differ, because a fault costs a round; their law does not. Part of the composition
root, as ``served_pair``.

Called by ``prove``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from dspark.proof.observer import acceptance_test, likeness_test, neighbour_test, place_test
from dspark.proof.served_pair import PROMPT, Served
from dspark.proof.target_law import TokenLaw, Tokens, target_law
from dspark.proof.tier2 import PLAIN, Sizes, firsts, joint_tests, request_seeds
from dspark.proof.trials import Evidence

TIER = "3"
DEADLINE_MS = 250
_RUNNING_S, _STOPPED_S = 0.6, 0.4
_LATE = "deadlines missed: "
_KILLED = "worker killed and restarted: "
_JOINT = "joint of tokens 1 to 3, chi2"
_TESTS_OF_DRAFTS = ("the drafter's probability of committed tokens, z", "acceptance is sum min(p, q), z")
_TESTS = tuple(
    f"{fault}{test}"
    for fault in (_LATE, _KILLED)
    for test in (
        _JOINT,
        "places in the target rows, chi2",
        "places of consecutive tokens, chi2",
        *_TESTS_OF_DRAFTS,
    )
)
DECLARED: tuple[tuple[str, str], ...] = tuple((TIER, name) for name in _TESTS)


def run(served: Served, sizes: Sizes, seed: int, evidence: Evidence, log: Callable[[str], None]) -> None:
    """All of Tier 3 on a running pair whose deadline is ``DEADLINE_MS``."""
    law = target_law(served.pair.target, PROMPT, PLAIN, 3)
    seeds = request_seeds(seed, 6, 12)
    undisturbed = served.many_in_lane("match", seeds, 48, 0)
    log(f"tier 3: {sizes.short} requests and {sizes.long} texts while the worker stutters")
    _late(served, law, sizes, seed, evidence)
    log("tier 3: the worker is killed and restarted under requests")
    _killed(served, law, sizes, seed, evidence)
    with served.stutter(_RUNNING_S, _STOPPED_S):
        disturbed = served.many_in_lane("match", seeds, 48, 0)
    evidence.fact(
        TIER, "match lane: the text of a seed is the same with and without faults", undisturbed == disturbed,
        f"{len(seeds)} texts of 48 tokens",
    )  # fmt: skip


def _late(served: Served, law: TokenLaw, sizes: Sizes, seed: int, evidence: Evidence) -> None:
    before = served.count("proposal_discards_total", reason="late")
    accepted = served.count("spec_decode_num_accepted_tokens_total")
    served.observer.clear()
    with served.stutter(_RUNNING_S, _STOPPED_S):
        short = firsts(served.many(request_seeds(seed, 7, sizes.short), max_tokens=4, **PLAIN.body()), 3)
        served.many(request_seeds(seed, 8, sizes.long), max_tokens=sizes.length, temperature=1.0)
    _tests(served, _LATE, short, law, evidence)
    late = served.count("proposal_discards_total", reason="late") - before
    evidence.fact(TIER, "deadlines were missed", late > 0, f"{late:.0f} proposals came late and were discarded")
    taken = served.count("spec_decode_num_accepted_tokens_total") - accepted
    evidence.fact(TIER, "drafts were accepted between missed deadlines", taken > 0, f"{taken:.0f} accepted")


def _tests(served: Served, fault: str, short: Sequence[Tokens], law: TokenLaw, evidence: Evidence) -> None:
    committed, judged = list(served.observer.committed), list(served.observer.judged)
    joint_tests(evidence, TIER, fault, short, law, ("chi2",))
    names = [f"{fault}places in the target rows, chi2", f"{fault}places of consecutive tokens, chi2"]
    for name, test in zip(names, (place_test, neighbour_test), strict=True):
        evidence.test(TIER, name, len(committed), partial(test, committed))
    likeness, acceptance = (f"{fault}{test}" for test in _TESTS_OF_DRAFTS)
    evidence.test(TIER, likeness, len(judged), lambda: likeness_test(judged))
    evidence.test(TIER, acceptance, len(judged), lambda: acceptance_test(judged))


def _killed(served: Served, law: TokenLaw, sizes: Sizes, seed: int, evidence: Evidence) -> None:
    """Requests go on all the time; the process dies among them, and its successor is used before they end."""
    served.wait_up()
    reconnects = served.count("worker_reconnects_total")
    served.observer.clear()
    killer = threading.Timer(0.5, served.kill_worker)
    killer.start()
    short: list[Tokens] = []
    series = iter(request_seeds(seed, 9, 1_000_000))
    # Below the requests that there would be time for while a process starts, above what a cell needs.
    half = sizes.short // 2
    while len(short) < half or not killer.finished.is_set():
        short += firsts(served.many([next(series) for _ in range(50)], max_tokens=4, **PLAIN.body()), 3)
    killer.join()
    _wait_for_successor(served, reconnects)
    after = served.count("spec_decode_num_accepted_tokens_total")
    short += firsts(served.many([next(series) for _ in range(half)], max_tokens=4, **PLAIN.body()), 3)
    served.many([next(series) for _ in range(sizes.long)], max_tokens=sizes.length, temperature=1.0)
    _tests(served, _KILLED, short, law, evidence)
    came = served.count("worker_reconnects_total") - reconnects
    evidence.fact(TIER, "the link reconnected to a new worker", came >= 1, f"{came:.0f} reconnects")
    taken = served.count("spec_decode_num_accepted_tokens_total") - after
    evidence.fact(TIER, "drafts of the new worker were accepted", taken > 0, f"{taken:.0f} accepted")


def _wait_for_successor(served: Served, reconnects: float) -> None:
    """Until the link is up with another process. The facts say so when it did not come."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if served.link_up and served.count("worker_reconnects_total") > reconnects:
            return
        # The link turns with the engine, which turns for requests.
        served.tokens(max_tokens=2, temperature=0.0)
        time.sleep(0.05)
