"""What the tests of a pool do to it: requests that run, workers that die or fall silent, and what must hold then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.rig import PoolRig, Reader, Wire

PROMPT = [3, 14, 15, 92, 65, 35]
TOKENS = 60
COUNT = 4


def prompts(count: int = COUNT) -> list[list[int]]:
    return [[*PROMPT, i] for i in range(count)]


def start(rig: PoolRig, count: int = COUNT, steps: int = 3, **params: Any) -> list[Reader]:
    """Greedy requests that are being drafted for."""
    readers = [rig.ask(prompt, **{"max_tokens": TOKENS, **params}) for prompt in prompts(count)]
    while any(len(reader.deltas) < steps for reader in readers):
        rig.engine.turn()
    return readers


def kill(wire: Wire) -> None:
    """The process is gone, and its connection with it."""
    wire.connected = False


def silence(wire: Wire) -> Callable[[], None]:
    """The worker goes on, and nothing of it arrives; the result ends this, and delivers what was held back."""
    held: list[bytes] = []
    wire.down = lambda frame: held.append(frame) or []  # type: ignore[func-returns-value]

    def end() -> None:
        wire.down = lambda frame: [frame]
        for frame in held:
            wire.deliver(frame)

    return end


def check_text(rig: PoolRig, readers: list[Reader], undisturbed: list[list[int]]) -> None:
    rig.finish(*readers)
    assert [reader.ids for reader in readers] == undisturbed[: len(readers)]
    rig.check_books()
    rig.check_idle()


def drafted_after(readers: list[Reader], marks: list[int]) -> list[int]:
    """Accepted drafts of each reader since its mark."""
    return [sum(sum(d.from_draft) for d in r.deltas[mark:]) for r, mark in zip(readers, marks, strict=True)]


def marks(readers: list[Reader]) -> list[int]:
    return [len(reader.deltas) for reader in readers]
