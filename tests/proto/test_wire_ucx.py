"""The UCX transport's own parts: how the ends meet, which memory is used again, and what it refuses to start with.

What needs the package `ucxx` is skipped without it; the contract is in test_wire_transports.py.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from struct import pack
from typing import Any

import pytest
from transport_ends import context_frame, copies, ping, receive_down, send_up, wait_until

from dspark_proto.transports import TransportError, open_client, open_server
from dspark_proto.transports.block_pool import BlockPool
from dspark_proto.transports.bounds import LinkLimits
from dspark_proto.transports.endpoint import parse_address
from dspark_proto.transports.ucx_meeting import ADDRESS_BYTES_MAX, MAGIC, MEETING_BYTES, Introduction, Meeting
from dspark_proto.transports.ucx_message import (
    FRAMES_MAX,
    HEAD_BYTES_MAX,
    MESSAGE_BYTES,
    frames_of,
    message_bytes,
    messages_of,
    write_message,
)


def test_an_introduction_is_read_as_it_was_written() -> None:
    for address in (b"x", bytes(range(200)), b"y" * ADDRESS_BYTES_MAX):
        message = Introduction(2**64 - 1, address).encoded()
        assert len(message) == MEETING_BYTES
        assert Introduction.decoded(message) == Introduction(2**64 - 1, address)
    with pytest.raises(ValueError, match="fewer transports"):
        Introduction(1, b"z" * (ADDRESS_BYTES_MAX + 1)).encoded()


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HT" + bytes(12),
        pack("<8sQI", MAGIC, 1, 0),
        pack("<8sQI", MAGIC, 1, ADDRESS_BYTES_MAX + 1),
        pack("<8sQI", MAGIC, 1, 4) + b"abcd" + b"left over",
    ],
)
def test_what_is_no_introduction_ends_the_meeting(head: bytes) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    meeting = Meeting(ours, b"address")
    theirs.sendall(head.ljust(MEETING_BYTES, b"\0"))
    meeting.advance()
    assert meeting.is_closed
    assert meeting.peer is None
    theirs.close()


def test_a_meeting_comes_about_and_ends_with_the_connection() -> None:
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.setblocking(False)
    first, second = Meeting(ours, b"first"), Meeting(theirs, b"second")
    first.advance()
    second.advance()
    assert first.peer == Introduction(second.tag, b"second")
    assert second.peer == Introduction(first.tag, b"first")
    assert first.tag != second.tag
    first.advance()
    assert not first.is_closed
    second.close()
    first.advance()
    assert first.is_closed


def test_a_meeting_says_nothing_more() -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    meeting = Meeting(ours, b"first")
    theirs.sendall(Introduction(5, b"second").encoded())
    meeting.advance()
    assert meeting.peer is not None
    theirs.sendall(b"x")
    meeting.advance()
    assert meeting.is_closed
    theirs.close()


def test_blocks_are_used_again_unless_something_may_still_write_into_them() -> None:
    pool = BlockPool(3 * 4096)
    first = pool.take(1)
    assert first is not None
    assert len(first) == 4096
    pool.give(first)
    again, other, third = pool.take(4096), pool.take(100), pool.take(4000)
    assert again is first
    assert other is not None
    assert third is not None
    assert len({id(block) for block in (again, other, third)}) == 3
    assert pool.take(1) is None
    pool.quarantine(other)
    assert pool.take(1) is None
    assert pool.quarantined == 1
    pool.give(third)
    assert pool.take(1) is third


def test_blocks_of_every_size_count_against_one_limit() -> None:
    pool = BlockPool(2**16)
    large = pool.take(2**15 + 1)
    assert large is not None
    assert len(large) == 2**16
    assert pool.take(1) is None
    pool.give(large)
    assert pool.take(2**15 - 1) is None
    assert pool.take(2**16) is large


@pytest.mark.parametrize(
    ("sizes", "messages"),
    [
        ([64], [1]),
        ([MESSAGE_BYTES], [1]),
        ([MESSAGE_BYTES + 64, MESSAGE_BYTES + 64], [1, 1]),
        ([64, 128, 64], [3]),
        ([64, MESSAGE_BYTES - 64, 64], [2, 1]),
        ([64, MESSAGE_BYTES, 64], [1, 1, 1]),
        ([MESSAGE_BYTES * 8, 64, 64, MESSAGE_BYTES * 8], [1, 2, 1]),
        ([0] * (2 * FRAMES_MAX + 1), [FRAMES_MAX, FRAMES_MAX, 1]),
    ],
)
def test_small_frames_share_a_message_and_a_large_one_has_its_own(sizes: list[int], messages: list[int]) -> None:
    frames = [memoryview(bytes([number % 256]) * size) for number, size in enumerate(sizes)]
    runs = [list(run) for run in messages_of(frames)]
    assert [len(run) for run in runs] == messages
    assert [frame for run in runs for frame in run] == frames


@pytest.mark.parametrize("count", [1, 3, 15, 16, FRAMES_MAX])
def test_the_frames_of_a_message_are_those_that_were_written_into_it(count: int) -> None:
    """Whatever they are: the connection judges each by itself."""
    some = [memoryview(one) for one in (ping(1), b"", b"x" * 47, bytes(64), bytes(context_frame(512)))]
    frames = (some * count)[:count]
    size = message_bytes(frames)
    block = memoryview(bytearray(b"x" * (size + 64)))
    write_message(block, frames)
    assert block[size:] == b"x" * 64
    assert 0 < size - sum(map(len, frames)) <= HEAD_BYTES_MAX
    assert (size - sum(map(len, frames))) % 64 == 0
    found = frames_of(block[:size].toreadonly(), 2**16)
    assert found is not None
    assert [bytes(frame) for frame in found] == [bytes(frame) for frame in frames]


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\1\0\0",
        pack("<2I", 1, 64),
        pack("<2I", 0, 0).ljust(64, b"\0"),
        pack("<I", FRAMES_MAX + 1) + bytes(4096),
        pack("<I", 2**32 - 1) + bytes(4096),
        pack("<I", 20).ljust(64, b"\0"),
        pack("<2I", 1, 63).ljust(128, b"\0"),
        pack("<2I", 1, 65).ljust(128, b"\0"),
        pack("<3I", 2, 2**32 - 64, 128).ljust(128, b"\0"),
        pack("<2I", 1, 64).ljust(63, b"\0") + b"x" + bytes(64),
        pack("<2I", 1, 1024).ljust(64 + 1024, b"\0"),
    ],
)
def test_what_is_no_message_has_no_frames(message: bytes) -> None:
    assert frames_of(memoryview(message), 1000) is None


def test_without_the_package_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib", None)
    for name in ("ucx", "ucx_link"):
        monkeypatch.delitem(sys.modules, f"dspark_proto.transports.{name}", raising=False)
    for open_one in (open_client, open_server):
        with pytest.raises(TransportError, match=r"pip install 'dspark\[ucx\]'"):
            open_one("ucx://127.0.0.1:1")


# With ucxx


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("ucxx", reason="ucxx is not installed: pip install 'dspark[ucx]'")
    monkeypatch.setenv("UCX_TLS", os.environ.get("UCX_TLS", "tcp,self"))
    return importlib.import_module("dspark_proto.transports.ucx")


@pytest.mark.parametrize(
    ("named", "words"), [(None, "set UCX_TLS"), ("", "set UCX_TLS"), ("shm,self", "dead peer"), ("rc", "UCX_TLS=rc")]
)
def test_transports_are_named_or_nothing_starts(
    module: Any, monkeypatch: pytest.MonkeyPatch, named: str | None, words: str
) -> None:
    """Never a silent fall back to TCP. ("rc" is refused where there is no RDMA hardware or no support for it.)"""
    if named == "rc" and os.path.exists("/sys/class/infiniband"):
        pytest.skip("this machine has RDMA devices")
    if named is None:
        monkeypatch.delenv("UCX_TLS")
    else:
        monkeypatch.setenv("UCX_TLS", named)
    with pytest.raises(TransportError, match=words):
        open_server("ucx://127.0.0.1:0")


@pytest.fixture
def server(module: Any) -> Iterator[Any]:
    limits = LinkLimits(frame_bytes_max=2**16, connections_max=2, first_frame_ms=300)
    opened = module.UcxServer(limits=limits)
    yield opened
    opened.close()


def raw(server: Any) -> socket.socket:
    address = parse_address(server.endpoint)
    return socket.create_connection((address.host, address.port), timeout=5)


def test_strangers_at_the_meeting_point_are_sent_away(server: Any) -> None:
    with raw(server) as garbage, raw(server) as silent:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n".ljust(MEETING_BYTES, b"\0"))
        wait_until(lambda: not server.poll(10) and server.counters.overdue)
        assert server.counters.overdue == 1
        assert server._guests == {}
        silent.settimeout(5)
        assert len(silent.recv(MEETING_BYTES)) == MEETING_BYTES


def test_connections_are_bounded(server: Any) -> None:
    held = [raw(server) for _ in range(3)]
    wait_until(lambda: not server.poll(10) and server.counters.too_many_connections)
    assert len(server._guests) == 2
    for one in held:
        one.close()


def test_a_frame_over_the_limit_ends_the_link_and_no_other(server: Any) -> None:
    client, other = open_client(server.endpoint), open_client(server.endpoint)
    send_up(server, client, ping(1))
    send_up(server, other, ping(2))
    assert client.send([bytes(2**16 + 64)], 1000)
    arrived: list[tuple[bytes, bytes]] = []
    wait_until(lambda: arrived.extend(copies(server.poll(10))) or client.poll(0) or len(server._guests) < 2)
    assert arrived == []
    assert send_up(server, other, ping(3))[0][1] == ping(3)
    client.close()
    other.close()


def test_late_frames_of_an_ended_link_reach_nobody_and_leave_nothing(server: Any, module: Any) -> None:
    """The measured trap of tag matching: what an old link has sent must not be taken for the new one's."""
    client = module.UcxClient(server.endpoint)
    send_up(server, client, ping(1))
    ((name, guest),) = server._guests.items()
    assert client.send([ping(2), ping(3)], 1000)
    server._forget(guest)
    arrived = send_up(server, client, ping(4))
    assert [frame for _, frame in arrived] == [ping(4)]
    assert arrived[0][0] != name
    assert server.send(arrived[0][0], [ping(5)], 1000)
    assert receive_down(server, client, 1) == [ping(5)]
    wait_until(lambda: not server.poll(10) and not server._link._stray)
    assert server._link.quarantined == 0
    client.close()


def test_transfers_under_way_are_cancelled_before_their_memory_is_used_again(server: Any, module: Any) -> None:
    """A large frame that the other end never takes: ending the link ends the transfer, and the block is free."""
    client = module.UcxClient(server.endpoint)
    ((name, _),) = send_up(server, client, ping(1))
    assert server.send(name, [bytes(2**20)])
    peer = server._guests[name].peer
    assert peer.sending
    block = peer.sending[0].block
    began = time.monotonic()
    server._forget(server._guests[name])
    assert time.monotonic() - began < 5
    assert server._link.quarantined == 0
    assert server._link._sent.take(len(block)) is block
    client.close()


def test_a_reply_of_small_frames_is_one_message(server: Any, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = module.UcxClient(server.endpoint)
    ((name, _),) = send_up(server, client, ping(1))
    sizes = []
    start = server._link._start_sending
    monkeypatch.setattr(
        server._link, "_start_sending", lambda peer, block, size: sizes.append(size) or start(peer, block, size)
    )
    frames = [ping(2), bytes(context_frame(512)), ping(3)]
    assert server.send(name, frames, 1000)
    assert receive_down(server, client, 3) == frames
    assert sizes == [message_bytes([memoryview(frame) for frame in frames])]
    client.close()


def test_messages_wait_for_the_memory_of_frames_that_are_in_use(module: Any) -> None:
    """Two frames of 200 KiB and room for one: each comes when the one before has been used, and the link stays."""
    server = module.UcxServer(limits=LinkLimits(receive_bytes_max=2**18 + 2**12, spin_us=0))
    client = module.UcxClient(server.endpoint)
    send_up(server, client, ping(1))
    frames = [bytes(context_frame(200 * 1024, fill)) for fill in (1, 2)]
    assert [frame for _, frame in send_up(server, client, *frames)] == frames
    assert [frame for _, frame in send_up(server, client, ping(2))] == [ping(2)]
    assert len(server._guests) == 1
    client.close()
    server.close()


def test_a_link_whose_messages_wait_for_more_memory_than_there_is_ends(module: Any) -> None:
    limit = 2**18 + 2**12
    server = module.UcxServer(limits=LinkLimits(receive_bytes_max=limit, spin_us=0))
    client = module.UcxClient(server.endpoint)
    ((name, guest),) = [(name, server._guests[name]) for name, _ in send_up(server, client, ping(1))]
    assert client.send([bytes(context_frame(200 * 1024))] * 5, 1000)
    wait_until(lambda: server._link._progress() or server._link._probe() or guest.peer.is_broken)
    assert guest.peer.waiting_bytes < 3 * limit
    server._next_look_s = float("inf")  # the broken link is seen at once, not with the next look at all of them
    wait_until(lambda: server.poll(10) or name not in server._guests)
    assert name not in server._guests
    client.close()
    server.close()


def test_a_look_without_a_timeout_sees_what_has_come(server: Any, module: Any) -> None:
    client = module.UcxClient(server.endpoint)
    send_up(server, client, ping(1))
    while server._link.look(0):
        pass
    assert client.send([ping(2)], 1000)
    wait_until(lambda: server._link.look(0))
    assert [bytes(one.frame) for one in server.poll(1000)] == [ping(2)]
    client.close()


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, {"TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE", "RNDV_THRESH"}),
        ({"UCX_RNDV_THRESH": "8192"}, {"TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE", "RNDV_THRESH"}),
        ({"UCX_RNDV_THRESH": "1k", "UCX_TCP_TX_SEG_SIZE": "8k"}, {"TCP_RX_SEG_SIZE"}),
    ],
)
def test_settings_of_ucx_over_tcp_give_way_to_the_environment(
    module: Any, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], told: set[str]
) -> None:
    links = importlib.import_module("dspark_proto.transports.ucx_link")
    for key in ("UCX_RNDV_THRESH", "UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    assert set(links._settings("self,tcp")) == {"TLS", *told}
    assert links._settings("rc,ud,self") == {"TLS": "rc,ud,self"}
    assert links._settings("rc,tcp,self") == {"TLS": "rc,tcp,self"}
