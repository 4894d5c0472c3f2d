"""Version 1 of the exchange: who may speak it with whom, greedy sessions only, and replies that are tokens alone."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import pytest
from wire_pairs import Pair, compatibility, connect, counted, parameters, rebuilt, reply_arrays

from dspark_proto import (
    Accepted,
    Authentication,
    DrafterConnection,
    ErrorCode,
    HelloParameters,
    Key,
    Lane,
    LocalProtocolError,
    MessageType,
    PeerError,
    Rejected,
    ReplyLayout,
    StepFailed,
    SupportPolicy,
    VerifierConnection,
    WireVersion,
    decode_canonical,
    decode_frame,
    encode_frame,
)
from dspark_proto.bodies import describe
from dspark_proto.checksums import body_checksum, crc32c
from dspark_proto.hello import Accept, Compatibility, Hello
from dspark_proto.messages import Completion, Open, Row
from dspark_proto.registry import BodyKind, Capability, Checksum, Dtype, Representation

V1, V2 = WireVersion.V1_0, WireVersion.V2_0
SPEAKS = {"v1": (V1,), "v2": (V2,), "both": (V2, V1)}
GREEDY = {"support": SupportPolicy.K1, "lane": Lane.GREEDY}


def speaker(epoch: int, *versions: WireVersion, **changes: Any) -> HelloParameters:
    return parameters(epoch, versions=versions or (V1,), **changes)


def v1_pair(**changes: Any) -> Pair:
    """A connection of version 1."""
    return connect(speaker(100, **changes), speaker(200, **changes))


def greedy_reply(depth: int = 5, token: int = 7, **changes: Any) -> dict[str, Any]:
    return reply_arrays(depth, 1, token) | changes


def asked(pair: Pair) -> list[memoryview]:
    """The frames that answer a greedy STEP of depth 5."""
    pair.open(**GREEDY)
    (item,) = pair.step(pair.item(1, lane=Lane.GREEDY))
    return pair.drafter.reply(item, **greedy_reply(confidences=[2**23, 0, 1, 2, 2**24]))


# Negotiation


def attempt(pair: Pair, version: WireVersion) -> Any:
    """HELLO of one version; returns what the verifier is told."""
    (received,) = pair.up(pair.verifier.hello(0, version))
    frame = pair.drafter.reject() if received.code else pair.drafter.accept(0)
    (event,) = pair.down(frame)
    return event


@pytest.mark.parametrize("drafter", SPEAKS)
@pytest.mark.parametrize("verifier", SPEAKS)
def test_version_matrix(verifier: str, drafter: str) -> None:
    """A verifier asks for its first version; for its next one only after BAD_VERSION, and only if it has one."""
    pair = Pair(VerifierConnection(speaker(100, *SPEAKS[verifier])), DrafterConnection(speaker(200, *SPEAKS[drafter])))
    expected = {
        ("v1", "v1"): [V1],
        ("v1", "both"): [V1],
        ("v2", "v2"): [V2],
        ("v2", "both"): [V2],
        ("both", "v2"): [V2],
        ("both", "both"): [V2],
        ("both", "v1"): [None, V1],
    }.get((verifier, drafter), [None])
    found = []
    for version in SPEAKS[verifier]:
        event = attempt(pair, version)
        if isinstance(event, Accepted):
            found.append(event.negotiated.version)
            break
        assert event == Rejected(ErrorCode.BAD_VERSION, "HELLO.wire_versions", "", "")
        found.append(None)
    assert found == expected
    if found[-1] is not None:
        assert pair.drafter.negotiated is not None
        assert pair.drafter.negotiated.version is found[-1]


def test_a_verifier_says_nothing_that_it_was_not_told_to_say() -> None:
    verifier = VerifierConnection(parameters(100))
    with pytest.raises(LocalProtocolError) as caught:
        verifier.hello(0, V1)
    assert caught.value.code is ErrorCode.BAD_VERSION
    hello = decode_frame(verifier.hello(0)).message
    assert isinstance(hello, Hello)
    assert hello.wire_versions == (0x0200,)


def test_both_speak_version_2_unless_told_otherwise() -> None:
    assert parameters(1).versions == (V2,)


def test_hello_of_version_1() -> None:
    frame = VerifierConnection(speaker(100, V1, dense_rows=True)).hello(0)
    assert frame[4] == 2
    hello = decode_frame(frame).message
    assert isinstance(hello, Hello)
    compat = Compatibility.from_values(decode_canonical(hello.compat))
    assert compat == replace(compatibility(), lanes=0b100, wire_major=1)
    assert (hello.wire_versions, hello.reply_bytes, hello.capabilities) == ((0x0100,), 5 * 16, 0)


def test_terms_of_version_1() -> None:
    pair = v1_pair()
    terms = pair.verifier.negotiated
    assert terms is not None
    assert (terms.version, terms.lanes, terms.reply_bytes, terms.dense_rows) == (V1, 0b100, 80, False)
    assert pair.verifier.staging is not None
    assert [len(lease.storage) for lease in pair.verifier.staging.leases] == [80] * 4


def test_capabilities_are_not_for_version_1() -> None:
    pair = Pair(VerifierConnection(speaker(100)), DrafterConnection(speaker(200, V1, dense_rows=True)))
    hello = decode_frame(pair.verifier.hello(0)).message
    (received,) = pair.up(encode_frame(replace(hello, capabilities=Capability.DENSE_ROWS.mask)))
    assert received.code is None
    accept = decode_frame(pair.drafter.accept(0)).message
    assert isinstance(accept, Accept)
    assert (accept.capabilities, accept.reply_bytes) == (0, 80)
    (event,) = pair.down(encode_frame(replace(accept, capabilities=Capability.DENSE_ROWS.mask)))
    assert event.code is ErrorCode.BAD_NEGOTIATION


def test_compat_is_that_of_the_version() -> None:
    """A HELLO that names version 1 and has the fields of version 2, and the other way round."""
    pair = Pair(VerifierConnection(speaker(100, V2, V1)), DrafterConnection(speaker(200, V2, V1)))
    for version, other, field in ((V1, 0x0200, "lanes"), (V2, 0x0100, "lanes")):
        hello = decode_frame(pair.verifier.hello(0, version)).message
        (received,) = pair.up(encode_frame(replace(hello, wire_versions=(other,))))
        assert received.code is ErrorCode.INCOMPATIBLE
        assert received.mismatch.field == field
        pair.drafter.reject()


def test_a_hello_of_both_majors_gets_the_higher_one() -> None:
    pair = Pair(VerifierConnection(speaker(100, V2, V1)), DrafterConnection(speaker(200, V1, V2)))
    hello = decode_frame(pair.verifier.hello(0, V2)).message
    (received,) = pair.up(encode_frame(replace(hello, wire_versions=(0x0100, 0x0200))))
    assert received.negotiated.version is V2


@pytest.mark.parametrize(("said", "answered"), [(V1, 0x0200), (V2, 0x0100), (V1, 0x0101)])
def test_an_accept_of_another_version_than_that_of_hello_is_refused(said: WireVersion, answered: int) -> None:
    pair = Pair(VerifierConnection(speaker(100, V2, V1)), DrafterConnection(speaker(200, V2, V1)))
    pair.up(pair.verifier.hello(0, said))
    accept = decode_frame(pair.drafter.accept(0)).message
    assert isinstance(accept, Accept)
    (event,) = pair.down(encode_frame(replace(accept, wire_version=answered)))
    assert event.code is ErrorCode.BAD_VERSION
    assert pair.verifier.staging is None


def test_a_new_handshake_starts_with_the_first_version_again() -> None:
    pair = Pair(VerifierConnection(speaker(100, V2, V1)), DrafterConnection(speaker(200, V1)))
    assert attempt(pair, V2).code is ErrorCode.BAD_VERSION
    assert attempt(pair, V1).negotiated.version is V1
    hello = decode_frame(pair.verifier.hello(0)).message
    assert isinstance(hello, Hello)
    assert hello.wire_versions == (0x0200,)


def test_version_1_is_proven_too() -> None:
    def holder(epoch: int) -> HelloParameters:
        return speaker(epoch, authentication=Authentication(bytes(16), lambda: bytes([epoch % 256]) * 32))

    pair = Pair(VerifierConnection(holder(100)), DrafterConnection(holder(200)))
    pair.up(pair.verifier.hello(0))
    pair.down(*pair.drafter.frames_to_send())
    (received,) = pair.up(*pair.verifier.frames_to_send())
    assert received.code is None
    (accepted,) = pair.down(pair.drafter.accept(0))
    assert accepted.negotiated.version is V1


@pytest.mark.parametrize(
    "changes",
    [
        {"versions": ()},
        {"versions": (0x0200,)},
        {"versions": (V1,), "compat": compatibility(lanes=0b011)},
    ],
)
def test_versions_that_a_side_cannot_have(changes: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        parameters(1, **changes)


# Sessions


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"lane": Lane.RATIO}, ErrorCode.LANE_MISMATCH),
        ({"lane": Lane.MATCH}, ErrorCode.LANE_MISMATCH),
        ({"draft_temperature_micro": 1}, ErrorCode.LANE_MISMATCH),
        ({"support": SupportPolicy.K32}, ErrorCode.SUPPORT_OUT_OF_RANGE),
        ({"support": SupportPolicy.DENSE}, ErrorCode.SUPPORT_OUT_OF_RANGE),
    ],
)
def test_only_greedy_sessions_are_opened(changes: dict[str, Any], code: ErrorCode) -> None:
    pair = v1_pair()
    with pytest.raises(LocalProtocolError) as caught:
        pair.verifier.open(0, 1, **(GREEDY | {"seed": 1} | changes))
    assert caught.value.code is code
    assert pair.verifier.generation(0) == 0
    # And where a verifier asks all the same, the drafter refuses.
    message = decode_frame(pair.verifier.open(0, 1, seed=1, **GREEDY)).message
    assert isinstance(message, Open)
    assert pair.up(encode_frame(replace(message, **changes), Key(0, 1))) == []
    assert counted(pair.drafter.counters) == {code.counter: 1}
    errors = [decode_frame(frame).message for frame in pair.drafter.frames_to_send()]
    assert [error.code for error in errors] == [code]  # type: ignore[attr-defined]


def test_version_2_is_not_bound_by_that() -> None:
    pair = connect(speaker(100, V2, V1), speaker(200, V2, V1))
    pair.open(support=SupportPolicy.K32, lane=Lane.RATIO, draft_temperature_micro=700_000)
    (item,) = pair.step(pair.item(1))
    frames = pair.drafter.reply(item, **reply_arrays())
    row = decode_frame(frames[0]).message
    assert isinstance(row, Row)
    assert row.representation is Representation.SPARSE


# Replies


def test_a_reply_has_records_alone() -> None:
    frames = asked(v1_pair())
    assert [frame[4] for frame in frames] == [2, 2]
    row, completion = (decode_frame(frame) for frame in frames)
    assert isinstance(row.message, Row)
    assert isinstance(completion.message, Completion)
    assert (row.message.representation, row.message.support) == (Representation.TOKENS, 1)
    assert [len(body) for body in row.bodies] == [80]
    assert completion.message.reply_bytes == 80


def test_the_rows_of_a_proposal_are_those_that_are_implied() -> None:
    pair = v1_pair()
    (ready,) = pair.down(*asked(pair))
    assert (ready.tokens, ready.entries, ready.support, ready.depth) == ((7,) * 5, (1,) * 5, 1, 5)
    assert ready.ids == array("i", [7] * 5).tobytes()
    assert ready.q == array("f", [1.0] * 5).tobytes()
    assert ready.confidences == (2**23, 0, 1, 2, 2**24)
    assert ready.ids.readonly
    ready.lease.release()
    assert counted(pair.verifier.counters) == counted(pair.drafter.counters) == {}


def test_a_round_follows_a_round_with_its_commit() -> None:
    pair = v1_pair()
    (ready,) = pair.down(*asked(pair))
    ready.lease.release()
    (item,) = pair.step(pair.item(2, lane=Lane.GREEDY, accepted_count=0, commit_token=42))
    (ready,) = pair.down(*pair.drafter.reply(item, **greedy_reply(token=999)))
    assert ready.tokens == (999,) * 5


def test_a_repeated_step_gets_the_same_bytes() -> None:
    pair = v1_pair()
    pair.open(**GREEDY)
    item = pair.item(1, lane=Lane.GREEDY)
    (taken,) = pair.step(item)
    frames = [bytes(frame) for frame in pair.drafter.reply(taken, **greedy_reply())]
    pair.up(pair.verifier.step([item], 0))
    assert [bytes(frame) for frame in pair.drafter.frames_to_send()] == frames


@pytest.mark.parametrize(
    "changes",
    [
        {"q": array("f", [0.5] * 5).tobytes()},
        {"ids": array("i", [8] * 5).tobytes()},
        {"entries": [2] * 5},
        {"tokens": [7, 7, 7, 7, -1], "ids": array("i", [7, 7, 7, 7, -1]).tobytes()},
        {"tokens": [7, 7, 7, 7, 2**31]},
    ],
)
def test_a_drafter_cannot_say_more_than_tokens(changes: dict[str, Any]) -> None:
    pair = v1_pair()
    pair.open(**GREEDY)
    (item,) = pair.step(pair.item(1, lane=Lane.GREEDY))
    with pytest.raises(LocalProtocolError) as caught:
        pair.drafter.reply(item, **greedy_reply(**changes))
    assert caught.value.code is ErrorCode.BAD_ROW_RECORD


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"representation": Representation.SPARSE}, ErrorCode.WRONG_SIZE),
        ({"representation": Representation.DENSE}, ErrorCode.WRONG_SIZE),
        ({"support": 0}, ErrorCode.WRONG_SIZE),
        ({"row_count": 4}, ErrorCode.BAD_DESCRIPTOR),
    ],
)
def test_a_row_of_another_form_discards_the_proposal(changes: dict[str, Any], code: ErrorCode) -> None:
    pair = v1_pair()
    frames = asked(pair)
    (event,) = pair.down(rebuilt(bytearray(frames[0]), **changes))
    assert isinstance(event, StepFailed)
    assert event.code is code


def test_records_with_more_than_one_entry_are_refused() -> None:
    """Whole and with right checksums, but of a row that version 1 has no place for."""
    pair = v1_pair()
    frames = asked(pair)
    row, completion = (decode_frame(frame) for frame in frames)
    # The same records as a sparse reply of support 2 would have them: entries 2, its own crc.
    under = (7).to_bytes(4, "little") + (2).to_bytes(4, "little") + (2**24).to_bytes(4, "little")
    record = under[:8] + crc32c(memoryview(under)).to_bytes(4, "little") + under[8:]
    body = memoryview(record * 5)
    descriptor = describe(BodyKind.RECORDS, Dtype.BYTES, 5, 16, body, Checksum.XXH3_64)
    assert isinstance(row.message, Row)
    assert isinstance(completion.message, Completion)
    checksum = body_checksum(Checksum.XXH3_64, body)
    events = pair.down(
        encode_frame(replace(row.message, bodies=(descriptor,)), row.prefix.key, [body]),
        encode_frame(replace(completion.message, reply_checksum=checksum), completion.prefix.key),
    )
    assert [event.code for event in events] == [ErrorCode.BAD_ROW_RECORD]


def test_version_2_takes_no_reply_of_version_1() -> None:
    pair = connect(speaker(100, V2, V1), speaker(200, V2, V1))
    pair.open(**GREEDY)
    (item,) = pair.step(pair.item(1, lane=Lane.GREEDY))
    frames = pair.drafter.reply(item, **greedy_reply())
    (event,) = pair.down(rebuilt(bytearray(frames[0]), representation=Representation.TOKENS))
    assert event.code is ErrorCode.WRONG_SIZE


def test_a_major_of_1_in_the_prefix_is_no_frame() -> None:
    """The frame layout is that of version 2 on every connection (SPEC.md 4.1, 7.9)."""
    pair = v1_pair()
    frame = bytearray(pair.verifier.ping(0))
    frame[4] = 1
    frame[44:48] = crc32c(memoryview(frame)[:44]).to_bytes(4, "little")
    assert pair.up(frame) == []
    assert counted(pair.drafter.counters) == {"bad_version": 1}


def test_layout_of_tokens() -> None:
    layout = ReplyLayout(5, 1, tokens_only=True)
    assert (layout.total_bytes, layout.rows_per_frame) == (80, 2**20 // 16)
    assert layout.spans(1, 2) == ((16, 32),)
    assert [shape[0].name for shape in layout.shapes(5)] == ["RECORDS"]


def test_an_unsolicited_error_ends_the_connection_and_not_its_version() -> None:
    """Loss is loss: nothing that happens to a connection makes it one of another version."""
    pair = v1_pair()
    pair.drafter = DrafterConnection(speaker(201, V2, V1))
    pair.up(pair.verifier.ping(0))
    (event,) = pair.settle()
    assert isinstance(event, PeerError)
    assert pair.verifier.negotiated is not None
    assert pair.verifier.negotiated.version is V1
    assert MessageType.HELLO not in {decode_frame(one).prefix.type for one in pair.verifier.frames_to_send()}
