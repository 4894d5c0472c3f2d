"""Keyed random numbers: the ABI ``philox4x32-10/dspark1``.

Purpose: every random number of a request is a pure function of (seed, domain, position, round, generation,
choice, draw). Both roles compute it alone, a retry reproduces it, and two different uses can never share it.

Invariants:

- The fields are packed without hashing, so distinct keys have distinct Philox inputs.
- The round is part of the key. Position-only keys bias any decision that looks at drafts of an earlier round.
- The one exception is ``Keys.for_position_noise`` (the ``match`` lane): it stands on round 0, which no drafting
  round has, so its numbers are shared with no other use.
- No slot, batch index or clock enters a key, so batching cannot change a sample.
- One owner per domain: the worker leader draws ``PROPOSAL``, the verifier draws all others.

Called by the drafter worker (proposals) and ``dspark.verify`` (acceptance, correction, bonus, target-only).
It never keeps state, never loops until a draw "fits", and never uses ``numpy.random``: numpy's Philox is the
4x64 variant and increments the counter before its first output.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); known answers from Random123.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

RNG_ABI = "philox4x32-10/dspark1"

_WORD = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_ROUNDS = 10


class Domain(IntEnum):
    """What a random number is used for. 0 is illegal, so that a zeroed key cannot pass for a real one."""

    PROPOSAL = 1
    ACCEPTANCE = 2
    CORRECTION = 3
    BONUS = 4
    TARGET_ONLY = 5
    TEST = 6


POSITION_NOISE_ROUND = 0
"""The round field of position noise; drafting rounds of a request start at 1."""


class KeyRangeError(ValueError):
    """A key field is no Python int or does not fit its bits; packing it anyway could make keys collide."""


def block(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, int, int, int]:
    """Philox4x32-10: four 32-bit output words for a 128-bit counter and a 64-bit key (all 32-bit words)."""
    for _ in range(_ROUNDS):
        low_product = _MULTIPLIER_0 * c0
        high_product = _MULTIPLIER_1 * c2
        c0 = (high_product >> 32) ^ c1 ^ k0
        c1 = high_product & _WORD
        c2 = (low_product >> 32) ^ c3 ^ k1
        c3 = low_product & _WORD
        k0 = (k0 + _WEYL_0) & _WORD
        k1 = (k1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def upper24(words: tuple[int, int, int, int]) -> int:
    """The 24-bit integer of four output words: word 0 without its low eight bits."""
    return words[0] >> 8


def _require(name: str, value: int, low: int, high: int) -> None:
    # A numpy integer would wrap inside the 32 x 32 bit products.
    if not isinstance(value, int):
        raise KeyRangeError(f"{name} is a {type(value).__name__}; pass int({name})")
    if not low <= value <= high:
        raise KeyRangeError(f"{name}={value} is outside [{low}, {high}]; the key layout has no room for it")


@dataclass(frozen=True, slots=True)
class Keys:
    """The random numbers of one request in one round.

    Fields:
        seed: signed 64-bit request seed. An unseeded request takes ``secrets.randbits(64) - 2**63``.
        generation: 24 bits; bumped by every reset, so numbers of a dead generation are never reused.
        round: 32 bits; the verification round of the request.
        choice: 8 bits; index of the completion when one request asks for several (``n > 1``).

    Counter layout: c0 = domain(8) | draw(24), c1 = absolute position of the predicted token, c2 = round,
    c3 = generation(24) | choice(8); key words = low and high half of the seed.

    Raises:
        KeyRangeError: a field is no Python int or does not fit.
    """

    seed: int
    generation: int
    round: int
    choice: int = 0

    def __post_init__(self) -> None:
        _require("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        _require("generation", self.generation, 0, (1 << 24) - 1)
        _require("round", self.round, 0, (1 << 32) - 1)
        _require("choice", self.choice, 0, (1 << 8) - 1)

    @classmethod
    def for_position_noise(cls, seed: int, choice: int = 0) -> Keys:
        """Numbers that depend on seed, choice and position alone: the noise of the ``match`` lane.

        Safe there because every committed token is one function of its prefix and of its own position's number,
        so no number is used for a second decision (see ``verify.verify_match``); biased everywhere else.
        """
        return cls(seed, generation=0, round=POSITION_NOISE_ROUND, choice=choice)

    def words(self, domain: Domain, position: int, draw: int = 0) -> tuple[int, int, int, int]:
        """The four output words for one use; ``position`` is that of the token being predicted."""
        _require("domain", domain, 1, 255)
        _require("position", position, 0, (1 << 32) - 1)
        _require("draw", draw, 0, (1 << 24) - 1)
        return block(
            (domain << 24) | draw,
            position,
            self.round,
            (self.generation << 8) | self.choice,
            self.seed & _WORD,
            (self.seed >> 32) & _WORD,
        )

    def draw24(self, domain: Domain, position: int, draw: int = 0) -> int:
        """A uniform integer in [0, 2**24): word 0 without its low eight bits. Used for proposals."""
        return upper24(self.words(domain, position, draw))

    def draw64(self, domain: Domain, position: int, draw: int = 0) -> int:
        """A uniform integer in [0, 2**64): word 0 is the high half. Used for every verifier decision."""
        high, low, _, _ = self.words(domain, position, draw)
        return (high << 32) | low
