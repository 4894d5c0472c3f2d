"""The fuzzer's trials under atheris (libFuzzer): inputs grow towards new lines of the protocol.

    pip install atheris
    python tests/proto/atheris_frames.py --write-seeds corpus
    python tests/proto/atheris_frames.py corpus -max_len=8192 -max_total_time=600

An input is a state, then frames: receiver and seal (1 B), length (2 B), bytes. Inputs are bent by the structure-aware
mutator as often as by libFuzzer's own. An escape ends the run, and libFuzzer writes the input to a file. Not a test
module: pytest does not collect it, and CI does not need atheris.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from struct import pack, unpack_from

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "proto") not in sys.path:
    sys.path.append(str(ROOT / "proto"))

FRAMES_MAX = 32
_HEADER_BYTES = 3


def pack_input(stage: int, frames: list[tuple[int, bytes]]) -> bytes:
    """An input: `frames` are (receiver bit | seal << 1, bytes)."""
    return bytes([stage]) + b"".join(bytes([how]) + pack("<H", len(frame)) + frame for how, frame in frames)


def unpack_input(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The (how, bytes) of any byte string; the last frame may be cut off."""
    at = 1
    for _ in range(FRAMES_MAX):
        if at + _HEADER_BYTES > len(data):
            return
        (length,) = unpack_from("<H", data, at + 1)
        yield data[at], data[at + _HEADER_BYTES : at + _HEADER_BYTES + length]
        at += _HEADER_BYTES + length


def main() -> None:
    """Write seeds, or run libFuzzer with the arguments given."""
    import atheris

    with atheris.instrument_imports(include=["dspark_proto"]):
        from dspark_proto.fuzzing import Mutator, Pool, Side, Trial, recorded, specimen_of, staged
        from dspark_proto.fuzzing.conversation import OTHER_SESSION, Stage, expected_at
        from dspark_proto.fuzzing.encoding import Seal, seal

    stages, sides, seals = tuple(Stage), tuple(Side), tuple(Seal)
    pool = Pool(specimen_of(*parcel) for session in (77, OTHER_SESSION) for parcel in recorded(session))

    def try_frames(data: bytes) -> None:
        """One trial: every frame, then the liveness probe."""
        if not data:
            return
        trial = Trial(staged(stages[data[0] % len(stages)]))
        try:
            for how, frame in unpack_input(data):
                trial.feed(sides[how & 1], bytes(seal(bytearray(frame), seals[(how >> 1) % len(seals)])))
            trial.probe()
        finally:
            trial.close()

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        """Bend one frame by its structure, add one, or leave it to libFuzzer."""
        rng = Random(seed)
        if not data or rng.random() < 0.5:
            return bytes(atheris.Mutate(data, max_size))
        frames = list(unpack_input(data))
        place = rng.randrange(len(frames) + 1)
        fresh = place == len(frames) or rng.random() < 0.3
        specimen = rng.choice(pool.all) if fresh else specimen_of(sides[frames[place][0] & 1], frames[place][1])
        if not specimen.frame:
            specimen = rng.choice(pool.all)
        how = sides.index(specimen.to) | rng.choice((2, 2, 1, 0)) << 1
        frames[place : place + (not fresh)] = [(how, frame) for frame in Mutator(rng, pool).mutant(specimen).frames]
        return pack_input(data[0], frames[:FRAMES_MAX])[:max_size]

    if sys.argv[1:2] == ["--write-seeds"]:
        directory = Path(sys.argv[2])
        directory.mkdir(parents=True, exist_ok=True)
        for number, stage in enumerate(stages):
            frames = [(sides.index(one.to) | 2 << 1, one.frame) for one in expected_at(stage)]
            for count in range(1, len(frames) + 1, 3):
                content = pack_input(number, frames[:count])
                (directory / hashlib.sha256(content).hexdigest()[:16]).write_bytes(content)
        return
    atheris.Setup(sys.argv, try_frames, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
