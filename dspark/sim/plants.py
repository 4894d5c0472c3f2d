"""Bugs to plant in the production classes, so that the simulator can show that it would find them.

Each plant takes one rule away for as long as its context lasts. Where rules stand one behind another, a plant takes the
front one: the simulator must see that something passed which was to be refused, not wait for the damage. Called by
`dspark sim --plant` and by tests, never by a run that is to be believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import dspark_proto.frame as frame_module
import dspark_proto.peer as peer_module
import dspark_proto.replies as replies_module
import dspark_proto.slots as slots_module
from dspark.audit import AuditPlan
from dspark.philox import Keys
from dspark.sim.spark import Session
from dspark_proto import Key, Lease, SlotState, StepItem, body_checksum, crc32c
from dspark_proto.drafter_sessions import DrafterSessions
from dspark_proto.limits import PREFIX_BYTES
from dspark_proto.registry import MessageType
from dspark_proto.staging import LeaseState, Staging
from dspark_proto.verifier_inbox import VerifierInbox
from dspark_spark.draft_link import DraftLink
from dspark_spark.rank_agreement import Applied, Decision, FollowerState, RankFollower, RankLeader, Turn

Change = tuple[Any, str, Any]
"""An owner, the name of one of its attributes or keys, and the value it has while the bug is planted."""


@dataclass(frozen=True, slots=True)
class Plant:
    """One bug. `changes` are made when it is planted and undone afterwards."""

    summary: str
    changes: Callable[[], list[Change]]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug is in the production classes while the context lasts. Raises KeyError for an unknown name."""
    with ExitStack() as undo:
        for owner, attribute, value in PLANTS[name].changes():
            if isinstance(owner, dict):
                undo.callback(owner.__setitem__, attribute, owner[attribute])
                owner[attribute] = value
            else:
                undo.callback(setattr, owner, attribute, owner.__dict__[attribute])
                setattr(owner, attribute, value)
        yield


def _nothing(*_arguments: object) -> None:
    """In the place of a check."""


# Replies


def _any_key(field: str) -> list[Change]:
    """The prefix's generation or round is whatever the slot has."""
    admit = VerifierInbox._admit

    def lax(self: VerifierInbox, prefix: Any) -> Any:
        if self.negotiated is None or prefix.slot >= self.negotiated.max_slots:
            return admit(self, prefix)
        slot = self._slots[prefix.slot]
        return admit(self, replace(prefix, **{field: max(0, getattr(slot, field))}))

    return [(VerifierInbox, "_admit", lax)]


def _any_owner(field: str) -> list[Change]:
    """A reply's session or epoch is not looked at."""
    check = VerifierInbox._check_reply_owner

    def lax(self: VerifierInbox, slot: Any, session: int, epoch: int) -> None:
        if field == "epoch" and self.negotiated is not None:
            epoch = self.negotiated.peer_epoch
        check(self, slot, slot.session if field == "session" else session, epoch)

    return [(VerifierInbox, "_check_reply_owner", lax)]


def _any_digest() -> list[Change]:
    check = replies_module._check_completion

    def lax(slot: Any, completion: Any, layout: Any) -> None:
        item = slot.item
        same = replace(
            completion,
            anchor_position=item.anchor_position,
            context_version=item.context_version,
            prefix_digest=item.prefix_digest,
        )
        check(slot, same, layout)

    return [(replies_module, "_check_completion", lax)]


def _any_body() -> list[Change]:
    def lax(descriptor: Any, padded: memoryview) -> memoryview:
        return padded[: descriptor.body_bytes]

    return [(frame_module, "check_body", lax), (replies_module, "check_body", lax)]


def _any_reply_checksum() -> list[Change]:
    finish = replies_module.finish_reply

    def lax(slot: Any, completion: Any, terms: Any) -> Any:
        right = body_checksum(terms.checksum, slot.lease.block)
        return finish(slot, replace(completion, reply_checksum=right), terms)

    import dspark_proto.verifier_inbox as inbox

    return [(inbox, "finish_reply", lax)]


def _any_control() -> list[Change]:
    decode = frame_module.decode_control

    def lax(prefix: Any, view: memoryview, absent_bytes: int) -> Any:
        right = crc32c(view[PREFIX_BYTES : PREFIX_BYTES + prefix.control_bytes])
        return decode(replace(prefix, control_crc=right), view, absent_bytes)

    return [(peer_module, "decode_control", lax)]


# Keys


def _repeated_step() -> list[Change]:
    take = DrafterSessions._take_item

    def redraw(self: DrafterSessions, item: StepItem, body: Any) -> Any:
        slot = self._slot(item.slot)
        if slot.item is not None and item.round == slot.round and slot.state is not SlotState.DORMANT:
            slot.state, slot.round, slot.context_end = SlotState.READY, item.round - 1, item.tap_first
        return take(self, item, body)

    return [(DrafterSessions, "_take_item", redraw)]


def _same_round() -> list[Change]:
    def stay(self: Session) -> None:
        if self.last_accepted is not None or self.round == 0:
            self.round += 1

    return [(Session, "advance", stay)]


def _no_round_in_key() -> list[Change]:
    return [(Session, "keys", lambda self: Keys(self.seed, generation=0, round=0))]


# Staging and leases


def _early_reuse() -> list[Change]:
    def drop(self: VerifierInbox, slot: Any) -> None:
        lease, slot.lease = slot.lease, None
        if lease is not None and lease.state is LeaseState.LEASED:
            lease.abandon()

    return [(VerifierInbox, "_drop_lease", drop)]


def _shared_block() -> list[Change]:
    take = Staging.take

    def share(self: Staging, key: Key, layout: Any) -> Lease:
        for lease in self.leases:
            if lease.state is LeaseState.FILLED and lease.key != key:
                lease._clear()
                lease.state = LeaseState.FREE
        return take(self, key, layout)

    return [(Staging, "take", share)]


def _late_generation() -> list[Change]:
    def kill(self: VerifierInbox, slot: Any) -> None:
        slot.move("fail", "slot")
        slot.begin(slot.generation, 0)
        self._drop_lease(slot)

    return [(VerifierInbox, "_kill_generation", kill)]


def _leak_at_close() -> list[Change]:
    def keep(_self: Any, _slot: Any, _prefix: Any, _message: Any, _view: Any) -> list[Any]:
        return []

    return [(DrafterSessions._SLOT_HANDLERS, MessageType.CLOSE, keep)]  # type: ignore[list-item]


def _unsent_close() -> list[Change]:
    def release(self: DraftLink, lease: Any) -> None:
        self._leases.pop(lease.slot, None)
        self._forget(lease.slot)
        self._vacate(lease)

    return [(DraftLink, "release", release)]


def _gap() -> list[Change]:
    def follow(slot: Any, first_position: int) -> None:
        slot.context_end = first_position

    import dspark_proto.drafter_sessions as sessions

    check = slots_module.check_step

    def lax(slot: Any, item: Any, terms: Any) -> None:
        slot.context_end = item.tap_first
        check(slot, item, terms)

    return [
        (sessions, "check_context", follow),
        (sessions, "check_step", lax),
        (DrafterSessions, "_check_digest", staticmethod(_nothing)),
    ]


# Judgement


def _no_audit() -> list[Change]:
    return [(AuditPlan, "wants_next", lambda self: False)]


def _no_quarantine() -> list[Change]:
    def shrug(self: DraftLink, lease: Any, reason: str, cause: str = "invalid_row") -> None:
        self.discards[cause] += 1

    return [(DraftLink, "invalid", shrug)]


# Ranks


def _half_commit() -> list[Change]:
    decide = RankLeader.decide

    def hasty(self: RankLeader, items: Any, now_ns: int) -> Turn:
        turn = decide(self, items, now_ns)
        if not self.waiting or not isinstance(self.question, Decision):
            return turn
        self._move("resolve")
        return replace(turn, resolved=self.question)

    return [(RankLeader, "decide", hasty)]


def _repeated_decision() -> list[Change]:
    take = RankFollower._take_decision

    def again(self: RankFollower, decision: Any) -> Turn:
        if self.decision == decision and self.state is FollowerState.READY:
            self.state = FollowerState.APPLYING
            return Turn(apply=decision)
        return take(self, decision)

    return [(RankFollower, "_take_decision", again)]


def _stale_confirmation() -> list[Change]:
    receive = RankLeader.receive

    def lax(self: RankLeader, message: Any, now_ns: int) -> Turn:
        if isinstance(message, Applied):
            message = Applied(self.group_epoch, self.sequence, message.rank, self.digest)
        return receive(self, message, now_ns)

    return [(RankLeader, "receive", lax)]


def _ignored_veto() -> list[Change]:
    return [(RankFollower, "_holds", lambda self, item: True)]


PLANTS: dict[str, Plant] = {
    "no-generation-check": Plant(
        "a reply of another generation is taken for the current one", lambda: _any_key("generation")
    ),
    "no-round-check": Plant("a reply of another round is taken for the awaited one", lambda: _any_key("round")),
    "no-epoch-check": Plant("a reply of another worker process is taken", lambda: _any_owner("epoch")),
    "no-session-check": Plant("a reply to another request is taken", lambda: _any_owner("session")),
    "no-digest-check": Plant("a COMPLETION for another prefix is taken", _any_digest),
    "no-body-checksum": Plant("bodies are not compared with their checksums", _any_body),
    "no-reply-checksum": Plant("a reply is not compared with the checksum of its COMPLETION", _any_reply_checksum),
    "no-control-checksum": Plant("control blocks are not compared with their checksums", _any_control),
    "redraw": Plant("a repeated STEP is drafted again instead of answered from the cache", _repeated_step),
    "same-round": Plant("a step without a proposal does not use up its round", _same_round),
    "no-round-in-key": Plant("random numbers of a request are keyed by position alone", _no_round_in_key),
    "early-reuse": Plant("a dead round's block is free while the transport may still write into it", _early_reuse),
    "shared-block": Plant("a block is leased again while its consumer has not released it", _shared_block),
    "late-generation": Plant("a dead round's block is let go and the generation stays", _late_generation),
    "leak-at-close": Plant("CLOSE leaves the worker's slot open", _leak_at_close),
    "unsent-close": Plant("a request ends and the worker is not told", _unsent_close),
    "context-gap": Plant("a worker goes on although context rows are missing", _gap),
    "no-audit": Plant("draws are not repeated, and a worker lies", _no_audit),
    "no-quarantine": Plant("a worker that was found out goes on", _no_quarantine),
    "half-commit": Plant("rank 0 commits before the other rank has confirmed", _half_commit),
    "repeated-decision": Plant("a rank applies a repeated decision again", _repeated_decision),
    "stale-confirmation": Plant("a confirmation of an older step counts for this one", _stale_confirmation),
    "ignored-veto": Plant("a rank commits drafts that it does not hold", _ignored_veto),
}
