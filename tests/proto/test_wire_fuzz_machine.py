"""A state machine over both connections whose link loses, repeats, reorders and forges frames.

Hypothesis chooses the callers' calls and what becomes of each frame; every frame goes through `Trial.feed`, which
holds the connections to the fuzzer's invariants, and every run ends with its liveness probe.
"""

from __future__ import annotations

from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from dspark_proto import Cause
from dspark_proto.fuzzing import Mutator, Pair, Parcel, Pool, Side, Trial, recorded, specimen_of
from dspark_proto.fuzzing.conversation import OTHER_SESSION

SLOTS = st.integers(0, 3)
POOL = Pool(specimen_of(*parcel) for session in (77, OTHER_SESSION) for parcel in recorded(session))


class BadLink(RuleBasedStateMachine):
    """`self.way` holds the frames under way, oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = Pair()
        self.trial = Trial(self.pair, bystander=False)
        self.way: list[Parcel] = []
        self.round = 0
        for slot in range(4):
            self.pair.history[slot], self.pair.anchors[slot] = [], 42

    def put(self, parcels: list[Parcel]) -> None:
        self.way += parcels
        self.trial.settle()

    @initialize(connected=st.sampled_from([True, True, True, False]))
    def connect(self, connected: bool) -> None:
        if connected:
            self.hello()
            self.put(self.pair.open(0))
            self.deliver_all()

    @rule()
    def hello(self) -> None:
        self.put(self.pair.send(Side.DRAFTER, self.pair.verifier.hello, self.pair.now_ns))

    @rule(slot=SLOTS)
    def open(self, slot: int) -> None:
        self.put(self.pair.open(slot))

    @rule(slot=SLOTS, rows=st.integers(1, 3), with_tokens=st.booleans())
    def context(self, slot: int, rows: int, with_tokens: bool) -> None:
        self.put(self.pair.context(slot, [5] * rows, with_tokens))

    @rule(slots=st.sets(SLOTS, min_size=1))
    def step(self, slots: set[int]) -> None:
        self.round += 1
        self.put(self.pair.step(self.round, *sorted(slots)))

    @rule(slots=st.sets(SLOTS, min_size=1))
    def reply(self, slots: set[int]) -> None:
        self.put(self.pair.replies(*slots))

    @rule(slot=SLOTS, accepted=st.integers(0, 5))
    def commit(self, slot: int, accepted: int) -> None:
        self.pair.advance(slot, accepted, 11)
        self.put(self.pair.commit(slot, accepted))

    @rule(slot=SLOTS, what=st.sampled_from(["reset", "cancel", "close"]))
    def end(self, slot: int, what: str) -> None:
        self.put(self.pair.send(Side.DRAFTER, getattr(self.pair.verifier, what), slot, Cause.PREEMPTED))

    @rule(milliseconds=st.sampled_from([1, 400, 1100, 70_000]))
    def wait(self, milliseconds: int) -> None:
        self.pair.tick(milliseconds * 1_000_000)
        self.put([])

    @precondition(lambda self: self.way)
    @rule(data=st.data(), fate=st.sampled_from(["good", "good", "good", "good", "lost", "twice", "last", "bent"]))
    def deliver(self, data: st.DataObject, fate: str) -> None:
        parcel = self.way.pop(-1 if fate == "last" else 0)
        frames = {"lost": (), "twice": (parcel.frame, parcel.frame)}.get(fate, (parcel.frame,))
        if fate == "bent":
            rng = Random(data.draw(st.integers(0, 2**32 - 1)))
            frames = Mutator(rng, POOL).mutant(specimen_of(*parcel)).frames
        for frame in frames:
            self.trial.feed(parcel.to, frame, answer=False)
        self.put(self.pair.sent())

    @precondition(lambda self: self.way)
    @rule()
    def deliver_all(self) -> None:
        while self.way:
            parcel = self.way.pop(0)
            self.trial.feed(parcel.to, parcel.frame, answer=False)
            self.put(self.pair.sent())

    @rule(seed=st.integers(0, 2**32 - 1))
    def forge(self, seed: int) -> None:
        rng = Random(seed)
        specimen = rng.choice(POOL.all)
        for frame in Mutator(rng, POOL).mutant(specimen).frames:
            self.trial.feed(specimen.to, frame, answer=False)
        self.put(self.pair.sent())

    def teardown(self) -> None:
        self.trial.close()
        self.trial.probe()


BadLink.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
TestBadLink = BadLink.TestCase
