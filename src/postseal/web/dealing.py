"""Connections dealt in turn: a parent accepts them, its children serve them.

1. the parent accepts a connection once a child has room for one, and passes it on over that child's channel
2. the child takes what lies in its channel, and says how much that was
3. a child that has MAX_UNTAKEN to take, because it is frozen or drowns, is passed over; if all have, connections wait
   in the listener's backlog until one takes

A channel is a pair of Unix sockets: one byte with one descriptor for each connection, one byte back for each that was
taken. That count bounds a channel exactly, where the size of its buffers would do so only roughly. It is a stream
because what lies in one is still read after its other end was closed, and because macOS has no SOCK_SEQPACKET.
"""

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress

from structlog.typing import FilteringBoundLogger

MAX_UNTAKEN = 32
"""Connections that may lie in one channel. Fewer, and of a fleet that comes back at once those would lose their turn
that come while a child is at work (the children could end up with unequal shares, which long connections keep). More,
and a child that froze would hold up more clients, until they give up waiting and connect again."""
READ_S = 0.02
"""What is taken at the end has so long to bring its request, before it counts as idle: a client sends one as soon as it
is connected."""
RESTED_S = 1.0
"""Without descriptors or memory for another connection, accepting is tried no sooner than after this."""
MARK = b"."


class Dealer:
    """The parent's side: accepts on `listener`, and deals to its ends of the channels."""

    def __init__(self, listener: socket.socket, log: FilteringBoundLogger) -> None:
        listener.settimeout(0)
        self._listener = listener
        self._log = log
        # By channel, in the order of their turn.
        self._untaken: dict[socket.socket, int] = {}
        self._looking = self._resting = self._closed = False

    def deal_to(self, channel: socket.socket) -> None:
        """Give the child at the other end of `channel` its turn from here on; it must be non-blocking."""
        if self._closed:
            return
        self._untaken[channel] = 0
        asyncio.get_running_loop().add_reader(channel, self._count_taken, channel)
        self._look_if_room()

    def leave_out(self, channel: socket.socket) -> None:
        """Deal nothing more to it, if anything was."""
        if self._untaken.pop(channel, None) is not None:
            asyncio.get_running_loop().remove_reader(channel)
            self._look_if_room()

    def close(self) -> None:
        """Close the port, and deal nothing more. The channels stay open: they are their maker's."""
        self._closed = True
        for channel in list(self._untaken):
            self.leave_out(channel)
        self._listener.close()

    def _accept(self) -> None:
        # What the channels have room for bounds one call: nothing is told as taken meanwhile.
        try:
            while self._next() is not None:
                connection, _ = self._listener.accept()
                with connection:
                    self._deal(connection)
        except (BlockingIOError, ConnectionAbortedError):
            pass  # no more are waiting, or one has gone away
        except OSError as error:
            self._rest(error)
        self._look_if_room()

    def _deal(self, connection: socket.socket) -> None:
        while (channel := self._next()) is not None:
            try:
                socket.send_fds(channel, [MARK], [connection.fileno()])
            except ConnectionError:
                self.leave_out(channel)  # its child has ended, or is about to
            else:
                self._untaken[channel] = self._untaken.pop(channel) + 1
                return

    def _next(self) -> socket.socket | None:
        return next((channel for channel, untaken in self._untaken.items() if untaken < MAX_UNTAKEN), None)

    def _count_taken(self, channel: socket.socket) -> None:
        try:
            taken = len(channel.recv(MAX_UNTAKEN))
        except ConnectionError:
            taken = 0
        if taken:
            self._untaken[channel] -= taken
            self._look_if_room()
        else:
            self.leave_out(channel)

    def _rest(self, error: OSError) -> None:
        self._log.error("no connections are accepted for now", error=error.strerror)
        self._resting = True
        asyncio.get_running_loop().call_later(RESTED_S, self._go_on)

    def _go_on(self) -> None:
        self._resting = False
        self._look_if_room()

    def _look_if_room(self) -> None:
        """Listen for connections while one could be dealt: the loop would call again and again otherwise."""
        wanted = not self._resting and self._next() is not None
        if wanted and not self._looking:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
        elif self._looking and not wanted:
            asyncio.get_running_loop().remove_reader(self._listener)
        self._looking = wanted


class Channel:
    """A child's side: connections come out of `end`, which is closed at the end."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(0)
        self._end = end
        self._adopting: set[asyncio.Task[None]] = set()
        self._make_protocol: Callable[[], asyncio.Protocol]

    def open(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Serve each connection that comes by a new protocol."""
        self._make_protocol = make_protocol
        asyncio.get_running_loop().add_reader(self._end, self._take)

    async def close(self) -> None:
        """Take no more but what has been dealt already; return when its requests had time to come."""
        asyncio.get_running_loop().remove_reader(self._end)
        # From here on the parent deals to another one. What lies in it can still be read.
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RD)
        self._take()
        if self._adopting:
            await asyncio.wait(self._adopting)
            await asyncio.sleep(READ_S)
        self._end.close()

    def _take(self) -> None:
        taken, ended = 0, False
        try:
            while taken < MAX_UNTAKEN and not ended:
                mark, descriptors, _, _ = socket.recv_fds(self._end, len(MARK), 1)
                ended = not mark
                taken += len(mark)
                # There is none if this process has no room for one more: the client sees its connection end.
                for descriptor in descriptors:
                    self._adopt(socket.socket(fileno=descriptor))
        except BlockingIOError:
            pass
        except ConnectionError:
            ended = True
        if ended:
            # The parent is gone; whether this process ends is told elsewhere.
            asyncio.get_running_loop().remove_reader(self._end)
        elif taken:
            with suppress(ConnectionError):
                self._end.send(MARK * taken)

    def _adopt(self, connection: socket.socket) -> None:
        connection.set_inheritable(False)
        adopting = asyncio.create_task(self._serve(connection))
        self._adopting.add(adopting)
        adopting.add_done_callback(self._adopting.discard)

    async def _serve(self, connection: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(self._make_protocol, connection)
        except OSError:
            connection.close()  # it has ended meanwhile
