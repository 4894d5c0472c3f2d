"""The agreement of one tensor-parallel group: a round is committed on all ranks, or seen by nobody.

Rank 0 decides; the others obey one plan and one decision per step::

    rank 0                                   every other rank
    share(copy)    -- ProposalCopy ------->  keep it
    plan(items)    -- Plan --------------->  compare the proposals, run the rows
                   <- Ack(vetoes) ---------
    decide(items)  -- Decision ----------->  commit all of it, call applied()
                   <- Applied -------------
    resolved: commit here, emit, report to the workers

What nobody may do before *resolved*: send a token to a client, put a commit on a STEP, or advance the committed
prefix that a new group starts from. So whatever fails in between, no consumer has seen the step: rank 0 ends the
epoch, the other ranks forget it when they join the next one, and the step's rounds are dead on all ranks (their
random numbers are never drawn again: the slots are reset and the rounds get new numbers).

A vetoed proposal costs no more than itself: its rows still run, with any tokens in place of the missing drafts, so
that all ranks run the same shapes; the anchor's row does not attend to them, and the decision takes that row
only. The forward pass may therefore overlap the Acks.

Loss, duplication, reordering and delay of messages, and death or restart of a rank between any two of them, are
harmless; ``dspark.model_check.two_rank_commit`` checks that exhaustively. Resending never happens on a reliable
channel. One pair of objects is one unresolved step: request groups in ping-pong have one agreement each, with
channels of their own.
"""

from .rank_follower import FOLLOWER, FollowerState, RankFollower
from .rank_leader import LEADER, LeaderState, RankLeader
from .rank_messages import (
    VETO,
    Ack,
    Applied,
    Decision,
    DecisionItem,
    Down,
    Form,
    Joined,
    Plan,
    PlanItem,
    ProposalCopy,
    RankMessage,
    Turn,
)

__all__ = (
    "FOLLOWER",
    "LEADER",
    "VETO",
    "Ack",
    "Applied",
    "Decision",
    "DecisionItem",
    "Down",
    "FollowerState",
    "Form",
    "Joined",
    "LeaderState",
    "Plan",
    "PlanItem",
    "ProposalCopy",
    "RankFollower",
    "RankLeader",
    "RankMessage",
    "Turn",
)
