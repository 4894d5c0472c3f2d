"""State tables of both connections and of their slots; everything that moves a state is here.

Each table maps state -> action -> next state. A missing key is the protocol error: for an action of the local
caller a LocalProtocolError, for a received message a counted drop. Spec: SPEC.md, section "Life cycle" (its
tables show the same rows). Called by ``verifier``, ``drafter`` and ``slots``.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, TypeAlias, TypeVar

from .registry import MessageType


class State(Enum):
    """A state, the key of its table's row. Hashed as an object: an enumeration's own hash is a call of Python code."""

    __hash__ = object.__hash__


class VerifierState(State):
    """Connection state, Spark side."""

    IDLE = "idle"
    HELLO_SENT = "hello_sent"
    PROOF_SENT = "proof_sent"
    ACTIVE = "active"
    DRAINING = "draining"
    LOST = "lost"


class DrafterState(State):
    """Connection state, worker side."""

    AWAITING_HELLO = "awaiting_hello"
    HELLO_RECEIVED = "hello_received"
    CHALLENGED = "challenged"
    ACTIVE = "active"
    DRAINING = "draining"
    LOST = "lost"


class SlotState(State):
    """Slot state; READY means open with no unresolved round."""

    FREE = "free"
    READY = "ready"
    AWAITING = "awaiting"
    DORMANT = "dormant"


S = TypeVar("S", bound=State)
Table: TypeAlias = Mapping[S, Mapping[str, S]]

_V: TypeAlias = VerifierState
VERIFIER_CONNECTION: Final[Table[VerifierState]] = {
    _V.IDLE: {"hello": _V.HELLO_SENT},
    _V.HELLO_SENT: {
        "hello": _V.HELLO_SENT,
        "challenge": _V.PROOF_SENT,
        "accept": _V.ACTIVE,
        "reject": _V.IDLE,
        "lose": _V.LOST,
    },
    _V.PROOF_SENT: {"hello": _V.HELLO_SENT, "accept": _V.ACTIVE, "reject": _V.IDLE, "lose": _V.LOST},
    _V.ACTIVE: {"hello": _V.HELLO_SENT, "drain": _V.DRAINING, "lose": _V.LOST},
    _V.DRAINING: {"hello": _V.HELLO_SENT, "drain": _V.DRAINING, "lose": _V.LOST},
    _V.LOST: {"hello": _V.HELLO_SENT, "lose": _V.LOST},
}

_D: TypeAlias = DrafterState
DRAFTER_CONNECTION: Final[Table[DrafterState]] = {
    _D.AWAITING_HELLO: {"hello": _D.HELLO_RECEIVED},
    _D.HELLO_RECEIVED: {
        "hello": _D.HELLO_RECEIVED,
        "challenge": _D.CHALLENGED,
        "accept": _D.ACTIVE,
        "reject": _D.AWAITING_HELLO,
    },
    _D.CHALLENGED: {"hello": _D.HELLO_RECEIVED},
    _D.ACTIVE: {"hello": _D.HELLO_RECEIVED, "drain": _D.DRAINING, "lose": _D.LOST},
    _D.DRAINING: {"hello": _D.HELLO_RECEIVED, "drain": _D.DRAINING, "lose": _D.LOST},
    _D.LOST: {"hello": _D.HELLO_RECEIVED},
}

_S: TypeAlias = SlotState
SLOT: Final[Table[SlotState]] = {
    _S.FREE: {"open": _S.READY},
    _S.READY: {
        "context": _S.READY,
        "step": _S.AWAITING,
        "commit": _S.READY,
        "reset": _S.READY,
        "cancel": _S.DORMANT,
        "fail": _S.DORMANT,
        "close": _S.FREE,
    },
    _S.AWAITING: {
        "step": _S.AWAITING,
        "reply": _S.READY,
        "discard": _S.READY,
        "reset": _S.READY,
        "cancel": _S.DORMANT,
        "fail": _S.DORMANT,
        "close": _S.FREE,
    },
    _S.DORMANT: {"reset": _S.READY, "cancel": _S.DORMANT, "close": _S.FREE},
}
"""Both sides keep this table per slot. "step" in AWAITING is the identical retry; "discard" and "fail" end a
round
whose reply was refused: after "discard" the slot goes on, after "fail" only RESET or CLOSE revive it."""

_T: TypeAlias = MessageType
VERIFIER_RECEIVES: Final[Mapping[MessageType, frozenset[VerifierState]]] = {
    _T.ACCEPT: frozenset({_V.HELLO_SENT, _V.PROOF_SENT}),
    _T.REJECT: frozenset({_V.HELLO_SENT, _V.PROOF_SENT}),
    _T.CHALLENGE: frozenset({_V.HELLO_SENT}),
    _T.ROW: frozenset({_V.ACTIVE, _V.DRAINING}),
    _T.COMPLETION: frozenset({_V.ACTIVE, _V.DRAINING}),
    _T.PING: frozenset({_V.ACTIVE, _V.DRAINING}),
    _T.PONG: frozenset({_V.ACTIVE, _V.DRAINING}),
    _T.DRAIN: frozenset({_V.ACTIVE, _V.DRAINING}),
    _T.ERROR: frozenset({_V.HELLO_SENT, _V.PROOF_SENT, _V.ACTIVE, _V.DRAINING}),
    _T.STATS: frozenset({_V.ACTIVE, _V.DRAINING}),
}

_OPEN_STATES: Final = frozenset({_D.ACTIVE, _D.DRAINING})
DRAFTER_RECEIVES: Final[Mapping[MessageType, frozenset[DrafterState]]] = {
    _T.HELLO: frozenset(_D),
    **dict.fromkeys(
        (
            _T.OPEN,
            _T.CONTEXT,
            _T.STEP,
            _T.COMMIT,
            _T.RESET,
            _T.CANCEL,
            _T.CLOSE,
            _T.PING,
            _T.PONG,
            _T.ERROR,
            _T.STATS,
        ),
        _OPEN_STATES,
    ),
}
