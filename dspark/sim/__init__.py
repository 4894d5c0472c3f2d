"""The deterministic simulator: production protocol classes under a virtual clock and a seeded network.

A *world* is one or two Spark groups and one to three workers in one thread. The connections, the draft link and pool,
leases, validation, audit, acceptance and the rank agreement are the production classes; clock, network, target and
drafter are toys. Invariants: everything follows from (seed, world); nothing reads a real clock, an address, a hash
order or a global random number; every consumed token is judged by an oracle that shares no code with what it judges.
`docs/internals/simulator.md` says what is modelled. Called by `dspark sim` and by tests, never by a role.
"""
