"""What is on trial: every decision of the sampler that a claim can run, production by default.

Purpose: one value that a mutant changes in exactly one place (``dataclasses.replace``), and that all claims take.

Called by the tiers and ``mutants``.
"""

from __future__ import annotations

from dataclasses import dataclass

from dspark.dense import validate_dense_reply
from dspark.dyadic import validate_reply
from dspark.proof import block_steps, edited_toys, lanes, shard_steps, toys
from dspark.proof.admission_laws import FRESH, Depth, Depths, Memory, early_stop, shared_budget
from dspark.proof.shard_steps import Rank
from dspark.proof.toys import Drawn, Step
from dspark.proof.worker_steps import ReadDense, ReadSparse


@dataclass(frozen=True)
class Subject:
    """Fields:
    ratio, match, greedy: verification steps of the lanes; block: the ratio lane's other rule.
    edited: the ratio step over rows that processors with a memory make.
    sharded: one rank's step.
    drawn: law of the token that the worker drafts.
    admission, shared: depth of one request, depths of two.
    memory: keys of the rounds, and whether old drafts may admit new ones.
    read_sparse, read_dense: validation of a reply.
    """

    ratio: Step = toys.production
    block: Step = block_steps.production_block
    match: Step = lanes.match_step
    greedy: Step = lanes.greedy_step
    edited: Step = edited_toys.production_step
    sharded: Rank = shard_steps.production_rank
    drawn: Drawn = toys.drawn_from_the_row
    admission: Depth = early_stop
    shared: Depths = shared_budget
    memory: Memory = FRESH
    read_sparse: ReadSparse = validate_reply
    read_dense: ReadDense = validate_dense_reply


PRODUCTION = Subject()
