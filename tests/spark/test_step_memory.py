"""Memory of the round path: what a round sends lies where the round before had it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dspark_proto import Buffer, MessageType
from tests.rig import Rig, type_of
from tests.spark.test_draft_link import start


def test_a_round_writes_its_step_where_the_round_before_did(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tap rows are megabytes: their frame takes no new memory, and a send is done with it when it returns."""
    places, send = [], rig.wire.send

    def note(frames: Sequence[Buffer], timeout_ms: int = 0) -> bool:
        places.extend(id(one.obj) for one in frames if isinstance(one, memoryview) and type_of(one) is MessageType.STEP)
        return send(frames, timeout_ms)

    monkeypatch.setattr(rig.wire, "send", note)
    reader = start(rig)
    rig.finish(reader)
    assert any(any(delta.from_draft) for delta in reader.deltas)
    assert len(places) > 5
    assert len(set(places)) == 1
