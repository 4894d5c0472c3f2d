"""Chaos on real processes: workers, proxies and an endpoint on loopback, faults by a seeded plan, judged on tokens.

Purpose: `dspark chaos`. The parts, in the order of a run: `cluster` starts the processes (`processes`, `proxy_handle`),
`catalogue` says what is asked, `load` asks it with the official client, `schedule` plans the faults that `nemesis`
injects, verifies and heals (`faults`), `judge` says what was wrong. docs/internals/chaos.md describes all of it.

Invariants: everything listens on loopback; every child is ended by its own process id; a fault that cannot be shown to
have taken effect fails the run. Nothing here imports a role: the roles run as processes.
"""
