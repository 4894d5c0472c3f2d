"""One round in bytes, for SPEC.md: both connections talk, and every frame is shown with what its parts mean.

The pair is the smallest that shows every part: a vocabulary of 100 tokens, one tap of four floats, rows of 16 entries.
Invariant: epochs, seed and taps are constants, so that the bytes never change on their own. Called by `document`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from hashlib import sha256

from ..buffers import Buffer, aligned
from ..canonical import Value
from ..digest import prefix_digest
from ..drafter import DrafterConnection
from ..frame import decode_frame
from ..hello import Compatibility
from ..limits import PREFIX_BYTES, SLOT_NONE
from ..messages import StepItem
from ..negotiation import HelloParameters
from ..registry import BodyKind, Dtype, Lane, SupportPolicy
from ..verifier import VerifierConnection

_MASS = 2**24
_TEXT = [5, 6, 7]
_ANCHOR = 5
_ROWS = (((6, 12_582_912), (8, 4_194_304)), ((7, 16_777_216),))
"""q of two drafted positions: after the anchor 6 or 8, after 6 always 7; both sum to 2^24."""
_DRAFTS = [6, 7]
_CORRECTION = 9
_SESSION = 1
_LINE = 16


def _parameters(epoch: int) -> HelloParameters:
    compatibility = Compatibility(
        vocab_size=100,
        token_map_hash=sha256(b"map").digest(),
        draft_identity="draft@1",
        target_identity="target@1",
        tokenizer_hash=sha256(b"tokenizer").digest(),
        tap_layers=(3,),
        tap_dtype=Dtype.FP32,
        tap_width=4,
    )
    return HelloParameters(
        compatibility, epoch, max_slots=2, max_depth=2, max_support=16, max_in_flight=2, context_credit_rows=64
    )


def _taps(*positions: int) -> bytes:
    """Position p has the four values p, p + 0.25, p + 0.5, p + 0.75."""
    return b"".join(struct.pack("<4f", *(position + part / 4 for part in range(4))) for position in positions)


def _item(round_: int, tokens: Sequence[int], anchor: int, first: int, **commit: int) -> StepItem:
    """A STEP item: ``tokens`` stand before the anchor, and taps are sent from ``first`` on."""
    rows = len(tokens) - first
    taps = _taps(*range(first, len(tokens)))
    return StepItem(
        _SESSION, 0, 1, round_, anchor, len(tokens), prefix_digest(tokens), 2, Lane.RATIO,
        tap_first=first, tap_rows=rows, taps=taps, **commit,
    )  # fmt: skip


def _reply(drafter: DrafterConnection, item: StepItem) -> list[memoryview]:
    ids = b"".join(struct.pack("<16i", *[token for token, _ in row], *[0] * (16 - len(row))) for row in _ROWS)
    q = b"".join(struct.pack("<16f", *[count / _MASS for _, count in row], *[0] * (16 - len(row))) for row in _ROWS)
    return drafter.reply(item, _DRAFTS, [len(row) for row in _ROWS], ids, q, draft_us=250)


def conversation() -> Iterator[tuple[str, bytes]]:
    """(what is sent, the frame) for each frame from HELLO to the STEP that commits the round."""
    verifier, drafter = VerifierConnection(_parameters(0xA1)), DrafterConnection(_parameters(0xB2))

    def sent(title: str, frame: Buffer) -> tuple[str, bytes]:
        receiver = verifier if title.startswith("D -> V") else drafter
        receiver.receive(frame, 0)
        return title, bytes(frame)

    yield sent("V -> D HELLO", verifier.hello(0))
    yield sent("D -> V ACCEPT", drafter.accept(0))
    opened = verifier.open(0, _SESSION, seed=-1, support=SupportPolicy.K16, lane=Lane.RATIO,
                           draft_temperature_micro=700_000)  # fmt: skip
    yield sent("V -> D OPEN slot 0, generation 1", opened)
    tokens = b"".join(token.to_bytes(4, "little") for token in _TEXT)
    (context,) = verifier.context(0, 0, 3, _taps(0, 1, 2), tokens).frames
    yield sent("V -> D CONTEXT of positions 0, 1, 2: tokens 5, 6, 7", context)
    first = _item(1, _TEXT, _ANCHOR, 3)
    yield sent("V -> D STEP round 1: anchor 5 at position 3, depth 2", verifier.step([first], 0))
    row, completion = _reply(drafter, first)
    yield sent("D -> V ROW: drafts 6 and 7", row)
    yield sent("D -> V COMPLETION", completion)
    second = _item(2, [*_TEXT, _ANCHOR, 6], _CORRECTION, 3, accepted_count=1, commit_token=_CORRECTION)
    title = "V -> D STEP round 2: draft 6 was accepted, 7 was not; the correction 9 at position 5 is the new anchor"
    yield sent(title, verifier.step([second], 0))


def _shown(value: Value) -> str:
    """A control value: numbers, "text", and h'...' for byte strings, the middle of long ones left out."""
    if isinstance(value, bytes):
        shown = value.hex()
        return f"h'{shown if len(value) <= 32 else f'{shown[:16]}...{shown[-8:]} ({len(value)} bytes)'}'"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def hex_lines(frame: bytes) -> list[str]:
    """Offset and 16 bytes a line; a `*` stands for lines of zeros after one that is shown."""
    lines: list[str] = []
    for start in range(0, len(frame), _LINE):
        line = frame[start : start + _LINE]
        if not any(line) and start and not any(frame[start - _LINE : start]):
            lines += ["*"] if lines[-1] != "*" else []
            continue
        lines.append(f"{start:04x}  {line.hex(' ')}")
    return [*lines, f"{len(frame):04x}"]


def _part(title: str, frame: bytes) -> str:
    found = decode_frame(frame)
    prefix = found.prefix
    key = "no key" if prefix.slot == SLOT_NONE else f"slot {prefix.slot}, generation {prefix.generation}"
    at = aligned(PREFIX_BYTES + prefix.control_bytes)
    facts = [f"prefix: type {int(prefix.type)}, {key}, round {prefix.round}, control {prefix.control_bytes} B at 0030"]
    facts.append(f"control: {_shown(found.message.values())}")
    for body, kind in zip(found.bodies, _kinds(found.message.values()), strict=True):
        facts.append(f"body {kind.name}: {len(body)} B at {at:04x}")
        at += aligned(len(body))
    return "\n".join([f"**{title}** ({len(frame)} B)", "", "```text", *facts, "", *hex_lines(frame), "```"])


def _kinds(values: list[Value]) -> list[BodyKind]:
    """Kinds of the bodies: the first fields of the descriptors, which end the control of a message with bodies."""
    last = values[-1]
    described = last if isinstance(last, list) else []
    return [BodyKind(one[0]) for one in described if isinstance(one, list) and isinstance(one[0], int)]


def worked_round() -> str:
    """The Markdown of the whole conversation."""
    return "\n\n".join(_part(title, frame) for title, frame in conversation())
