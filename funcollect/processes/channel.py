"""Messages with file descriptors between two processes, over a pair of sockets.

A message arrives complete or not at all, even if its sender is killed. A message that is too large for a packet lies in
anonymous memory, whose descriptor is sent instead.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
from collections.abc import Sequence
from typing import Any

import cloudpickle

_PACKET = 1 << 14  # bytes; sockets take several times more
_MOST_FDS = 8
_FD = array.array("i")
_IN_MEMORY = b"m"  # no pickle begins with it
_ROOM = socket.CMSG_SPACE(_MOST_FDS * _FD.itemsize)
_AT_ONCE, _NOT_INHERITED = int(socket.MSG_DONTWAIT), int(socket.MSG_CMSG_CLOEXEC)  # flags are slow to combine


def pair() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(ours), theirs


class Channel:
    """One end of the connection that `pair` makes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def fileno(self) -> int:
        """The descriptor that is readable when a message has arrived, or the other end is closed."""
        return self._socket.fileno()

    def send(self, message: Any, fds: Sequence[int] = (), *, plain: bool = False) -> None:
        """Send an object. A `plain` one holds only numbers, strings and tuples, and is pickled faster.

        Raises:
            OSError: if the other end is closed.
        """
        data = pickle.dumps(message, -1) if plain else cloudpickle.dumps(message, -1)
        if len(data) <= _PACKET:
            self._send(data, fds)
            return
        memory = os.memfd_create("message")
        try:
            with open(memory, "wb", closefd=False) as file:
                file.write(data)
            self._send(_IN_MEMORY, [*fds, memory])
        finally:
            os.close(memory)

    def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        if fds:
            socket.send_fds(self._socket, [packet], fds)
        else:
            self._socket.send(packet)

    def receive(self, *, wait: bool = True) -> tuple[Any, list[int]] | None:
        """The next object and its descriptors, which the caller has to close; None if there is no message yet.

        Raises:
            EOFError: if the other end is closed and everything has been read.
        """
        try:
            data, fds = receive_packet(self._socket, _PACKET, 0 if wait else _AT_ONCE)
        except BlockingIOError:
            return None
        except ConnectionResetError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        if data != _IN_MEMORY:
            return pickle.loads(data), fds
        with open(fds.pop(), "rb") as file:
            file.seek(0)
            return pickle.loads(file.read()), fds

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def receive_packet(sock: socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int]]:
    """A packet and its descriptors, which child programs do not inherit. `socket.recv_fds` ignores the flags."""
    data, ancillary, _, _ = sock.recvmsg(size, _ROOM, flags | _NOT_INHERITED)
    if not ancillary:
        return data, []
    fds = array.array("i")
    for _, _, payload in ancillary:
        fds.frombytes(payload[: len(payload) - len(payload) % _FD.itemsize])
    return data, list(fds)
