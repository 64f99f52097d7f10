"""A proxy in front of a Redis that counts what passes, and breaks it where it is told to.

```python
async with FaultProxy(valkey) as proxy:  # in the running loop
    lost = proxy.lose_reply("EVALSHA")
    ...  # whoever uses proxy.url
    assert lost.happened == 1
    assert proxy.trips("EVALSHA") == 2

with FaultProxy(valkey) as proxy:  # in a thread: for virtual time, and tests that block
    ...
```

Both are the same class. Every method may be called from every thread; predicates run in the proxy's. A match
is a command's name (`"EVALSHA"`), a predicate of the `Command`, or `None` for all but the set-up of a
connection (`SET_UP`).

It reads enough of the protocol (RESP2 and RESP3) to know where a command or a reply ends and what it answers.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import shutil
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Self, TypeVar, cast
from urllib.parse import quote

import trustme

from tests.servers import HOST, SOON, Port, RedisServer, eventually

T = TypeVar("T")

SET_UP = frozenset({"HELLO", "AUTH", "CLIENT", "SELECT", "READONLY", "COMMAND", "CLUSTER"})
"""What clients send of themselves when they connect."""

_MESSAGES = {b"message": 1, b"pmessage": 2, b"smessage": 1}
_SUBSCRIBES = {f"{kind}{verb}" for kind in ("", "P", "S") for verb in ("SUBSCRIBE", "UNSUBSCRIBE")}


class Incomplete(Exception):
    """More bytes are needed."""


def parse(data: bytes | bytearray, at: int = 0) -> tuple[Any, int]:
    """Read one value of RESP2 or RESP3: the value, and where it ends. Strings are bytes; errors are, too.

    Raises:
        Incomplete: Its end has not arrived yet.
    """
    end = data.find(b"\r\n", at)
    if end < 0:
        raise Incomplete
    kind, line, at = data[at : at + 1], bytes(data[at + 1 : end]), end + 2
    if kind in b"$!=":
        size = int(line)
        if size < 0:
            return None, at
        if len(data) < at + size + 2:
            raise Incomplete
        return bytes(data[at : at + size]), at + size + 2
    if kind in b"*~>%|":
        values: list[Any] = []
        for _ in range(int(line) * (2 if kind in b"%|" else 1)):
            value, at = parse(data, at)
            values.append(value)
        # An attribute stands in front of the value that it describes.
        return parse(data, at) if kind == b"|" else (values, at)
    if kind == b":":
        return int(line), at
    if kind in b"+-_,#(":
        return line, at
    raise ValueError(f"not the Redis protocol: {bytes(data[:80])!r}")


@dataclass(eq=False)
class Command:
    """A command as it passed.

    Attributes:
        words: The command and its arguments.
        connection: The number of its connection, from 1.
        trip: The number of its round trip on that connection, from 1. Commands that a client sends before it
            has the replies to the ones before belong to one round trip.
        reply: What the server answered; `None` until then.
        answered: Whether the server has answered, which says nothing of what the client was told.
    """

    words: tuple[bytes, ...]
    connection: int
    trip: int
    reply: Any = None
    answered: bool = False

    @functools.cached_property
    def name(self) -> str:
        """In upper case."""
        return self.words[0].decode().upper()


Match = str | Callable[[Command], object] | None


def _matcher(match: Match) -> Callable[[Command], object]:
    if match is None:
        return lambda command: command.name not in SET_UP
    if isinstance(match, str):
        name = match.upper()
        return lambda command: command.name == name
    return match


class Cut(Enum):
    """When a connection is cut."""

    BEFORE = "the server never sees the command"
    REPLY_LOST = "the server has done it, the client is not told"
    AFTER = "the client has its reply"


@dataclass(eq=False)
class Fault:
    """A cut that waits for its command.

    Attributes:
        happened: How often it has cut so far.
    """

    cut: Cut
    matches: Callable[[Command], object]
    nth: int
    times: int | None
    seen: int = 0
    happened: int = 0

    def meets(self, command: Command) -> bool:
        """Whether this command is one to cut at."""
        if not self.matches(command):
            return False
        self.seen += 1
        return self.seen >= self.nth and (self.times is None or self.seen < self.nth + self.times)


@dataclass(eq=False)
class _Passing:
    """A reply or a message on its way to the client."""

    raw: bytes
    due: float
    command: Command | None  # None: a message, or what answers nothing
    fault: Fault | None


@dataclass(eq=False)
class _Side(asyncio.Protocol):
    """One end of a link: its bytes, and who reads them."""

    read: Callable[[bytearray], None]
    lost: Callable[[], None]
    buffer: bytearray = field(default_factory=bytearray)
    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        self.read(self.buffer)

    def connection_lost(self, error: Exception | None) -> None:
        self.transport = None
        self.lost()

    def write(self, data: bytes) -> None:
        if self.transport is not None:
            self.transport.write(data)

    def close(self) -> None:
        """End it when all has been sent."""
        if self.transport is not None:
            self.transport.close()

    def reset(self) -> None:
        """End it as a machine does that goes away: what has not been sent is lost."""
        if self.transport is not None:
            # There is no socket any more below a TLS connection that has just been lost.
            near = self.transport.get_extra_info("socket")
            with contextlib.suppress(OSError, AttributeError):
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.transport.abort()


class _Link:
    """A client's connection and the one to the server that stands for it."""

    def __init__(self, proxy: FaultProxy, number: int) -> None:
        self._proxy = proxy
        self._number = number
        self.client = _Side(self._read_commands, self._client_lost)
        self.server = _Side(self._read_replies, self._server_lost)
        self._open: collections.deque[tuple[Command, int, Fault | None]] = collections.deque()
        self._passing: collections.deque[_Passing] = collections.deque()
        self._trips = 0
        self._in_trip = False
        self._subscribed = False
        self._ending: Callable[[], None] | None = None  # once the client has what is on its way
        self._timer: asyncio.TimerHandle | None = None

    @property
    def gone(self) -> bool:
        return self.client.transport is None and self.server.transport is None

    def reset(self) -> None:
        """Cut it now."""
        self._passing.clear()
        self.client.reset()
        self.server.reset()

    def _read_commands(self, buffer: bytearray) -> None:
        for words, raw in _each(buffer):
            if self._ending is not None:
                return
            if not (self._open or self._in_trip):
                self._trips += 1
            self._in_trip = True
            self._command(Command(tuple(words), self._number, self._trips), raw)
        # The rest of a command that is on its way was sent in one go with those before it.
        self._in_trip = bool(buffer)

    def _command(self, command: Command, raw: bytes) -> None:
        fault = self._proxy._note(command)
        if fault is not None and fault.cut is Cut.BEFORE:
            fault.happened += 1
            self._ending = self.reset
            self.pump()
            return
        replies = 1
        if command.name in _SUBSCRIBES:
            self._subscribed = True
            replies = max(1, len(command.words) - 1)
        self._open.append((command, replies, fault))
        self.server.write(raw)

    def _read_replies(self, buffer: bytearray) -> None:
        for value, raw in _each(buffer):
            command: Command | None = None
            fault: Fault | None = None
            if self._is_message(value, raw):
                at = _MESSAGES[value[0]]
                if self._proxy._drops(value[at], value[at + 1]):
                    continue
            elif self._open:
                command, replies, fault = self._open.popleft()
                if replies > 1:
                    self._open.appendleft((command, replies - 1, fault))
                    fault = None
                command.reply, command.answered = value, True
            due = self._proxy._due(command)
            self._passing.append(_Passing(raw, due, command, fault))
        self.pump()

    def _is_message(self, value: object, raw: bytes) -> bool:
        if not (raw[:1] == b">" or (self._subscribed and raw[:1] == b"*")):
            return False
        return isinstance(value, list) and len(value) > 2 and value[0] in _MESSAGES

    def pump(self) -> None:
        """Give the client what it may have by now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._passing:
            first = self._passing[0]
            if self._proxy._holds(first.command):
                return
            loop = self._proxy._running
            if first.due > loop.time():
                self._timer = loop.call_at(first.due, self.pump)
                return
            self._passing.popleft()
            self._pass(first)
        if self._ending is not None and not self._open:
            self._ending()

    def _pass(self, item: _Passing) -> None:
        if item.fault is None:
            self.client.write(item.raw)
            return
        item.fault.happened += 1
        if item.fault.cut is Cut.REPLY_LOST:
            self.reset()
            return
        self.client.write(item.raw)
        self._passing.clear()
        self._open.clear()
        self._ending = self._close

    def _close(self) -> None:
        self.client.close()
        self.server.close()

    def _client_lost(self) -> None:
        self._passing.clear()
        self.pump()
        self.server.close()
        self._proxy._lost(self)

    def _server_lost(self) -> None:
        self._open.clear()
        self._ending = self._ending or self._close
        self.pump()
        self._proxy._lost(self)


def _each(buffer: bytearray) -> Iterator[tuple[Any, bytes]]:
    """Take the complete values off a buffer: each, and its bytes."""
    while buffer:
        try:
            value, end = parse(buffer)
        except Incomplete:
            return
        raw = bytes(buffer[:end])
        del buffer[:end]
        yield value, raw


class FaultProxy:
    """The proxy: a context manager, `async with` in the running loop or `with` in a thread of its own.

    Args:
        server: What stands behind it.
        tls: Speak TLS with the clients (the server is still spoken to in the clear).

    Attributes:
        commands: Every command that arrived, in order.
        messages: Every message that the server published to a client: its channel and payload.
        dropped: How many of these the clients did not get.
        connected: How many connections were accepted.
    """

    commands: list[Command]
    messages: list[tuple[bytes, bytes]]
    dropped: int
    connected: int
    _faults: list[Fault]
    _delay: tuple[float, Callable[[Command], object] | None]
    _held: tuple[Callable[[Command], object] | None] | None
    _drop: Callable[[bytes, bytes], object] | None

    def __init__(self, server: RedisServer, *, tls: bool = False) -> None:
        self._server = server
        self._port = Port()
        self._folder: Path | None = None
        self._tls = self._certify() if tls else None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._links: set[_Link] = set()
        self._arriving: set[asyncio.Task[None]] = set()
        self.connected = 0
        self.forget()
        self._heal()

    # ----------------------------------------------------------------------------------------- where it is

    @property
    def port(self) -> int:
        """Where it listens, for its whole life."""
        return self._port.number

    @property
    def url(self) -> str:
        """What a storage is given instead of the server's own; with TLS it names the file to trust."""
        password = f":{self._server.password}@" if self._server.password else ""
        if self._tls is None:
            return f"redis://{password}{HOST}:{self.port}/0"
        return f"rediss://{password}{HOST}:{self.port}/0?ssl_ca_certs={quote(str(self.ca_file))}"

    @property
    def ca_file(self) -> Path:
        """The certificate to trust, with TLS."""
        assert self._folder is not None, "the proxy speaks without TLS"
        return self._folder / "ca.pem"

    # ------------------------------------------------------------------------------------ what it has seen

    def count(self, match: Match = None) -> int:
        """How many commands arrived."""
        return sum(1 for command in list(self.commands) if _matcher(match)(command))

    def answered(self, match: Match = None) -> int:
        """How many commands the server has answered, whether or not its reply was passed on."""
        return sum(1 for each in list(self.commands) if each.answered and _matcher(match)(each))

    def trips(self, match: Match = None) -> int:
        """How many round trips had such a command."""
        matches = _matcher(match)
        return len(
            {(command.connection, command.trip) for command in list(self.commands) if matches(command)}
        )

    def names(self) -> collections.Counter[str]:
        """How many commands arrived, by name."""
        return collections.Counter(command.name for command in list(self.commands))

    def forget(self) -> None:
        """Count from zero again."""
        self.commands = []
        self.messages = []
        self.dropped = 0

    @property
    def connections(self) -> int:
        """How many are open."""
        return len(self._links)

    # -------------------------------------------------------------------------------------- what it breaks

    def cut_before(self, match: Match = None, *, nth: int = 1, times: int | None = 1) -> Fault:
        """Cut the connection in place of forwarding the n-th such command from now on, and the next ones.

        Commands sent before it on the connection are answered first.

        Args:
            match: Which commands.
            nth: The first to cut at.
            times: How many in a row; `None` for all that follow.
        """
        return self._arm(Cut.BEFORE, match, nth, times)

    def lose_reply(self, match: Match = None, *, nth: int = 1, times: int | None = 1) -> Fault:
        """Cut the connection in place of passing on the server's reply to such a command."""
        return self._arm(Cut.REPLY_LOST, match, nth, times)

    def cut_after(self, match: Match = None, *, nth: int = 1, times: int | None = 1) -> Fault:
        """Cut the connection when the client has been sent its reply to such a command."""
        return self._arm(Cut.AFTER, match, nth, times)

    def delay(self, seconds: float, match: Match = None) -> None:
        """Let replies arrive later: those to such commands; for `None` all of them, and messages."""
        self._delay = (seconds, None if match is None else _matcher(match))

    def hold(self, match: Match = None) -> None:
        """Keep replies back until `let_go`: those to such commands and all behind them; for `None` all."""
        self._held = (None if match is None else _matcher(match),)

    def let_go(self) -> None:
        """Pass on what was kept back, and keep nothing more."""
        self._held = None
        self._do(self._pump_all)

    def drop_messages(self, match: Callable[[bytes, bytes], object] = lambda channel, payload: True) -> None:
        """Lose messages from now on: all, or those of which the predicate (channel, payload) says so."""
        self._drop = match

    def deliver_messages(self) -> None:
        """Lose no more messages."""
        self._drop = None

    def reset(self) -> None:
        """Reset every open connection."""
        self._do(self._reset_all)

    def refuse(self) -> None:
        """Reset every open connection and refuse new ones, as if no server ran, until `accept`."""
        self._do(self._close_door)
        self._do(self._reset_all)

    def accept(self) -> None:
        """Accept connections again."""
        self._do(self._open_door)

    def heal(self) -> None:
        """Break nothing any more."""
        self._heal()
        self._do(self._pump_all)
        self._do(self._open_door)

    def _heal(self) -> None:
        self._faults = []
        self._delay = (0.0, None)
        self._held = None
        self._drop = None

    def _arm(self, cut: Cut, match: Match, nth: int, times: int | None) -> Fault:
        fault = Fault(cut, _matcher(match), nth, times)
        self._faults.append(fault)
        return fault

    # ---------------------------------------------------------------------------------- what the links ask

    def _note(self, command: Command) -> Fault | None:
        self.commands.append(command)
        met = [fault for fault in self._faults if fault.meets(command)]
        return met[0] if met else None

    def _drops(self, channel: bytes, payload: bytes) -> bool:
        self.messages.append((channel, payload))
        drop = self._drop
        if drop is None or not drop(channel, payload):
            return False
        self.dropped += 1
        return True

    def _due(self, command: Command | None) -> float:
        seconds, matches = self._delay
        if matches is not None and (command is None or not matches(command)):
            seconds = 0.0
        return self._running.time() + seconds if seconds else 0.0

    def _holds(self, command: Command | None) -> bool:
        held = self._held
        if held is None:
            return False
        matches = held[0]
        return matches is None or (command is not None and bool(matches(command)))

    def _lost(self, link: _Link) -> None:
        if link.gone:
            self._links.discard(link)

    # ----------------------------------------------------------------------------------------- how it runs

    @property
    def _running(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None, "the proxy does not run"
        return self._loop

    def _do(self, work: Callable[[], T]) -> T:
        """Do something in the proxy's loop, and return when it is done."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if here is self._running:
            return work()
        done: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._running.call_soon_threadsafe(run)
        return done.result(SOON)

    def _open_door(self) -> None:
        if self._listener is not None:
            return
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.setblocking(False)
        self._listener.bind((HOST, self.port))
        self._listener.listen(1024)
        self._running.add_reader(self._listener, self._knock)

    def _close_door(self) -> None:
        if self._listener is None:
            return
        self._running.remove_reader(self._listener)
        self._listener.close()
        self._listener = None

    def _knock(self) -> None:
        if self._listener is None:
            return
        try:
            client, _ = self._listener.accept()
        except BlockingIOError:
            return
        client.setblocking(False)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connected += 1
        task = self._running.create_task(self._join(client, _Link(self, self.connected)))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _join(self, client: socket.socket, link: _Link) -> None:
        self._links.add(link)
        try:
            await self._running.create_connection(lambda: link.server, HOST, self._server.port)
            await self._running.connect_accepted_socket(lambda: link.client, client, ssl=self._tls)
        except OSError:
            # There is no server, or no agreement about TLS.
            link.reset()
        finally:
            if link.client.transport is None:
                client.close()
                link.reset()
            self._lost(link)

    def _pump_all(self) -> None:
        for link in list(self._links):
            link.pump()

    def _reset_all(self) -> None:
        for task in list(self._arriving):
            task.cancel()
        for link in list(self._links):
            link.reset()

    def _end(self) -> None:
        self._close_door()
        self._reset_all()

    async def _ended(self) -> None:
        self._end()
        await eventually(lambda: not self._links and not self._arriving, "the proxy's connections end")

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._open_door()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._ended()
        self._clean_up()

    def __enter__(self) -> Self:
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(started),), name="fault proxy")
        self._thread.start()
        started.result(SOON)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        self._do(self._stop.set)
        self._thread.join(SOON)
        self._clean_up()

    async def _serve(self, started: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._open_door()
        started.set_result(None)
        await self._stop.wait()
        await self._ended()

    def _clean_up(self) -> None:
        self._loop = None
        self._port.give_up()
        if self._folder is not None:
            shutil.rmtree(self._folder)

    def _certify(self) -> ssl.SSLContext:
        self._folder = Path(tempfile.mkdtemp(prefix="tests-proxy-"))
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca_file))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(HOST, "localhost").configure_cert(context)
        return context
