"""A UCX worker and the frames that go through it, for both ends of the UCX transport.

Frames go in tagged messages (see ``ucx_message``); the 64-bit tag says which link a message belongs to, and UCX
keeps the order of messages of one endpoint and tag. A message is probed first, so that its length is known, and
bounded, before memory for it is chosen. Receives that are posted in advance were measured and left: they save 2
of 18 us for a small message and 8 of 47 us for a STEP, and each link would hold memory for the largest message
that it may ever get, for a longer one ends its receive with an error, and the link with it. Sending copies the
frames into a block, because UCX reads them after ``send`` has returned; it goes on in the next ``send`` or
``poll``, for UCX moves only when it is called. Invariants: UCX uses the transports that ``UCX_TLS`` names and
nothing else; a block is used again only after its transfer has completed, or else never; a link whose messages
wait for more memory than there is ends. What UCX holds of messages that nobody has probed yet, those below its
rendezvous threshold, it holds without a bound: a peer must be trusted that far. Spec: SPEC.md, section "UCX
mapping". Called by ``ucx``; single-threaded.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..buffers import Buffer, byte_view
from .base import TransportError
from .block_pool import SMALLEST_BYTES, BlockPool
from .bounds import LinkLimits
from .ucx_meeting import Introduction
from .ucx_message import HEAD_BYTES_MAX, frames_of, message_bytes, messages_of, write_message

try:
    from ucxx._lib import libucxx as ucx  # type: ignore[import-not-found, unused-ignore]
    from ucxx._lib.arr import Array  # type: ignore[import-not-found, unused-ignore]
except ImportError as missing:
    raise TransportError(f"ucxx is not usable ({missing}): pip install 'dspark[ucx]'") from None

_CLOSE_PERIOD_NS: Final = 10_000_000
_CLOSE_ATTEMPTS: Final = 3
_SETTLE_S: Final = 0.1
"""How long a closed link's transfers may take to end before their blocks are quarantined."""

_TCP_SETTINGS: Final = {"TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "512k", "RNDV_THRESH": "1m"}
"""For UCX's TCP alone: its pieces of 8 KiB make a large frame up to three times as slow, and a rendezvous, two more
wake-ups before any byte of a STEP moves, pays where memory is read remotely, not here."""

_NOBODYS_CHOICE: Final = "8192"
"""RNDV_THRESH as ``ucxx`` puts it into the environment when it is imported, for GPU memory."""

_WAITING_SHARE: Final = 2
"""A link whose messages wait for more than so many times the receive memory ends."""

_ANY_TAG: Final = ucx.UCXXTag(0), ucx.UCXXTagMask(0)


@dataclass(slots=True, eq=False)
class Transfer:
    """A message under way, in or out, and the block that UCX uses for it."""

    request: Any
    block: memoryview
    size: int


@dataclass(slots=True, eq=False)
class UcxPeer:
    """One link. Without an ``endpoint`` it can receive and not yet send."""

    tag: int
    endpoint: Any = None
    send_tag: Any = None
    waiting: deque[Any] = field(default_factory=deque)
    waiting_bytes: int = 0
    receiving: deque[Transfer] = field(default_factory=deque)
    sending: deque[Transfer] = field(default_factory=deque)
    sending_bytes: int = 0
    is_broken: bool = False


class UcxLink:
    """The UCX side of a client or of a server: one UCX worker for all its links.

    Raises :class:`TransportError` when ``UCX_TLS`` is not set, or names what this machine does not have.
    """

    def __init__(self, limits: LinkLimits) -> None:
        named = os.environ.get("UCX_TLS")
        if not named:
            raise TransportError(
                "ucx: set UCX_TLS to the transports that may be used, for example rc,ud,self for RoCE or InfiniBand, "
                "or tcp,self; unset, UCX would fall back to TCP in silence"
            )
        try:
            context = ucx.UCXContext(_settings(named), (ucx.Feature.TAG, ucx.Feature.WAKEUP))
            self._worker = ucx.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
            self.address: Final = bytes(self._worker.address)
            # An endpoint to ourselves: transports that cannot tell a dead peer are refused here and not before.
            itself = ucx.UCXAddress.create_from_buffer(self.address)
            self._worker.create_endpoint_from_worker_address(itself, True).close_blocking(
                _CLOSE_PERIOD_NS, _CLOSE_ATTEMPTS
            )
        except ucx.UCXError as error:
            raise TransportError(
                f"ucx: UCX_TLS={named}: {error}: name transports that this machine has and that notice a dead peer "
                "(rc, ud, dc, tcp; not shm alone)"
            ) from None
        self._limits = limits
        self._received, self._sent = BlockPool(limits.receive_bytes_max), BlockPool(limits.receive_bytes_max)
        self._peers: dict[int, UcxPeer] = {}
        self._handed_out: list[memoryview] = []
        self._stray: list[Transfer] = []
        self._descriptor: Final = self._worker.epoll_file_descriptor
        self._waiting, self._callers = select.poll(), select.poll()
        self._waiting.register(self._descriptor, select.POLLIN)
        self.is_called = False
        """Whether a watched socket was readable when last looked at, or a link broke; the caller clears it."""

    def attach(self, tag: int) -> UcxPeer:
        """A link whose frames will arrive with ``tag``."""
        peer = UcxPeer(tag)
        self._peers[tag] = peer
        return peer

    def connect(self, peer: UcxPeer, introduction: Introduction) -> None:
        """Make the link able to send. Marks it broken when UCX cannot reach the address."""
        try:
            address = ucx.UCXAddress.create_from_buffer(introduction.address)
            peer.endpoint = self._worker.create_endpoint_from_worker_address(address, True)
            peer.send_tag = ucx.UCXXTag(introduction.tag)
        except ucx.UCXError:
            peer.is_broken = True

    def watch(self, descriptor: int) -> None:
        """Set ``is_called`` when this socket is found readable, until :meth:`unwatch`."""
        self._waiting.register(descriptor, select.POLLIN)
        self._callers.register(descriptor, select.POLLIN)

    def unwatch(self, descriptor: int) -> None:
        """Forget a socket, at once when it has been closed."""
        self._waiting.unregister(descriptor)
        self._callers.unregister(descriptor)

    def send(self, peer: UcxPeer, frames: Sequence[Buffer], timeout_ms: int) -> bool:
        """Start sending copies of ``frames``; False, and nothing sent, without an endpoint or room."""
        parts = [byte_view(frame) for frame in frames]
        if peer.endpoint is None or not self._has_room(peer, sum(map(len, parts)), timeout_ms):
            return False
        blocks: list[tuple[memoryview, int]] = []
        for message in messages_of(parts):
            size = message_bytes(message)
            block = self._sent.take(size)
            if block is None:
                for taken, _ in blocks:
                    self._sent.give(taken)
                return False
            write_message(block, message)
            blocks.append((block, size))
        for block, size in blocks:
            self._start_sending(peer, block, size)
        if peer.sending and not peer.sending[-1].request.completed:
            self._progress()
        return not peer.is_broken

    def _has_room(self, peer: UcxPeer, wanted_bytes: int, timeout_ms: int) -> bool:
        """Whether what is under way leaves room for ``wanted_bytes``, waiting for it to arrive."""
        until = time.monotonic() + timeout_ms / 1000
        while True:
            self._reap(peer)
            if peer.is_broken:
                return False
            if not peer.sending or peer.sending_bytes + wanted_bytes <= self._limits.queue_bytes_max:
                return True
            remaining_ms = (until - time.monotonic()) * 1000
            if remaining_ms <= 0:
                self._progress()
                self._reap(peer)
                return not peer.sending or peer.sending_bytes + wanted_bytes <= self._limits.queue_bytes_max
            self.look(remaining_ms)

    def _start_sending(self, peer: UcxPeer, block: memoryview, size: int) -> None:
        try:
            request = peer.endpoint.tag_send(Array(block[:size]), peer.send_tag)
        except ucx.UCXError:
            peer.is_broken = True
            self._sent.give(block)
            return
        peer.sending.append(Transfer(request, block, size))
        peer.sending_bytes += size

    def _reap(self, peer: UcxPeer) -> None:
        """Take back the blocks of what has been sent."""
        for _ in range(len(peer.sending)):
            transfer = peer.sending.popleft()
            if not transfer.request.completed:
                peer.sending.append(transfer)
                continue
            peer.is_broken |= not _succeeded(transfer.request)
            peer.sending_bytes -= transfer.size
            self._sent.give(transfer.block)

    def arrived(self) -> list[tuple[UcxPeer, memoryview]]:
        """Frames that have arrived, in order for each link; those of the call before are dead."""
        for block in self._handed_out:
            self._received.give(block)
        self._handed_out.clear()
        self._progress()
        self._probe()
        frames: list[tuple[UcxPeer, memoryview]] = []
        for peer in self._peers.values():
            if peer.sending:
                self._reap(peer)
            if peer.waiting or peer.receiving:
                frames += [(peer, frame) for frame in self._receive(peer)]
            self.is_called |= peer.is_broken
        return frames

    def _progress(self) -> None:
        while self._worker.progress_once():
            pass

    def _probe(self) -> None:
        """Sort the messages that have come by their links; those of no link are received and thrown away."""
        while (found := self._worker.tag_probe(*_ANY_TAG, remove=True)).matched:
            peer = self._peers.get(found.sender_tag.value)
            if peer is None or peer.is_broken or found.length > self._limits.frame_bytes_max + HEAD_BYTES_MAX:
                self._throw_away(found)
                if peer is not None:
                    peer.is_broken = True
            else:
                peer.waiting.append(found)
                peer.waiting_bytes += max(found.length, SMALLEST_BYTES)
                peer.is_broken = peer.waiting_bytes > _WAITING_SHARE * self._limits.receive_bytes_max
        for transfer in [one for one in self._stray if one.request.completed]:
            self._stray.remove(transfer)
            self._received.give(transfer.block)

    def _throw_away(self, found: Any) -> None:
        transfer = self._start_receiving(found)
        if transfer is None:
            return
        if transfer.request.completed:
            self._received.give(transfer.block)
        else:
            self._stray.append(transfer)

    def _start_receiving(self, found: Any) -> Transfer | None:
        """Receive a probed message into a block; None when there is no memory for it."""
        block = self._received.take(max(1, found.length))
        if block is None:
            return None
        request = self._worker.tag_recv_with_handle(Array(block[: max(1, found.length)]), found)
        return Transfer(request, block, found.length)

    def _receive(self, peer: UcxPeer) -> Iterator[memoryview]:
        """The link's frames that are whole, after all its messages have been given memory."""
        while peer.waiting and not peer.is_broken:
            transfer = self._start_receiving(peer.waiting[0])
            if transfer is None:
                # Memory of frames that are in use or under way comes back; without them none will.
                peer.is_broken = not (self._handed_out or any(one.receiving for one in self._peers.values()))
                break
            peer.receiving.append(transfer)
            peer.waiting.popleft()
            peer.waiting_bytes -= max(transfer.size, SMALLEST_BYTES)
        if peer.receiving and not peer.receiving[-1].request.completed:
            self._progress()
        while not peer.is_broken and peer.receiving and peer.receiving[0].request.completed:
            transfer = peer.receiving.popleft()
            self._handed_out.append(transfer.block)
            message = transfer.block[: transfer.size].toreadonly()
            frames = frames_of(message, self._limits.frame_bytes_max) if _succeeded(transfer.request) else None
            peer.is_broken = frames is None
            yield from frames or ()

    def detach(self, peer: UcxPeer) -> None:
        """End a link: cancel what is under way, await the cancellation, and only then use its blocks again."""
        del self._peers[peer.tag]
        peer.is_broken = True
        if peer.endpoint is not None:
            peer.endpoint.close_blocking(_CLOSE_PERIOD_NS, _CLOSE_ATTEMPTS)
        pending = [(self._sent, transfer) for transfer in peer.sending]
        pending += [(self._received, transfer) for transfer in peer.receiving]
        until = time.monotonic() + _SETTLE_S
        while time.monotonic() < until and not all(transfer.request.completed for _, transfer in pending):
            self._progress()
        for pool, transfer in pending:
            (pool.give if transfer.request.completed else pool.quarantine)(transfer.block)
        for found in peer.waiting:
            self._throw_away(found)

    def is_lost(self, peer: UcxPeer) -> bool:
        """Whether the link has failed."""
        return peer.is_broken or (peer.endpoint is not None and not peer.endpoint.alive)

    def look(self, timeout_ms: float) -> bool:
        """Whether ``arrived`` may find something, or a watched socket is readable: sleeps until then, or until time is
        over. With 0, UCX's messages are looked at alone.
        """
        if timeout_ms <= 0:
            return bool(self._worker.progress_once())
        if not self._worker.arm():
            return True
        found = self._waiting.poll(timeout_ms)
        self.is_called |= any(descriptor != self._descriptor for descriptor, _ in found)
        return bool(found)

    def listen(self) -> None:
        """Look at the watched sockets alone."""
        self.is_called |= bool(self._callers.poll(0))

    @property
    def quarantined(self) -> int:
        """Blocks whose transfers were never confirmed to have ended."""
        return self._received.quarantined + self._sent.quarantined


def _succeeded(request: Any) -> bool:
    try:
        request.check_error()
    except ucx.UCXError:
        return False
    return True


def _settings(named: str) -> dict[str, str]:
    """What a UCX context is told; what somebody has set in the environment has the last word."""
    wanted = _TCP_SETTINGS if set(named.split(",")) <= {"tcp", "self"} else {}
    free = {key for key in wanted if os.environ.get(f"UCX_{key}", _NOBODYS_CHOICE) == _NOBODYS_CHOICE}
    return {"TLS": named, **{key: wanted[key] for key in free}}
