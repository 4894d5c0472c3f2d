"""The vocabulary of ledger traces: what happened to a slot, a staging block, or a group of ranks.

An event is a small tuple. ``place`` names whose ledger it is: one side of one connection ("spark0-worker1", for
instance, and another name for the worker's side), or one group of ranks. Order is the order of the log; time
plays no part. Written by the simulator, by the slot model and by ``ledger_watch``; judged by ``trace_check``.
"""

from __future__ import annotations

from collections.abc import Hashable
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What happened; the comment says which fields count besides ``place``."""

    # A connection.
    CONNECTED = 0  # value: the peer's process epoch. All slots are FREE
    LOST = 1  # nothing may be accepted until CONNECTED

    # A slot, on either side. ``generation`` is the slot's after the event.
    OPENED = 2  # slot, generation; value: session
    STEPPED = 3  # slot, generation, round: a new round (an identical retry is no event)
    ACCEPTED = 4  # verifier: slot, generation, round that the reply was DRAWN under; value: epoch it was drawn in
    DREW = 5  # worker: slot, generation, round of the reply; value: (session, random number key)
    DISCARDED = 6  # slot, generation, round: the whole proposal is dropped, the slot goes on
    TIMED_OUT = 7  # slot, new generation, dead round
    KILLED = 8  # slot, new generation: cancelled, or failed other than by time; dormant
    RESET = 9  # slot, new generation
    CLOSED = 10  # slot, new generation
    COMMITTED = 11  # slot, generation, round whose outcome was reported, alone or on the STEP that follows
    FAILED = 12  # worker: slot, generation: dormant under the same generation, the verifier will renew it
    RETIRED = 13  # worker: slot, generation: free, because its connection was replaced or lost
    ENDED = 14  # value: session; its random number keys are used no more
    RESTARTED = 15  # the place's process lost everything: slots and blocks are forgotten, used keys are not

    # A staging block; ``value`` is its index; slot, generation, round are the key.
    LEASED = 20
    FILLED = 21
    RETAINED = 22
    RELEASED = 23  # one consumer less
    ABANDONED = 24
    QUARANTINED = 25
    LIFTED = 26
    WROTE = 27  # a transport wrote into the block for the key
    READ = 28  # a consumer of the key read the block

    # A group of ranks: slot is the rank, generation the group epoch, round the sequence; value: the decision.
    FORMED = 40  # value: number of ranks
    APPLIED = 41  # the rank has committed the decision
    RESOLVED = 42  # rank 0 committed and emitted it


class Event(NamedTuple):
    """One line of a trace."""

    kind: Kind
    place: Hashable
    slot: int = 0
    generation: int = 0
    round: int = 0
    value: Hashable = 0
