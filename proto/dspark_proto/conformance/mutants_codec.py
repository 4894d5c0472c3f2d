"""Decoders with one bug each. Called by `mutants`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from zlib import crc32

from ..buffers import aligned
from ..checksums import crc32c
from ..registry import ErrorCode, MessageType
from . import repairs
from .as_codec import CodecAnswer, ReferenceCodec
from .forge import PREFIX_BYTES, control_of, field_of, flipped, patched
from .mutants import Mutant
from .record import Role

E = ErrorCode
Decode = Callable[[bytes], CodecAnswer]


class _Changed:
    """A codec that does something else for some frames."""

    def __init__(self, change: Callable[[Decode, bytes], CodecAnswer]) -> None:
        self._change = change

    def decode(self, frame: bytes) -> CodecAnswer:
        """See `Codec`."""
        return self._change(ReferenceCodec().decode, frame)


def _careless(repair: repairs.Repair) -> Callable[[Decode, bytes], CodecAnswer]:
    return lambda decode, frame: decode(repair(frame))


def _eager(code: ErrorCode, faulty: Callable[[bytes], bool]) -> Callable[[Decode, bytes], CodecAnswer]:
    """Looks for one fault before all others."""

    def change(decode: Decode, frame: bytes) -> CodecAnswer:
        return CodecAnswer(code) if len(frame) >= PREFIX_BYTES and faulty(frame) else decode(frame)

    return change


def _confused(
    old: ErrorCode, new: ErrorCode, when: Callable[[bytes], bool] = lambda frame: True
) -> Callable[[Decode, bytes], CodecAnswer]:
    """Answers with another code."""

    def change(decode: Decode, frame: bytes) -> CodecAnswer:
        answer = decode(frame)
        return CodecAnswer(new) if answer.code is old and when(frame) else answer

    return change


def _refusing(code: ErrorCode, when: Callable[[bytes], bool]) -> Callable[[Decode, bytes], CodecAnswer]:
    """Refuses something right."""

    def change(decode: Decode, frame: bytes) -> CodecAnswer:
        answer = decode(frame)
        return CodecAnswer(code) if answer.code is None and when(frame) else answer

    return change


def _padded(frame: bytes) -> bytes:
    """A short prefix is read as if zeros followed."""
    return frame if len(frame) >= PREFIX_BYTES else frame + bytes(PREFIX_BYTES - len(frame))


def _zlib(frame: bytes) -> bytes:
    """The checksum of zlib is right as well."""
    if len(frame) < PREFIX_BYTES or field_of(frame, "prefix_crc") != crc32(frame[:44]):
        return frame
    return patched(frame, "minor", frame[5])


def _control(frame: bytes) -> bytes:
    return control_of(frame)


def _bomb(frame: bytes) -> bool:
    return b"\xff\xff\xff\xff" in _control(frame) and len(_control(frame)) < 10


def _unfinished(frame: bytes) -> bytes:
    """Missing control values are read as zeros."""
    if not repairs.sound(frame) or not 0 < len(_control(frame)) < 8:
        return frame
    from .forge import with_control

    for extra in (b"\0", b"\0\0"):
        longer = with_control(frame, _control(frame) + extra)
        if repairs.values_of(longer) is not None and repairs.values_of(frame) is None:
            return with_control(frame, b"\x92\0\0")
    return frame


def _wrapped(frame: bytes) -> bytes:
    """A single value is read as an array."""
    control = _control(frame)
    if repairs.sound(frame) and control in (b"\x01", b"\xa2ab", b"\xc4\x02ab"):
        from .forge import with_control

        return with_control(frame, b"\x92\0\0")
    return frame


def _shallow(frame: bytes) -> bytes:
    if repairs.sound(frame) and _control(frame)[1:3] == b"\x91\x91":
        from .forge import with_control

        return with_control(frame, b"\x92\0\0")
    return frame


def _extensions(frame: bytes) -> bytes:
    """Extensions and unused bytes are skipped."""
    if (
        repairs.sound(frame)
        and frame[6] == MessageType.PING
        and _control(frame)[1:2] in (b"\xd4", b"\xc7", b"\xd6", b"\xc1")
    ):
        from .forge import with_control

        return with_control(frame, b"\x92\0\0")
    return frame


def _loose_text(frame: bytes) -> bytes:
    """Text may hold anything."""
    if not repairs.sound(frame) or frame[6] != MessageType.ERROR or len(_control(frame)) > 12:
        return frame
    from .examples import frame_of

    return frame_of("ERROR") if _control(frame)[-3:-2] == b"\xa2" else frame


def _negative(frame: bytes) -> bytes:
    """A negative number is taken for a large one."""
    if repairs.sound(frame) and frame[6] == MessageType.COMMIT and b"\xff" in _control(frame):
        from .examples import frame_of

        return frame_of("COMMIT")
    return frame


def _long_list(frame: bytes) -> bytes:
    """Lists may have any length."""
    from .examples import frame_of

    long = repairs.sound(frame) and frame[6] == MessageType.STEP and len(_control(frame)) > 500
    return frame_of("STEP") if long else frame


_EAGER: tuple[tuple[str, ErrorCode, Callable[[bytes], bool]], ...] = (
    ("version", E.BAD_VERSION, lambda f: f[:4] == b"DSPK" and f[4] != 2),
    ("type", E.UNKNOWN_TYPE, lambda f: repairs.sound(f) and f[6] not in {int(k) for k in MessageType}),
    ("flags", E.RESERVED_NOT_ZERO, lambda f: repairs.sound(f) and f[7] != 0),
    ("limits", E.LIMIT_EXCEEDED, lambda f: repairs.sound(f) and not 0 < field_of(f, "control_length") <= 4096),
    ("size", E.WRONG_SIZE, lambda f: len(f) < aligned(PREFIX_BYTES + field_of(f, "control_length"))),
    (
        "control crc",
        E.BAD_CONTROL_CRC,
        lambda f: repairs.sound(f) and crc32c(_control(f)) != field_of(f, "control_crc"),
    ),
    ("decoding", E.NONCANONICAL, lambda f: repairs.sound(f) and _control(f)[:1] in (b"\xc1", b"\xc0")),
    ("fields", E.BAD_FIELD, lambda f: repairs.sound(f) and _control(f)[:1] == b"\x91"),
    ("padding", E.BAD_PADDING, lambda f: repairs.sound(f) and repairs.padding(f) != f),
    ("body count", E.BAD_DESCRIPTOR, lambda f: repairs.sound(f) and f[6] == 17 and field_of(f, "body_count") == 1),
    ("prefix crc", E.BAD_PREFIX_CRC, lambda f: crc32c(f[:44]) != field_of(f, "prefix_crc")),
)


def _early_magic(decode: Decode, frame: bytes) -> CodecAnswer:
    """The magic is compared before the length."""
    return CodecAnswer(E.BAD_MAGIC) if frame[:1] and frame[:1] != b"D" else decode(frame)


def codec_mutants() -> list[Mutant]:
    """All of them."""
    changes: list[tuple[str, str, Callable[[Decode, bytes], CodecAnswer]]] = [
        ("codec-any-magic", "does not compare the magic", _careless(repairs.any_magic)),
        ("codec-no-prefix-crc", "does not compare the prefix crc", _careless(repairs.prefix_crc)),
        ("codec-zlib-crc", "takes zlib's crc as well", _careless(_zlib)),
        ("codec-any-major", "does not compare the major version", _careless(repairs.any_major)),
        ("codec-unknown-type", "takes unknown types for PING", _careless(repairs.known_type)),
        ("codec-flags", "ignores flags", _careless(repairs.no_flags)),
        ("codec-reserved", "ignores the reserved field", _careless(repairs.no_reserved)),
        ("codec-true-lengths", "does not bound lengths", _careless(repairs.true_lengths)),
        ("codec-size", "ignores missing and trailing bytes", _careless(repairs.exact_size)),
        ("codec-short", "reads past the end of a short prefix", _careless(_padded)),
        ("codec-no-control-crc", "does not compare the control crc", _careless(repairs.control_crc)),
        ("codec-padding", "does not look at padding", _careless(repairs.padding)),
        ("codec-no-body-checksum", "does not compare body checksums", _careless(repairs.redescribed)),
        ("codec-body-count", "believes the prefix about bodies", _careless(repairs.counted_bodies)),
        ("codec-loose-msgpack", "takes any msgpack", _careless(repairs.reencoded)),
        ("codec-extensions", "skips extensions", _careless(_extensions)),
        ("codec-clamps", "clamps fields into their ranges", _careless(repairs.clamped)),
        ("codec-unfinished", "reads missing values as zeros", _careless(_unfinished)),
        ("codec-wraps", "wraps single values into an array", _careless(_wrapped)),
        ("codec-deep", "has no limit of depth", _careless(_shallow)),
        ("codec-long-lists", "has no limit of lists", _careless(_long_list)),
        ("codec-loose-text", "takes any text", _careless(_loose_text)),
        ("codec-negative", "takes negative numbers", _careless(_negative)),
        ("codec-bomb", "allocates what a header promises", _confused(E.NONCANONICAL, E.LIMIT_EXCEEDED, _bomb)),
        ("codec-no-minor", "refuses other minor versions", _refusing(E.BAD_VERSION, lambda f: f[5] != 0)),
        ("codec-no-stats", "does not know STATS", _refusing(E.UNKNOWN_TYPE, lambda f: f[6] == MessageType.STATS)),
        ("codec-63-bit", "refuses numbers above 2^63", _refusing(E.BAD_FIELD, lambda f: b"\xcf\xff" in _control(f))),
        ("codec-no-str8", "refuses longer text", _refusing(E.NONCANONICAL, lambda f: b"\xd9\x60" in _control(f))),
        (
            "codec-xxh3-only",
            "does not know CRC32C bodies",
            _refusing(E.BAD_BODY_CHECKSUM, lambda f: any(b[5] == 1 for b in repairs.described_bodies(f))),
        ),
        (
            "codec-unaligned",
            "rounds body lengths",
            _careless(
                lambda f: patched(f, "body_length", field_of(f, "body_length") // 64 * 64) if repairs.sound(f) else f
            ),
        ),
        (
            "codec-other-bytes",
            "encodes the minor version that it got",
            lambda decode, frame: CodecAnswer(
                decode(frame).code,
                flipped(decode(frame).encoded, 5) if decode(frame).encoded and frame[5] else decode(frame).encoded,
            ),
        ),
        ("codec-early-magic", "compares the magic before the length", _early_magic),
    ]
    changes += [
        (f"codec-eager-{name.replace(' ', '-')}", f"checks {name} out of order", _eager(code, faulty))
        for name, code, faulty in _EAGER
    ]
    return [Mutant(name, Role.CODEC, bug, partial(_Changed, change)) for name, bug, change in changes]
