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
from transport_ends import copies, ping, receive_down, send_up, wait_until

from dspark_proto.transports import TransportError, open_client, open_server
from dspark_proto.transports.block_pool import BlockPool
from dspark_proto.transports.bounds import LinkLimits
from dspark_proto.transports.endpoint import parse_address
from dspark_proto.transports.ucx_meeting import ADDRESS_BYTES_MAX, MAGIC, MEETING_BYTES, Introduction, Meeting


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
    assert server._link._sent.take(2**20) is block
    client.close()
