"""The server's sockets, and what `EngineClient` needs of them.

    ingress  PUSH, connects    Generate, Abort, Tokenize, Detokenize   -> tokenizer_proc
             and for the engine behind it: Control, Inspect
    replies  PULL, binds       Accepted, Deltas, RequestError, ...     <- tokenizer_proc
    state    PULL, binds       EngineState, EngineStats, EngineFailed,
                               ControlResult, Inspection               <- engine

They are plain ZeroMQ sockets whose file descriptors the event loop watches, so a message costs one
callback and no task switch. ZeroMQ signals edges, not levels: a callback must read until the socket is
empty, or ask to be called again.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from engine.api.messages import Ingress, Replies, Sockets, State, decoder, encoder

logger = logging.getLogger(__name__)

MESSAGES_PER_CALLBACK = 64  # then other callbacks get their turn

Handle = Callable[[Any], None]


class Link(Protocol):
    """The way to the other processes, or to what stands for them."""

    def start(self, on_reply: Handle, on_state: Handle) -> None:
        """Hand the messages of tokenizer_proc and of the engine over, in this thread."""

    def send(self, message: Ingress) -> None:
        """Never blocks."""

    def close(self) -> None: ...


class SocketLink:
    """`Link` by the sockets of a run directory."""

    def __init__(self, sockets: Sockets) -> None:
        self._addresses = sockets
        self._context = zmq.Context(io_threads=1)
        self._ingress = self._context.socket(zmq.PUSH)
        self._replies = self._context.socket(zmq.PULL)
        self._state = self._context.socket(zmq.PULL)
        self._encoder = encoder()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, on_reply: Handle, on_state: Handle) -> None:
        """Bind and watch. Call from a coroutine, before the other processes start."""
        self._loop = asyncio.get_running_loop()
        for socket in (self._ingress, self._replies, self._state):
            socket.set_hwm(0)  # no message is ever dropped or blocks its sender
            socket.linger = 0
        self._replies.bind(self._addresses.replies)
        self._state.bind(self._addresses.state)
        self._ingress.connect(self._addresses.ingress)
        self._watch(self._loop, self._replies, decoder(Replies).decode, on_reply)
        self._watch(self._loop, self._state, decoder(State).decode, on_state)

    def send(self, message: Ingress) -> None:
        self._ingress.send(self._encoder.encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        if self._loop is not None:
            for socket in (self._replies, self._state):
                self._loop.remove_reader(descriptor(socket))
        self._context.destroy(linger=0)

    @staticmethod
    def _watch(
        loop: asyncio.AbstractEventLoop,
        socket: "zmq.Socket[bytes]",
        decode: Callable[[bytes], Any],
        handle: Handle,
    ) -> None:
        def on_readable() -> None:
            for _ in range(MESSAGES_PER_CALLBACK):
                # Asking costs a microsecond, zmq.Again several.
                if socket.closed or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                    return
                try:
                    handle(decode(socket.recv(zmq.NOBLOCK)))
                except Exception:  # a bad message must not end the reading of all others
                    logger.exception("dropped a message that could not be handled")
            loop.call_soon(on_readable)

        loop.add_reader(descriptor(socket), on_readable)
        loop.call_soon(on_readable)


def descriptor(socket: "zmq.Socket[bytes]") -> int:
    number = socket.getsockopt(zmq.FD)
    assert isinstance(number, int)
    return number
