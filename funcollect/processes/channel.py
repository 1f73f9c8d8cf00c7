"""Messages with file descriptors between two processes, over a pair of sockets.

A message arrives complete or not at all, even if its sender is killed. If it is too large for a packet, it is written
to an anonymous file, and the file's descriptor is sent instead.
"""

from __future__ import annotations

import array
import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import cloudpickle

from funcollect.processes.system import PORTABLE, anonymous_file

_KIND = socket.SOCK_STREAM if PORTABLE else socket.SOCK_SEQPACKET  # the latter keeps packets apart
_LENGTH = struct.Struct("<I")  # before each packet of a stream
_PACKET = 1 << 14  # bytes
_SOCKET_BUFFER = 1 << 18  # bytes that a stream holds, about as many as on Linux
_KEPT = 8 if PORTABLE else 0  # sent files that stay open: macOS can lose one that is closed before it is received
_MOST_FDS = 8
_FD = array.array("i")
_IN_FILE = b"f"  # a packet whose message is in a file; no pickle is equal to it
_ROOM = socket.CMSG_SPACE(_MOST_FDS * _FD.itemsize)
_AT_ONCE = int(socket.MSG_DONTWAIT)  # flags are slow to combine
_NOT_INHERITED = int(getattr(socket, "MSG_CMSG_CLOEXEC", 0))


def pair() -> tuple[Channel, socket.socket]:
    """A channel, and the socket of its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, _KIND)
    for sock in (ours, theirs) if PORTABLE else ():
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _SOCKET_BUFFER)
    return Channel(ours), theirs


class Channel:
    """One end of the connection that `pair` makes."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sent: deque[int] = deque()  # descriptors of the last messages in files

    def fileno(self) -> int:
        """The descriptor that is readable when a message has arrived, or the other end is closed."""
        return self._socket.fileno()

    def send(self, message: Any, fds: Sequence[int] = (), *, plain: bool = False) -> None:
        """Send an object, faster if it is `plain`: without a script's functions. OSError if the other end is closed."""
        data = pickle.dumps(message, -1) if plain else cloudpickle.dumps(message, -1)
        if len(data) <= _PACKET:
            self._send(data, fds)
            return
        message_file = anonymous_file("message")
        self._sent.append(message_file)
        try:
            with open(message_file, "wb", closefd=False) as file:
                file.write(data)
            self._send(_IN_FILE, [*fds, message_file])
        finally:
            while len(self._sent) > _KEPT:
                os.close(self._sent.popleft())

    def _send(self, packet: bytes, fds: Sequence[int]) -> None:
        if PORTABLE:
            packet = _LENGTH.pack(len(packet)) + packet
        sent = socket.send_fds(self._socket, [packet], fds) if fds else self._socket.send(packet)
        if sent < len(packet):  # by a stream only
            self._socket.sendall(packet[sent:])

    def receive(self, *, wait: bool = True) -> tuple[Any, list[int]] | None:
        """The next object and its descriptors, which the caller has to close; None if there is no message yet.

        EOFError if the other end is closed and everything has been read.
        """
        try:
            data, fds = self._receive(0 if wait else _AT_ONCE)
        except BlockingIOError:
            return None
        except ConnectionResetError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        if data != _IN_FILE:
            return pickle.loads(data), fds
        with open(fds.pop(), "rb") as file:
            file.seek(0)
            return pickle.loads(file.read()), fds

    def _receive(self, flags: int) -> tuple[bytes, list[int]]:
        """A packet, empty at the end, and its descriptors, which child programs do not inherit."""
        size = _PACKET
        if PORTABLE:  # the length stays in the stream until all of it can be read, since Ctrl-C may come in between
            start = self._socket.recv(_LENGTH.size, flags | socket.MSG_PEEK)
            if not start:
                return b"", []
            size = _LENGTH.size + _LENGTH.unpack(start)[0]
            flags = int(socket.MSG_WAITALL)
        data, ancillary, _, _ = self._socket.recvmsg(size, _ROOM, flags | _NOT_INHERITED)  # `recv_fds` ignores flags
        fds = array.array("i")
        for _, _, payload in ancillary:
            fds.frombytes(payload[: len(payload) - len(payload) % _FD.itemsize])
        if PORTABLE:
            for fd in fds:
                os.set_inheritable(fd, False)
            while len(data) < size:  # a signal has interrupted the read
                if not (more := self._socket.recv(size - len(data))):
                    raise EOFError
                data += more
            data = data[_LENGTH.size :]
        return data, list(fds)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()
        while self._sent:
            os.close(self._sent.popleft())
