"""Instances that share a store: guards in this process, and in processes that may be stopped and killed.

Two guards in one process over one store are two instances, and most of what a store promises is seen with
them. An `Instance` is a process of its own: it makes the calls that a test tells it to make, and tells what
becomes of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal as signals
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from frontmcp_py import AbortSignal, Call, Caller, Guard, GuardError, Policy, RateLimit
from frontmcp_py.storage.redis import script
from tests.fault_proxy import Command, FaultProxy
from tests.servers import RedisServer, eventually

LEASE: Final = 1.0
"""Seconds; the shortest there is."""

PATIENCE: Final = 30.0
"""Seconds that a call in line waits, if a test does not say; no test waits so long."""


def throttle(url: str, **options: Any) -> dict[str, Any]:
    """What an instance is given: a short lease, no fallback, and a budget that suits a busy machine, too."""
    return {"storage": url, "lease": LEASE, "fallback": "error", "storage_timeout": 5, **options}


def instance(url: str, **options: Any) -> Guard:
    """An instance in this process."""
    own = {name: options.pop(name) for name in ("worker_threads", "shutdown_grace") if name in options}
    return Guard(throttle(url, **options), **own)


def slot(most: int = 1, wait: float | None = PATIENCE, **options: Any) -> Policy:
    """At most so many at once, and so many seconds in line."""
    own = {name: options.pop(name) for name in ("rate_limit", "priority", "on_cancel") if name in options}
    return Policy(concurrency={"max_concurrent": most, "queue_timeout": wait, **options}, **own)


def rate(most: int) -> RateLimit:
    """So many calls in a window that does not end while a test runs."""
    return RateLimit(most, window="300d")


# ------------------------------------------------------------------------------------- the store from outside


def keys(server: RedisServer) -> dict[str, int]:
    """Every key of the store with the milliseconds that it has left; -1: for ever."""
    found = server.do("EVAL", _EACH.format("redis.call('PTTL', key)"), 0, "*")
    return dict(zip(found[::2], found[1::2], strict=True))


def counted(server: RedisServer) -> int:
    """How many calls the fixed and sliding windows of the store count."""
    return _total(server, "tonumber(redis.call('GET', key))", "*:rate:*")


def in_line(server: RedisServer) -> int:
    """How many stand in a line of the store; a call stands in that of each slot it needs."""
    return _total(server, "redis.call('ZCARD', key)", "*:line:*")


def held(server: RedisServer) -> int:
    """How many places in slots are taken by leases that have not ended."""
    now = "redis.call('TIME')"
    moment = f"string.format('%.0f', {now}[1] * 1000000 + {now}[2])"
    return _total(server, f"redis.call('ZCOUNT', key, {moment}, '+inf')", "*:held:*")


_EACH: Final = """
local found = {{}}
for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  found[#found + 1] = key
  found[#found + 1] = {}
end
return found
"""
"""In one step, and with one connection: the keys that match, and something of each."""


def _total(server: RedisServer, what: str, match: str) -> int:
    return sum(server.do("EVAL", _EACH.format(what), 0, match)[1::2])


def every_key_ends(server: RedisServer) -> None:
    """No key of the store stays for ever."""
    assert [key for key, left in keys(server).items() if left <= 0] == []


def asked(proxy: FaultProxy, name: str) -> int:
    """How many round trips have asked the store this (`take`, `renew`, `release`, `pass_on`)."""
    return proxy.trips(asks(name))


def asks(*names: str) -> Callable[[Command], bool]:
    """Whether a command is one of these questions."""
    first = {script(name).sha.encode() for name in names} | {script(name).source.encode() for name in names}
    return lambda command: command.name in ("EVALSHA", "EVAL") and command.words[1] in first


# ------------------------------------------------------------------------------------------ other processes


class Event(NamedTuple):
    """Something that happened to a call.

    Attributes:
        name: The call.
        what: `began`, `aborted CODE`, `ended`, or what its caller got: `ok` or a code.
        at: When, by the clock that all processes of a machine share.
    """

    name: str
    what: str
    at: float


class Instance:
    """A process with a guard. A context manager; the process has ended when it is left.

    Args:
        url: The store.
        options: What else its throttle has.
    """

    def __init__(self, url: str, **options: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.flow.program", "uvicorn", "tests.instances"])
        self._near, far = multiprocessing.Pipe()
        self._process = context.Process(target=_serve, args=(far, throttle(url, **options)), daemon=True)
        self._process.start()
        far.close()
        self.events: list[Event] = []

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    async def ready(self) -> Self:
        """Wait until it takes calls."""
        await self.said("instance", "ready")
        return self

    def call(
        self,
        name: str,
        policy: Policy,
        *,
        tool: str = "tool",
        seconds: float | None = None,
        caller: Caller | None = None,
    ) -> None:
        """Call a tool that works for so many seconds, or until `end`."""
        self._near.send(("call", name, policy, tool, seconds, caller or Caller()))

    def end(self, name: str) -> None:
        """The work of a call may end."""
        self._near.send(("end", name))

    def block(self, seconds: float) -> None:
        """Its event loop stands still for so long."""
        self._near.send(("block", seconds))

    def leave(self) -> None:
        """It leaves its guard and ends, as a program does."""
        self._near.send(("leave",))

    def kill(self) -> None:
        """It is gone at once (SIGKILL)."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """It does nothing any more (SIGSTOP) until `go_on`."""
        os.kill(self.pid, signals.SIGSTOP)
        # It is the fork server's child, so that nobody tells us.
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0] != "T":
            time.sleep(0.001)

    def go_on(self) -> None:
        """It goes on."""
        os.kill(self.pid, signals.SIGCONT)

    def heard(self, name: str, what: str) -> Event | None:
        """What has been told of a call so far."""
        with contextlib.suppress(EOFError, OSError):
            while self._near.poll():
                self.events.append(Event(*self._near.recv()))
        return next((each for each in self.events if each[:2] == (name, what)), None)

    def outcome(self, name: str) -> str | None:
        """What the caller got: `ok`, a code, or nothing yet."""
        self.heard(name, "")
        told = [each.what for each in self.events if each.name == name]
        return next((what for what in told if what == "ok" or what.isupper()), None)

    async def said(self, name: str, what: str) -> float:
        """Wait until something has happened to a call; when it did."""
        await eventually(lambda: self.heard(name, what), f"{name}: {what}, among {self.events}")
        event = self.heard(name, what)
        assert event is not None
        return event.at

    async def answer(self, name: str) -> str:
        """Wait until the caller has an answer."""
        await eventually(lambda: self.outcome(name), f"{name} is answered, among {self.events}")
        outcome = self.outcome(name)
        assert outcome is not None
        return outcome

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._process.close()
        self._near.close()


@contextlib.contextmanager
def instances(count: int, url: str, **options: Any) -> Iterator[list[Instance]]:
    """So many processes that share a store."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(Instance(url, **options)) for _ in range(count)]


def _serve(near: Connection, options: dict[str, Any]) -> None:
    """What runs in the process."""
    logging.getLogger("frontmcp_py").addHandler(logging.NullHandler())
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_Served(near, options).run())


class _Served:
    def __init__(self, near: Connection, options: dict[str, Any]) -> None:
        self._near = near
        self._guard = Guard(options)
        self._ends: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaves = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._near.fileno(), self._hear)
        async with self._guard:
            self._say("instance", "ready")
            await self._leaves.wait()
        self._say("instance", "left")

    def _hear(self) -> None:
        try:
            while self._near.poll():
                match self._near.recv():
                    case "call", name, policy, tool, seconds, caller:
                        task = asyncio.ensure_future(
                            self._call(name, policy, Call(tool, {}, caller), seconds)
                        )
                        self._tasks.add(task)
                        task.add_done_callback(self._tasks.discard)
                    case "end", name:
                        self._ends[name].set()
                    case "block", seconds:
                        time.sleep(seconds)
                    case _:
                        self._leaves.set()
        except EOFError:
            os._exit(0)

    async def _call(self, name: str, policy: Policy, call: Call, seconds: float | None) -> None:
        end = self._ends[name] = asyncio.Event()

        async def work(signal: AbortSignal) -> None:
            self._say(name, "began")
            signal.add_callback(lambda: self._say(name, f"aborted {getattr(signal.reason, 'code', '?')}"))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(end.wait(), seconds)
            self._say(name, "ended")

        try:
            await self._guard.run(call, policy, work)
        except GuardError as error:
            self._say(name, error.code)
        else:
            self._say(name, "ok")

    def _say(self, name: str, what: str) -> None:
        self._near.send(Event(name, what, time.monotonic()))
