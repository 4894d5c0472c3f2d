"""What one turn of the engine works on: which requests decode, which prefill how much, and in which order of rows.

The order is fixed here and nowhere else: rows of decoding requests (anchor, then drafts) first, prefill chunks after
them; logits are asked for where somebody samples, in the same order. Called by `engine`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dspark.models.target import Segment
from dspark_spark.proposals import Proposal
from dspark_spark.sequence import Sequence


@dataclass
class Batch:
    """decoding: each request with its proposal, None without one. prefilling: each request with its chunk length."""

    decoding: list[tuple[Sequence, Proposal | None]]
    prefilling: list[tuple[Sequence, int]]

    def decode_rows(self) -> int:
        return sum(width(proposal) for _, proposal in self.decoding)

    def segments(self) -> list[Segment]:
        """The rows of the forward pass."""
        segments = []
        for sequence, proposal in self.decoding:
            drafts = proposal.tokens if proposal else ()
            segments.append(Segment(sequence.slot, sequence.anchor_position, (sequence.tokens[-1], *drafts)))
        for sequence, chunk in self.prefilling:
            start = sequence.computed
            segments.append(Segment(sequence.slot, start, sequence.tokens[start : start + chunk]))
        return segments

    def logit_rows(self) -> list[int]:
        """Rows whose logits somebody samples from: all decode rows, and the last one of a prompt that is complete."""
        row = self.decode_rows()
        wanted = list(range(row))
        for sequence, chunk in self.prefilling:
            row += chunk
            if sequence.computed + chunk == sequence.prompt_length:
                wanted.append(row - 1)
        return wanted


def width(proposal: Proposal | None) -> int:
    """Rows that a decoding request takes: its anchor and its drafts."""
    return 1 + (len(proposal.tokens) if proposal else 0)


def prefill_chunks(running: Iterable[Sequence], budget: int) -> list[tuple[Sequence, int]]:
    """Prompts that are computed further in this turn, in order of arrival, and by how much: `budget` tokens in all.

    The chunk that completes a prompt samples a token, which starts the request's first round.
    """
    chunks = []
    for sequence in running:
        if not sequence.decoding and budget > 0:
            chunk = min(budget, sequence.prompt_length - sequence.computed)
            budget -= chunk
            sequence.round += sequence.computed + chunk == sequence.prompt_length
            chunks.append((sequence, chunk))
    return chunks
