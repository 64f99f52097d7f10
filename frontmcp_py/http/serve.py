"""Runs an HTTP app with uvicorn, on an address known to be free, and drains when it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Generator
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.guard import Guard
from frontmcp_py.shutdown import Shutdown

# What is said about serving is said in one voice.
logger: logging.Logger = logging.getLogger("uvicorn.error")

# How long the last answers have to get to their clients, in seconds, when the grace is over.
_LAST_ANSWERS: Final = 0.3

_ENDLESS: Final = (b"mcp-method", b"subscriptions/listen")

# How long the requests behind closed connections have to notice.
_CLOSING: Final = 0.2


def serve(app: ASGIApp, *, guard: Guard, host: str, port: int, grace: float, log_level: str = "info") -> None:
    """Serve until the process is told to stop; then drain, and end by the signal that said so.

    No header about the client's address is believed here: what proxies say is the app's own business.

    Args:
        app: What is served.
        guard: Whose calls are brought to an end.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        grace: Seconds that running calls are given when the process is told to stop.
        log_level: uvicorn's.

    Raises:
        ConfigurationError: The address cannot be listened on, or the store that instances share is not there.
    """
    with listen(host, port) as listener:
        answers = _OpenAnswers(app)
        config = uvicorn.Config(answers, log_level=log_level, proxy_headers=False)
        # uvicorn says where it listens only when the socket is its own, and nobody knows what 0 stands for.
        logger.info("Listening on %s port %d", *listener.getsockname()[:2])
        _Server(config, answers, guard, grace).run(sockets=[listener])


class _OpenAnswers:
    """Knows how many calls have not been answered to the last byte."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._open = 0
        self._all_sent: asyncio.Future[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A stream that nobody expects to end is no answer.
        if scope["type"] != "http" or scope["method"] != "POST" or _ENDLESS in scope["headers"]:
            return await self._app(scope, receive, send)
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
            if not self._open and self._all_sent is not None and not self._all_sent.done():
                self._all_sent.set_result(None)

    async def sent(self, seconds: float) -> None:
        """Wait until everything has been sent, but not longer than that."""
        if self._open:
            self._all_sent = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._all_sent,), timeout=seconds)


class _Server(uvicorn.Server):
    """uvicorn's server, with an end of its own.

    Its own shutdown waits for connections; this one waits for calls, and closes what is left open after that.
    """

    def __init__(self, config: uvicorn.Config, answers: _OpenAnswers, guard: Guard, grace: float) -> None:
        super().__init__(config)
        self._answers = answers
        self._guard = guard
        self._grace = grace
        self._told_at = 0.0
        self._shutdown = Shutdown(grace, self._drain)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, if the store that instances share is there."""
        # Asked here, since uvicorn tells of what fails in the app's lifespan by its traceback.
        await self._guard.reach_store()
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Drain at the first signal; the process ends here, before the loop would wait for its threads."""
        # A method of this server: the SDK's streams look at its `should_exit` to learn of the end.
        with self._shutdown.listening(self.handle_exit):
            yield
            self._shutdown.end()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal has come."""
        self._shutdown.handle(sig, frame)

    async def _drain(self) -> None:
        # uvicorn goes on serving meanwhile: probes are answered, and new calls refused in words.
        self._told_at = asyncio.get_running_loop().time()
        try:
            await self._guard.drain()
        finally:
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the last answers out, close everything, and leave the app's lifespan."""
        if self._shutdown.received is None:
            await self._drain()
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        for connection in list(self.server_state.connections):
            # Idle ones are closed, others when their answer is complete; nobody asks anything more.
            connection.shutdown()
        # What was sent before the end is answered: there is what the calls have left of the grace for that.
        left = self._told_at + self._grace - asyncio.get_running_loop().time()
        await self._answers.sent(max(left, _LAST_ANSWERS))
        for connection in list(self.server_state.connections):
            # Nothing is left that anybody waits for but streams without an end.
            connection.transport.close()
        if self.server_state.tasks:
            await asyncio.wait(list(self.server_state.tasks), timeout=_CLOSING)
        await self.lifespan.shutdown()


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address.

    Raises:
        ConfigurationError: The address cannot be listened on; the message says why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is in use; stop what listens there, or give another port "
                "(0: any free one)"
            ) from None
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener
