"""Those who ask workers for dense rows have them received in place: the engine's link, and the benchmark's verifier."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from dspark.wire_benchmark import TAP_ROWS, Verifier
from dspark.wire_benchmark_peers import DEPTH, TAP_LAYERS, TAP_WIDTH, TOKEN, Layout, StubDrafter
from dspark_proto import Lane, prefix_digest
from dspark_proto.transports import open_client, open_server
from dspark_spark.draft_link import DraftLink
from dspark_spark.leases import DraftLease, DraftRequest
from dspark_spark.proposals import read_proposal

LAYOUT = Layout("dense", 0, 20_000)
LIMIT_S = 20.0


@pytest.fixture(params=["plain+tcp", "tcp"])
def endpoint(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A stub drafter in a thread. Where the transport can place bodies, nobody copies a ROW."""
    if request.param == "plain+tcp":
        monkeypatch.setattr("dspark_proto.verifier_inbox.stage_rows", None)
        monkeypatch.setattr("dspark_proto.verifier_inbox.VerifierInbox._takes_expected_rows", None)
    server = open_server(f"{request.param}://127.0.0.1:0")
    stub, over = StubDrafter(LAYOUT, 2), threading.Event()

    def serve() -> None:
        while not over.is_set():
            stub.turn(server)

    thread = threading.Thread(target=serve)
    thread.start()
    yield server.endpoint
    over.set()
    thread.join()
    server.close()


def test_the_engines_link(endpoint: str) -> None:
    link = DraftLink(endpoint, LAYOUT.parameters(1, 2), 10_000, open_client(endpoint))
    taps = torch.zeros(64, len(TAP_LAYERS) * TAP_WIDTH, dtype=torch.bfloat16)
    tokens = list(range(64))
    leases = [DraftLease(slot, slot + 1, slot, Lane.RATIO, 0, 1.0, taps, tokens) for slot in range(2)]
    for lease in leases:
        link.lease(lease)
    until = time.monotonic() + LIMIT_S
    while not all(link.can_draft(lease) for lease in leases) and time.monotonic() < until:
        link.pump()
    for number in (1, 2):
        for lease in leases:
            lease.known, lease.digest = number, prefix_digest(tokens[:number])
        asked = [DraftRequest(lease, number, number, number, DEPTH, None, number) for lease in leases]
        ready = link.collect(link.step(asked))
        assert sorted(ready) == [0, 1]
        for event in ready.values():
            assert read_proposal(event, LAYOUT.vocab_size).tokens == [TOKEN] * DEPTH
            event.lease.release()
    assert (dict(link.discards), sum(link.drops.values())) == ({}, 0)
    link.close()


def test_the_benchmarks_verifier(endpoint: str) -> None:
    client = open_client(endpoint)
    verifier = Verifier(client, LAYOUT, 2)
    for _ in range(3):
        assert verifier.round(verifier.prepare()).total > 0
    assert verifier.reply_bytes > 2 * DEPTH * 4 * LAYOUT.vocab_size
    assert verifier.step_bytes > 2 * TAP_ROWS * len(TAP_LAYERS) * TAP_WIDTH * 2
    assert sum(verifier.connection.counters.values()) == 0
    client.close()
