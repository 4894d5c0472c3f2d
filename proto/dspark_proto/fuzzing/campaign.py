"""Batches of trials, what they added up to, and findings that can be run again.

A batch is a function of (seed, number) alone, so any batch can be repeated and jobs can share a campaign by
taking every n-th batch. Most batches fire mutants at a pair in one state, and start with a new pair when
enough frames have changed something; the others hold a whole conversation over a link that loses, repeats,
reorders and bends frames. Every trial ends with a liveness probe. Called by ``dspark fuzz`` and the tests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from .conversation import OTHER_SESSION, STAGES, Stage, conversation, expected_at, recorded, staged
from .mutator import UNCHANGED, Mutant, Mutator
from .pair import SESSION, Pair, Parcel, Side, Terms
from .specimens import Pool, Specimen, golden, specimens, type_of
from .trial import Escape, Trial

BATCH_FRAMES: Final = 256
CHANGES_MAX: Final = 5
"""Frames that may change a ledger before a trial ends; later ones would meet a pair that is no longer in its
state."""

TRACED_EVERY: Final = 16
"""One batch in so many measures memory."""

_SESSIONS: Final = (SESSION, OTHER_SESSION)
_SPOKEN: Final = (Terms.V2, Terms.V2, Terms.V2, Terms.SECRET, Terms.V1)
"""What a conversation chooses its terms from."""

_CONVERSATION_SHARE: Final = 0.15
_TICK_NS: Final = 400_000_000


@dataclass(frozen=True)
class Finding:
    """One escape: where it happened and all that is needed to see it again.

    ``stage`` is None for a conversation under ``terms``. ``deliveries[i]`` are the (receiver, frame) that took the
    place of the i-th frame of the conversation; in a stage everything is in ``deliveries[0]``.
    """

    kind: str
    detail: str
    seed: int
    batch: int
    stage: str | None
    deliveries: tuple[tuple[Parcel, ...], ...]
    terms: Terms = Terms.V2

    def to_json(self) -> dict[str, Any]:
        """Plain values, frames as hex."""
        turns = [[[parcel.to.value, parcel.frame.hex()] for parcel in turn] for turn in self.deliveries]
        return {
            "kind": self.kind,
            "detail": self.detail,
            "seed": self.seed,
            "batch": self.batch,
            "stage": self.stage,
            "terms": self.terms.value,
            "deliveries": turns,
        }

    @staticmethod
    def from_json(values: dict[str, Any]) -> Finding:
        """The inverse of ``to_json``. Raises ``KeyError`` or ``ValueError`` for other values."""
        turns = tuple(
            tuple(Parcel(Side(to), bytes.fromhex(frame)) for to, frame in turn) for turn in values["deliveries"]
        )
        stage = None if values["stage"] is None else Stage(values["stage"]).value
        kind, detail, terms = str(values["kind"]), str(values["detail"]), Terms(values["terms"])
        return Finding(kind, detail, int(values["seed"]), int(values["batch"]), stage, turns, terms)


@dataclass
class Tally:
    """Sums over batches; ``findings`` keeps the first of each (kind, detail).

    ``mutated`` of the ``frames`` were bent; the others were sent as they were made, in their place or out of it.
    """

    frames: int = 0
    mutated: int = 0
    accepted: int = 0
    refused: int = 0
    escapes: int = 0
    trials: int = 0
    traced_frames: int = 0
    peak_traced_bytes: int = 0
    max_frame_ns: int = 0
    by_code: Counter[str] = field(default_factory=Counter)
    by_mutation: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    def add_trial(self, trial: Trial) -> None:
        """Add what ``trial`` has counted."""
        self.trials += 1
        self.frames += trial.frames
        self.accepted += trial.accepted
        self.refused += trial.refused
        self.by_code.update(trial.by_code)
        self.max_frame_ns = max(self.max_frame_ns, trial.frame_ns_max)
        self.peak_traced_bytes = max(self.peak_traced_bytes, trial.traced_bytes_max)
        self.traced_frames += trial.frames if trial.traced else 0

    def add_finding(self, finding: Finding) -> bool:
        """Count an escape; returns whether it is the first of its kind."""
        self.escapes += 1
        if any((one.kind, one.detail) == (finding.kind, finding.detail) for one in self.findings):
            return False
        self.findings.append(finding)
        return True


class Campaign:
    """All batches of one seed. ``vectors`` is the directory of the golden vectors, if there is one."""

    def __init__(self, seed: int, vectors: Path | None = None) -> None:
        self.seed = seed
        self.tally = Tally()
        extra = golden(vectors) if vectors else []
        own = [one for terms in Terms for session in _SESSIONS for one in specimens(recorded(session, terms))]
        self._pool: Final = Pool(own + extra)
        self._next: Final = {stage: tuple(specimens(expected_at(stage))) for stage in STAGES}

    def run(self, batch: int) -> int:
        """Run one batch; returns how many frames were delivered. Escapes are in ``tally``."""
        rng = Random(f"{self.seed}:{batch}")
        mutator = Mutator(rng, self._pool)
        traced = batch % TRACED_EVERY == 0
        before = self.tally.frames
        talk = rng.random() < _CONVERSATION_SHARE
        while self.tally.frames - before < BATCH_FRAMES:
            if talk:
                self._talk(batch, mutator, traced)
            else:
                self._barrage(batch, mutator, traced, BATCH_FRAMES - (self.tally.frames - before))
        return self.tally.frames - before

    def _barrage(self, batch: int, mutator: Mutator, traced: bool, most: int) -> None:
        """Mutants of what the stage's connections can use, and of anything else, at one pair."""
        stage = mutator.rng.choice(STAGES)
        trial = Trial(staged(stage), traced=traced)
        log: list[Parcel] = []
        try:
            while trial.frames < most and trial.changes < CHANGES_MAX and not trial.reconnected:
                for parcel in self._mutants(mutator, self._choice(mutator.rng, stage)):
                    log.append(parcel)
                    trial.feed(parcel.to, parcel.frame)
            trial.check_retained()
            trial.probe()
        except Escape as escape:
            self._found(escape, batch, stage.value, (tuple(log),))
        finally:
            trial.close()
            self.tally.add_trial(trial)

    def _choice(self, rng: Random, stage: Stage) -> Specimen:
        """Usually what the stage waits for, the soonest first; else any frame, the golden ones included."""
        expected = self._next[stage]
        if expected and rng.random() < 0.7:
            return expected[min(rng.randrange(len(expected)), rng.randrange(len(expected)))]
        return rng.choice(self._pool.all)

    def _mutants(self, mutator: Mutator, specimen: Specimen) -> Iterator[Parcel]:
        mutant: Mutant = mutator.mutant(specimen)
        self.tally.by_mutation[mutant.how] += 1
        self.tally.mutated += 0 if mutant.how == UNCHANGED else len(mutant.frames)
        for frame in mutant.frames:
            yield Parcel(specimen.to, frame)

    def _talk(self, batch: int, mutator: Mutator, traced: bool) -> None:
        """One conversation over a bad link."""
        pair = Pair(terms=mutator.rng.choice(_SPOKEN))
        trial = Trial(pair, bystander=False, traced=traced)
        turns: list[tuple[Parcel, ...]] = []
        link = _BadLink(mutator)
        try:
            for parcel in _turns(pair, trial):
                turns.append(tuple(link.carry(parcel)))
                _deliver_turn(trial, turns[-1])
            trial.probe()
        except Escape as escape:
            self._found(escape, batch, None, tuple(turns), pair.terms)
        finally:
            trial.close()
            self.tally.add_trial(trial)
            self.tally.by_mutation.update(link.used)
            self.tally.mutated += link.bent

    def _found(
        self,
        escape: Escape,
        batch: int,
        stage: str | None,
        deliveries: tuple[tuple[Parcel, ...], ...],
        terms: Terms = Terms.V2,
    ) -> None:
        self.tally.add_finding(Finding(escape.kind, escape.detail, self.seed, batch, stage, deliveries, terms))


def _turns(pair: Pair, trial: Trial) -> Iterator[Parcel]:
    """The conversation's frames; what a call of its callers raises is an Escape."""
    steps = conversation(pair)
    while True:
        try:
            step = next(steps, None)
        except Exception as error:
            raise Escape("exception", f"in the conversation: {type(error).__name__}: {error}") from error
        if step is None:
            return
        trial.settle()
        if isinstance(step, Parcel):
            yield step


def _deliver_turn(trial: Trial, turn: Iterable[Parcel]) -> None:
    """Deliver what the link made of one frame; an empty turn lets time pass."""
    delivered = False
    for parcel in turn:
        trial.feed(parcel.to, parcel.frame, answer=False)
        delivered = True
    if not delivered:
        try:
            trial.pair.tick(_TICK_NS)
        except Exception as error:
            raise Escape("exception", f"in expire: {type(error).__name__}: {error}") from error
        trial.settle()


class _BadLink:
    """Decides what becomes of each frame: delivered, lost, repeated, held back, bent, or joined by another."""

    def __init__(self, mutator: Mutator) -> None:
        self.used: Counter[str] = Counter()
        self.bent = 0
        self._mutator = mutator
        self._held: list[Parcel] = []

    def carry(self, parcel: Parcel) -> list[Parcel]:
        """What arrives instead of ``parcel``, in order."""
        rng = self._mutator.rng
        fate = rng.choices(("good", "lost", "twice", "held", "late", "bent", "spliced"), (60, 3, 6, 6, 8, 11, 6))[0]
        self.used[f"link_{fate}"] += 1
        if fate == "good":
            return [parcel]
        if fate == "lost":
            return []
        if fate == "twice":
            return [parcel, parcel]
        if fate == "held":
            self._held.append(parcel)
            return []
        if fate == "late":
            held, self._held = self._held, []
            rng.shuffle(held)
            return [parcel, *held]
        pool = self._mutator.pool
        if fate == "spliced":
            specimen = rng.choice(pool.all)
            return [Parcel(specimen.to, specimen.frame), parcel]
        specimen = rng.choice(pool.by_type.get(type_of(parcel.frame)) or pool.apart)
        mutant = self._mutator.mutant(specimen)
        self.bent += 0 if mutant.how == UNCHANGED else len(mutant.frames)
        return [*(Parcel(parcel.to, frame) for frame in mutant.frames), parcel]


def replay(finding: Finding) -> Escape | None:
    """Run a finding again; the escape that it causes now, None when the connections hold."""
    pair = Pair(terms=finding.terms) if finding.stage is None else staged(Stage(finding.stage))
    trial = Trial(pair, bystander=finding.stage is not None, traced=finding.kind == "memory")
    try:
        if finding.stage is None:
            for number, _ in enumerate(_turns(pair, trial)):
                _deliver_turn(trial, finding.deliveries[number] if number < len(finding.deliveries) else ())
        else:
            for parcel in (parcel for turn in finding.deliveries for parcel in turn):
                trial.feed(parcel.to, parcel.frame)
        trial.check_retained()
        trial.probe()
    except Escape as escape:
        return escape
    finally:
        trial.close()
    return None
