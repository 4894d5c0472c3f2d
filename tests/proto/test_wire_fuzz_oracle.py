"""The fuzzer itself: its frames, its mutations, and that every kind of escape is seen when it happens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dspark_proto import (
    DrafterConnection,
    DrafterState,
    ErrorCode,
    MessageType,
    RemoteProtocolError,
    SlotState,
    SupportPolicy,
    VerifierState,
    WireVersion,
    decode_frame,
    encode_canonical,
)
from dspark_proto.fuzzing import (
    Campaign,
    Escape,
    Finding,
    Mutator,
    Parcel,
    Pool,
    Side,
    Trial,
    recorded,
    replay,
    specimen_of,
    staged,
)
from dspark_proto.fuzzing import trial as trial_module
from dspark_proto.fuzzing.conversation import BYSTANDER, OTHER_SESSION, Stage, expected_at
from dspark_proto.fuzzing.encoding import Seal, header_forms, scan, seal, uint_forms
from dspark_proto.fuzzing.mutator import ANY_FRAME, UNCHANGED, WITH_BODIES, WITH_CONTROL, Mutant, Mutation
from dspark_proto.fuzzing.pair import SESSION, Terms
from dspark_proto.fuzzing.specimens import Specimen, golden

VECTORS = Path(__file__).parents[2] / "proto" / "vectors"
POOL = Pool(specimen_of(*parcel) for session in (77, OTHER_SESSION) for parcel in recorded(session))
WITH_BODY = [one for one in POOL.apart if one.descriptors]


# Seeds and stages


def test_the_recorded_session_has_every_type_and_is_the_same_again() -> None:
    assert {decode_frame(parcel.frame).prefix.type for parcel in recorded()} == set(MessageType)
    for terms in Terms:
        assert recorded.__wrapped__(SESSION, terms) == recorded(SESSION, terms)
    assert {one.frame for one in POOL.all} > {parcel.frame for parcel in recorded(OTHER_SESSION)}


STATES = {
    Stage.FRESH: (VerifierState.IDLE, DrafterState.AWAITING_HELLO, None),
    Stage.HELLO_SENT: (VerifierState.HELLO_SENT, DrafterState.AWAITING_HELLO, None),
    Stage.HELLO_RECEIVED: (VerifierState.HELLO_SENT, DrafterState.HELLO_RECEIVED, None),
    Stage.OPEN: (VerifierState.ACTIVE, DrafterState.ACTIVE, SlotState.READY),
    Stage.IN_FLIGHT: (VerifierState.ACTIVE, DrafterState.ACTIVE, SlotState.AWAITING),
    Stage.HALF_REPLY: (VerifierState.ACTIVE, DrafterState.ACTIVE, SlotState.AWAITING),
    Stage.REPLIED: (VerifierState.ACTIVE, DrafterState.ACTIVE, SlotState.READY),
    Stage.SECOND_ROUND: (VerifierState.ACTIVE, DrafterState.ACTIVE, SlotState.AWAITING),
    Stage.DORMANT: (VerifierState.ACTIVE, DrafterState.ACTIVE, SlotState.READY),
    Stage.DRAINING: (VerifierState.DRAINING, DrafterState.DRAINING, SlotState.READY),
    Stage.CHALLENGED: (VerifierState.HELLO_SENT, DrafterState.CHALLENGED, None),
    Stage.PROOF_SENT: (VerifierState.PROOF_SENT, DrafterState.CHALLENGED, None),
    Stage.V1_OPEN: (VerifierState.ACTIVE, DrafterState.ACTIVE, SlotState.READY),
    Stage.V1_IN_FLIGHT: (VerifierState.ACTIVE, DrafterState.ACTIVE, SlotState.AWAITING),
    Stage.V1_REPLIED: (VerifierState.ACTIVE, DrafterState.ACTIVE, SlotState.READY),
}


@pytest.mark.parametrize("stage", Stage)
def test_stages_are_what_they_are_called(stage: Stage) -> None:
    pair = staged(stage)
    verifier, drafter, slot = STATES[stage]
    assert (pair.verifier.state, pair.drafter.state) == (verifier, drafter)
    if slot is not None:
        assert pair.verifier.slot_state(0) is slot
    if stage is Stage.DORMANT:
        assert pair.verifier.slot_state(1) is SlotState.DORMANT
    negotiated = pair.verifier.negotiated
    if negotiated is not None:
        assert (negotiated.version is WireVersion.V1_0) is stage.name.startswith("V1_")
    assert expected_at(stage)
    trial = Trial(pair)
    trial.probe()
    trial.close()


@pytest.mark.parametrize(
    "stage", [Stage.IN_FLIGHT, Stage.HALF_REPLY, Stage.SECOND_ROUND, Stage.DRAINING, Stage.V1_IN_FLIGHT]
)
def test_the_bystander_stays_in_its_round(stage: Stage) -> None:
    pair = staged(stage)
    assert pair.verifier.slot_state(BYSTANDER) is SlotState.AWAITING
    assert [item.slot for item in pair.items].count(BYSTANDER) == 1


# Encoding


@pytest.mark.parametrize("value", [0, 127, 128, 255, 256, 65535, 65536, 2**32 - 1, 2**32, 2**64 - 1])
def test_the_shortest_integer_form_is_the_canonical_one(value: int) -> None:
    forms = uint_forms(value)
    assert b"\x91" + forms[0] == encode_canonical([value])
    assert [len(form) for form in forms] == sorted({len(form) for form in forms})


@pytest.mark.parametrize("size", [0, 15, 16, 31, 32, 255, 256, 65535, 65536])
def test_the_shortest_headers_are_the_canonical_ones(size: int) -> None:
    assert header_forms("bin", size)[0] + bytes(size) == encode_canonical([bytes(size)])[1:]
    assert header_forms("str", size)[0] + b"a" * size == encode_canonical(["a" * size])[1:]
    assert header_forms("array", size)[0] + bytes(size) == encode_canonical([0] * size)


@pytest.mark.parametrize("specimen", POOL.apart, ids=lambda one: MessageType(one.type).name)
def test_elements_tile_the_control_block(specimen: Specimen) -> None:
    outer = specimen.elements[0]
    assert (outer.start, outer.end) == (0, len(specimen.control))
    for index, element in enumerate(specimen.elements):
        children = [one for one in specimen.elements if one.parent == index]
        assert len(children) == (element.size if element.kind == "array" else 0)
        assert [one.start for one in children] == [element.content, *(one.end for one in children)][: len(children)]
    assert len(specimen.descriptor_elements) == len(specimen.descriptors)


@pytest.mark.parametrize("control", [b"\xc0", b"\x92\x01", b"\xc4\x05ab", b"\x01\x01", b""])
def test_what_the_profile_has_not_cannot_be_taken_apart(control: bytes) -> None:
    with pytest.raises(ValueError, match=r"type|cut|after"):
        scan(control)


def test_a_full_seal_makes_a_frame_whole_and_others_do_not() -> None:
    for specimen in POOL.all:
        broken = bytearray(specimen.frame)
        broken[40:48] = bytes(8)
        assert seal(bytearray(broken), Seal.FULL) == specimen.frame
        for level, code in ((Seal.PREFIX, ErrorCode.BAD_CONTROL_CRC), (Seal.NONE, ErrorCode.BAD_PREFIX_CRC)):
            with pytest.raises(RemoteProtocolError) as caught:
                decode_frame(seal(bytearray(broken), level))
            assert caught.value.code is code


# Mutations


def fitting(mutation: Mutation) -> list[Specimen]:
    if mutation in WITH_BODIES:
        return WITH_BODY
    return list(POOL.apart if mutation in WITH_CONTROL else POOL.all)


@pytest.mark.parametrize("mutation", {*ANY_FRAME, *WITH_CONTROL, *WITH_BODIES}, ids=lambda one: one.__name__)
def test_mutations_change_frames_and_depend_on_the_seed_alone(mutation: Mutation) -> None:
    changed = 0
    for number, specimen in enumerate(fitting(mutation)):
        mutant = mutation(Random(number), specimen, POOL)
        assert mutant == mutation(Random(number), specimen, POOL)
        changed += mutant != specimen.frame
    assert changed * 4 > len(fitting(mutation))


def codes(mutation: Mutation, rounds: int = 4) -> set[str]:
    """The codes under which sealed mutants are refused; "accepted" for the others."""
    found = set()
    for number, specimen in enumerate(fitting(mutation) * rounds):
        try:
            decode_frame(seal(mutation(Random(number), specimen, POOL), Seal.FULL))
            found.add("accepted")
        except RemoteProtocolError as error:
            found.add(error.code.name)
    return found


EXPECTED = {
    "truncate": {"WRONG_SIZE"},
    "extend": {"WRONG_SIZE"},
    "prefix_field": {"LIMIT_EXCEEDED", "RESERVED_NOT_ZERO", "UNKNOWN_TYPE", "BAD_VERSION", "accepted"},
    "wrong_type": {"NONCANONICAL", "BAD_FIELD"},
    "edge_integer": {"BAD_FIELD", "accepted", "BAD_DESCRIPTOR"},
    "overlong": {"NONCANONICAL"},
    "length_lie": {"NONCANONICAL"},
    "resize_bytes": {"BAD_FIELD", "accepted"},
    "rearrange": {"BAD_FIELD", "NONCANONICAL"},
    "transplant": {"BAD_FIELD", "accepted"},
    "bomb": {"NONCANONICAL"},
    "changed_body": {"accepted"},
    "resized_body": {"accepted", "BAD_DESCRIPTOR"},
    "descriptor_lie": {"BAD_DESCRIPTOR", "BAD_FIELD"},
    "padding_set": {"BAD_PADDING"},
}


@pytest.mark.parametrize("mutation", {*ANY_FRAME, *WITH_CONTROL, *WITH_BODIES}, ids=lambda one: one.__name__)
def test_sealed_mutants_reach_the_checks_behind_the_checksums(mutation: Mutation) -> None:
    found = codes(mutation)
    assert found >= EXPECTED.get(mutation.__name__, set())
    assert "BAD_PREFIX_CRC" not in found


def test_mutators_use_every_mutation_and_every_seal() -> None:
    mutator = Mutator(Random(1), POOL)
    mutants = [mutator.mutant(specimen) for specimen in POOL.all * 30]
    names = {one.__name__ for one in (*ANY_FRAME, *WITH_CONTROL, *WITH_BODIES)}
    assert {mutant.how for mutant in mutants} == names | {"unchanged", "forged_reply"}
    assert {mutant.seal for mutant in mutants} == set(Seal)


def test_forged_replies_pass_every_checksum_and_are_judged_by_value() -> None:
    row = next(one for one in POOL.by_type[MessageType.ROW] if len(one.descriptors) == 3)
    mutator = Mutator(Random(1), POOL)
    forged = [one for one in (mutator.mutant(row) for _ in range(200)) if one.how == "forged_reply"]
    proposals, refused = 0, set()
    for mutant in forged:
        pair = staged(Stage.IN_FLIGHT)
        for frame in mutant.frames:
            pair.deliver(Side.VERIFIER, frame)
        proposals += pair.proposals
        refused |= {name for name, count in pair.verifier.counters.items() if count}
    assert proposals > 0
    assert refused == {"bad_row_record"}


@pytest.mark.parametrize("length", [0, 1, 6, 19, 47, 48, 60])
def test_pieces_of_frames_are_specimens_without_elements(length: int) -> None:
    """What a coverage-guided engine makes of a frame must not stop the mutator."""
    specimen = specimen_of(Side.DRAFTER, recorded()[0].frame[:length])
    assert (specimen.elements, specimen.descriptors, specimen.descriptor_elements) == ((), (), ())
    assert len(specimen.control) == max(0, length - 48)
    mutator = Mutator(Random(length), POOL)
    assert {mutator.mutant(specimen).how for _ in range(200)} == {one.__name__ for one in ANY_FRAME} | {"unchanged"}


def test_the_golden_vectors_are_specimens_too() -> None:
    found = golden(VECTORS)
    assert {MessageType(one.type) for one in found if one.elements} == set(MessageType)
    assert any(not one.elements for one in found)


# What is seen


Act = Callable[[Any, bytes, Any], Any]
"""A defect: called after `receive` with the connection, the frame and the events; returns the events."""


def spoil(connection: Any, act: Act) -> None:
    """Give one connection a defect."""
    receive = connection.receive
    connection.receive = lambda frame, now_ns: act(connection, frame, receive(frame, now_ns))


def escape_of(frame: bytes, act: Act | None = None, to: Side = Side.DRAFTER, **options: Any) -> str:
    """The kind of escape that `frame` causes while rounds are in flight, the probe included."""
    trial = Trial(staged(Stage.IN_FLIGHT), **options)
    if act is not None:
        spoil(trial.pair.connection(to), act)
    try:
        trial.feed(to, frame)
        trial.check_retained()
        trial.probe()
    except Escape as escape:
        return escape.kind
    finally:
        trial.close()
    return ""


PING = next(parcel.frame for parcel in recorded() if parcel.to is Side.DRAFTER and parcel.frame[6] == MessageType.PING)
BROKEN = PING[:44] + bytes(4) + PING[48:]


def raises(_connection: Any, frame: bytes, events: Any) -> Any:
    if frame == PING:
        raise KeyError(5)
    return events


def forgets(connection: Any, frame: bytes, events: Any) -> Any:
    if frame == BROKEN:
        connection.counters["bad_prefix_crc"] -= 1
    return events


def acts_on_damage(connection: Any, frame: bytes, events: Any) -> Any:
    if frame == BROKEN:
        connection._slots[0].round += 1
    return events


def hurts_another(connection: Any, frame: bytes, events: Any) -> Any:
    if frame == PING:
        connection._slots[BYSTANDER].context_end += 1
    return events


def chatters(connection: Any, frame: bytes, events: Any) -> Any:
    if frame == PING:
        connection._outbox.extend([memoryview(PING)] * 100)
    return events


def runs_over(connection: Any, frame: bytes, events: Any) -> Any:
    if frame == PING:
        connection._slots[0].generation = 2**63
    return events


def poisons(connection: Any, frame: bytes, events: Any) -> Any:
    if frame == PING:
        connection.parameters = None
    return events


def forgets_the_bystander(connection: Any, frame: bytes, events: Any) -> Any:
    if frame == PING:
        connection._slots[BYSTANDER].support = SupportPolicy.K1
    return events


@pytest.mark.parametrize(
    ("act", "frame", "kind"),
    [
        (raises, PING, "exception"),
        (forgets, BROKEN, "uncounted"),
        (acts_on_damage, BROKEN, "damage"),
        (hurts_another, PING, "bystander"),
        (chatters, PING, "answers"),
        (runs_over, PING, "limit"),
        (poisons, PING, "liveness"),
        (forgets_the_bystander, PING, "liveness"),
    ],
    ids=lambda value: getattr(value, "__name__", "frame") if not isinstance(value, str) else value,
)
def test_every_kind_of_escape_is_seen(act: Act, frame: bytes, kind: str) -> None:
    assert escape_of(frame) == ""
    assert escape_of(frame, act) == kind


def test_an_answer_to_an_error_is_seen() -> None:
    error = next(one.frame for one in recorded() if one.to is Side.DRAFTER and one.frame[6] == MessageType.ERROR)

    def answers(connection: Any, frame: bytes, events: Any) -> Any:
        if frame == error:
            connection._outbox.append(memoryview(PING))
        return events

    assert escape_of(error) == ""
    assert escape_of(error, answers) == "answers"


@pytest.mark.parametrize("held", [True, False])
def test_memory_is_seen(held: bool) -> None:
    kept = []

    def allocates(_connection: Any, frame: bytes, events: Any) -> Any:
        if frame == PING:
            block = bytearray(1 << 20 if held else 4 << 20)
            kept.extend([block] if held else [])
        return events

    assert escape_of(PING, traced=True) == ""
    assert escape_of(PING, allocates, traced=True) == "memory"
    assert len(kept) == held


def test_time_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**12, 10**9))
    monkeypatch.setattr(trial_module.time, "thread_time_ns", lambda: next(clock))
    assert escape_of(PING) == "time"


def test_a_leaked_staging_block_is_seen() -> None:
    def leaks(connection: Any, frame: bytes, events: Any) -> Any:
        if frame == PING:
            connection._drop_lease = lambda slot: setattr(slot, "lease", None)
        return events

    assert escape_of(PING, to=Side.VERIFIER) == ""
    assert escape_of(PING, leaks, to=Side.VERIFIER) == "liveness"


# Campaigns


def test_a_batch_depends_on_the_seed_and_its_number_alone() -> None:
    first, second = Campaign(5, VECTORS), Campaign(5, VECTORS)
    for batch in (1, 2, 3):
        first.run(batch)
    second.run(2)
    alone, again = Campaign(5, VECTORS), Campaign(5, VECTORS)
    again.run(2)
    alone.run(1)
    alone.run(3)
    assert (second.tally.frames, second.tally.by_code) == (again.tally.frames, again.tally.by_code)
    assert first.tally.by_code == alone.tally.by_code + again.tally.by_code
    assert first.tally.frames == first.tally.accepted + first.tally.refused
    other = Campaign(6, VECTORS)
    other.run(2)
    assert other.tally.by_mutation != again.tally.by_mutation


def test_campaigns_find_what_is_wrong_and_findings_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    receive = DrafterConnection.receive

    def fragile(connection: DrafterConnection, frame: Any, now_ns: int) -> Any:
        events = receive(connection, frame, now_ns)
        if len(frame) > 6 and frame[6] == MessageType.PONG:
            raise IndexError("planted")
        return events

    campaign = Campaign(1, VECTORS)
    with monkeypatch.context() as planted:
        planted.setattr(DrafterConnection, "receive", fragile)
        for batch in range(1, 12):
            campaign.run(batch)
        findings = campaign.tally.findings
        assert campaign.tally.escapes >= len(findings) >= 1
        for finding in findings:
            again = Finding.from_json(json.loads(json.dumps(finding.to_json())))
            assert again == finding
            escape = replay(again)
            assert escape is not None
            assert (escape.kind, escape.detail) == (finding.kind, finding.detail)
    assert [replay(finding) for finding in findings] == [None] * len(findings)


def test_a_conversation_is_replayed_turn_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stray frame joins the third turn; the callers' own calls go on around it."""
    receive = DrafterConnection.receive

    def fragile(connection: DrafterConnection, frame: Any, now_ns: int) -> Any:
        if frame == BROKEN:
            raise IndexError(len(connection._slots))
        return receive(connection, frame, now_ns)

    first, second, third, *_ = recorded()
    turns = ((first,), (second,), (Parcel(Side.DRAFTER, BROKEN), third))
    finding = Finding("exception", "planted", 1, 1, None, turns)
    assert replay(finding) is None
    monkeypatch.setattr(DrafterConnection, "receive", fragile)
    escape = replay(finding)
    assert escape is not None
    assert escape.kind == "exception"
    assert escape.detail.endswith(": 4")


def test_a_campaign_over_every_stage_finds_nothing() -> None:
    campaign = Campaign(2, VECTORS)
    for batch in range(20):
        campaign.run(batch)
    assert [(one.kind, one.detail) for one in campaign.tally.findings] == []
    assert campaign.tally.peak_traced_bytes > 0
    assert 0.7 * campaign.tally.frames < campaign.tally.mutated < 0.95 * campaign.tally.frames
    assert {code.counter for code in ErrorCode if code < ErrorCode.HELLO_REQUIRED} <= set(campaign.tally.by_code)


def test_frames_that_were_left_as_they_are_do_not_count_as_mutated(monkeypatch: pytest.MonkeyPatch) -> None:
    def unchanged(mutator: Mutator, specimen: Specimen) -> Mutant:
        return Mutant((specimen.frame,), UNCHANGED, Seal.FULL)

    monkeypatch.setattr(Mutator, "mutant", unchanged)
    campaign = Campaign(2)
    for batch in range(20):
        campaign.run(batch)
    tally = campaign.tally
    assert tally.mutated == 0
    assert tally.by_mutation["link_bent"] > 0
    assert tally.by_mutation[UNCHANGED] > 100
    assert tally.accepted > 0


def test_findings_of_one_kind_are_counted_and_kept_once() -> None:
    tally = Campaign(1).tally
    finding = Finding("exception", "x", 1, 2, "open", ((Parcel(Side.DRAFTER, b"ab"),),))
    assert tally.add_finding(finding)
    assert not tally.add_finding(finding)
    assert (tally.escapes, tally.findings) == (2, [finding])
