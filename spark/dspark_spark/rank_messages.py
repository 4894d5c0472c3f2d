"""What the ranks of one Spark group say to each other: frozen values, one class per message.

Invariant: every message names the group epoch it belongs to, so that anything of an older group is known at
once. Digests are XXH3-64 over the canonical encoding: equal values give equal digests on every rank. Used by
``rank_leader`` and ``rank_follower``, which hold all rules; carried by whatever joins the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, cast

from dspark_proto.canonical import Value, encode_canonical
from dspark_proto.checksums import xxh3_64_bytes


class PlanItem(NamedTuple):
    """One request's rows in a step: the anchor and ``depth`` drafts; target-only with ``depth`` 0.

    ``proposal`` is the digest of the drafts that rank 0 validated (:attr:`ProposalCopy.digest`), 0 without any;
    ``cause`` says why a proposal was discarded, "" when none was.
    """

    slot: int
    session: int
    generation: int
    round: int
    depth: int = 0
    proposal: int = 0
    cause: str = ""


class DecisionItem(NamedTuple):
    """What one round of the plan came to: ``accepted`` drafts survive and ``token`` follows them."""

    slot: int
    session: int
    generation: int
    round: int
    accepted: int
    token: int
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """Rank 0 starts a group: forget every earlier epoch and rebuild from the committed prefixes."""

    group_epoch: int


@dataclass(frozen=True, slots=True)
class Joined:
    """``rank`` has forgotten the earlier epochs and stands at the committed prefixes."""

    group_epoch: int
    rank: int


@dataclass(frozen=True, slots=True)
class ProposalCopy:
    """The drafts of one validated reply, for the ranks that verify the same rows.

    ``reply_checksum`` is the one of the COMPLETION: two replies with equal tokens and other rows differ. Sessions grow,
    and so do the rounds of one; a generation starts over when another worker drafts.
    """

    group_epoch: int
    slot: int
    session: int
    generation: int
    round: int
    tokens: tuple[int, ...]
    reply_checksum: bytes = b""

    @property
    def digest(self) -> int:
        """Identity of the drafts and the rows that they were drawn from."""
        return _digest([self.slot, self.session, self.generation, self.round, list(self.tokens), self.reply_checksum])


@dataclass(frozen=True, slots=True)
class Plan:
    """The rows of step ``sequence``, the same on every rank."""

    group_epoch: int
    sequence: int
    items: tuple[PlanItem, ...]

    @property
    def digest(self) -> int:
        """Identity of the plan."""
        return _digest([self.group_epoch, self.sequence, *map(list, self.items)])


@dataclass(frozen=True, slots=True)
class Ack:
    """``rank`` follows the plan; ``vetoes`` are the slots whose proposal it does not hold as planned."""

    group_epoch: int
    sequence: int
    rank: int
    plan_digest: int
    vetoes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What every rank commits for step ``sequence``, all of it or nothing."""

    group_epoch: int
    sequence: int
    plan_digest: int
    items: tuple[DecisionItem, ...]

    @property
    def digest(self) -> int:
        """Identity of the decision."""
        return _digest([self.group_epoch, self.sequence, self.plan_digest, *map(list, self.items)])


@dataclass(frozen=True, slots=True)
class Applied:
    """``rank`` has committed the decision."""

    group_epoch: int
    sequence: int
    rank: int
    decision_digest: int


@dataclass(frozen=True, slots=True)
class Down:
    """``rank`` cannot follow this epoch any more: the group must be formed anew."""

    group_epoch: int
    rank: int
    cause: str


VETO: Final = "veto"
"""Cause of a proposal that some rank does not hold as planned."""

RankMessage: TypeAlias = Form | Joined | ProposalCopy | Plan | Ack | Decision | Applied | Down


@dataclass(frozen=True, slots=True)
class Turn:
    """What a call asks of its caller; ``messages`` are (rank to send to, message).

    Leader: ``agreed`` are the plan's items with vetoed proposals discarded, to be decided; ``resolved`` is
    committed on every other rank: commit and emit it. Follower: ``plan`` is to be run; ``apply`` is to be
    committed, then ``RankFollower.applied`` called. ``failed``: the epoch is over, for this cause, and every
    round of the unresolved step is dead.
    """

    messages: tuple[tuple[int, RankMessage], ...] = ()
    agreed: tuple[PlanItem, ...] | None = None
    resolved: Decision | None = None
    plan: Plan | None = None
    apply: Decision | None = None
    failed: str = ""


NOTHING: Final = Turn()


def _digest(values: Sequence[object]) -> int:
    return int.from_bytes(xxh3_64_bytes(encode_canonical(cast("list[Value]", values))), "little")
