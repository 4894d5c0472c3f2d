"""The proxy process: a relay for socket faults, behind it a man in the middle for frame faults, then the worker.

    verifier -- TCP --> Relay -- TCP --> Middle -- StatsProbe --> worker

Reads commands from standard input and answers each on standard output, one JSON object a line; ends at the end of its
input. Commands: ``rule`` (switch a rule on: `action` and the fields of `capture.faults.Rule`), ``clear`` (all rules
off), ``cut`` (`how`: see `relay`), ``ask`` (STATS of every connection), ``counts``. Every answer holds all counters.

Invariants: without a rule every frame passes unchanged and in order; what was done to how many frames is counted where
it was done. After a cut the man in the middle is replaced, so that dead connections hold nothing.

Started by `proxy_handle` as ``python -m dspark.chaos.proxy``.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import threading
import time
from collections import Counter
from typing import Any

from dspark.chaos.probe import StatsProbe
from dspark.chaos.relay import Relay
from dspark_proto.capture import Direction, Fault, Middle, Rule
from dspark_proto.capture.faults import Action
from dspark_proto.transports import ClientTransport, open_client, open_server

READY_PREFIX = "proxy ready "
REPLACED_AFTER_S = 1.0
"""How long a replaced man in the middle still serves the connections that are being cut."""


class Proxy:
    """All of the process but its standard streams. Owned by one thread."""

    def __init__(self, worker: str, seed: int) -> None:
        """`worker`: address of the worker. `seed`: of which frames a rule with a probability hurts."""
        self._worker, self._seed = worker, seed
        self._rules = {action: Rule(action, p=0.0) for action in Action}
        self._harmed: Counter[str] = Counter()
        self._passed_before = self._undeliverable_before = 0
        self._probes: list[StatsProbe] = []
        self._middle = self._new_middle()
        self._replaced: list[tuple[Middle, float]] = []
        self._relay = Relay(_port(self._middle))

    @property
    def endpoint(self) -> str:
        """Where verifiers connect to."""
        return f"tcp://127.0.0.1:{self._relay.port}"

    def _new_middle(self) -> Middle:
        self._probes = []
        rules = list(self._rules.values())
        return Middle(open_server("tcp://127.0.0.1:0"), self._connect, rules, self._seed, log=self._count)

    def _connect(self) -> ClientTransport:
        probe = StatsProbe(open_client(self._worker))
        self._probes.append(probe)
        return probe

    def _count(self, fault: Fault) -> None:
        self._harmed[fault.rule] += 1

    def turn(self) -> None:
        """Pass what has arrived; drop what was replaced long enough ago."""
        self._middle.turn()
        for middle, until in list(self._replaced):
            middle.turn(0)
            if time.monotonic() > until:
                self._replaced.remove((middle, until))
                self._passed_before += middle.passed
                self._undeliverable_before += middle.undeliverable
                middle.close()

    def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command; all counters, and the command's `id`.

        Raises KeyError, TypeError or ValueError for a command that is not known.
        """
        number = command.pop("id")
        match command.pop("do"):
            case "rule":
                self._switch_on(**command)
            case "clear":
                for rule in self._rules.values():
                    rule.p = 0.0
            case "cut":
                self._cut(command["how"])
            case "ask":
                for probe in self._probes:
                    probe.ask()
            case "counts":
                pass
            case other:
                raise ValueError(f"{other!r} is no command")
        return {"id": number, **self._counts()}

    def _switch_on(self, action: str, p: float, dir: str | None = None, **fields: int) -> None:
        rule = self._rules[Action(action)]
        for name, value in fields.items():
            setattr(rule, name, value)
        rule.direction = Direction[dir.upper()] if dir else None
        rule.p = p

    def _cut(self, how: str) -> None:
        old = self._middle
        self._middle = self._new_middle()
        self._relay.target_port = _port(self._middle)
        self._replaced.append((old, time.monotonic() + REPLACED_AFTER_S))
        self._relay.cut(how)

    def _counts(self) -> dict[str, Any]:
        middles = [self._middle, *(middle for middle, _ in self._replaced)]
        reports = [probe.report for probe in self._probes if probe.report is not None]
        return {
            "harmed": dict(self._harmed),
            "passed": self._passed_before + sum(middle.passed for middle in middles),
            "undeliverable": self._undeliverable_before + sum(middle.undeliverable for middle in middles),
            "accepted": self._relay.accepted,
            "cut": dict(self._relay.cut_connections),
            "reports": len(reports),
            "slots_open": sum(report.slots_open for report in reports),
        }

    def close(self) -> None:
        """End everything."""
        for middle in [self._middle, *(middle for middle, _ in self._replaced)]:
            middle.close()
        self._relay.close()


def _port(middle: Middle) -> int:
    return int(middle.endpoint.rpartition(":")[2])


def _read_commands(commands: queue.SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        commands.put(line)
    commands.put(None)


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    proxy = Proxy(options.worker, options.seed)
    commands: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()
    print(READY_PREFIX + proxy.endpoint, flush=True)
    try:
        while True:
            proxy.turn()
            if commands.empty():
                continue
            line = commands.get()
            if line is None:
                return
            print(json.dumps(proxy.do(json.loads(line))), flush=True)
    finally:
        proxy.close()


if __name__ == "__main__":
    main()
