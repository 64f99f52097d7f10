"""An instance in a process of its own: it takes a mutex that others want, too, again and again."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import time
from multiprocessing.connection import Connection
from typing import Final, NamedTuple, Self

import redis.asyncio

from frontmcp_py import Call, Concurrency, Guard, Policy, Throttle

MUTEX: Final = Policy(concurrency=Concurrency(1, queue_timeout=30))
CALL: Final = Call("mutex")
PATIENT: Final = 10.0
"""Seconds that the store may take to answer: a busy machine is no outage."""

PING: Final = "ping"
PONG: Final = "pong"

SOON: Final = 60.0
"""Seconds after which a process that says nothing is broken."""


class Turn(NamedTuple):
    """The mutex was taken; all by the clock that the processes of a machine share (`time.monotonic`).

    Attributes:
        began: When the body began.
        ended: When it ended.
        asked: When the call was made.
    """

    began: float
    ended: float
    asked: float


class Worker:
    """The process, as seen by whoever starts it. A context manager.

    Args:
        url: The store.
        echoes: It has no guard, and sends back each message on the channel `PING` on the channel `PONG`.
    """

    def __init__(self, url: str, *, echoes: bool = False) -> None:
        # Forked off a process that has imported everything: they are there at once, however many.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._near, self._far = multiprocessing.Pipe()
        self._process = context.Process(target=_run, args=(url, self._far, echoes), daemon=True)

    async def told(self) -> list[Turn]:
        """What it says next: that it is ready, or the turns that it has had.

        Raises:
            TimeoutError: It says nothing.
        """
        if not await asyncio.to_thread(self._near.poll, SOON):
            raise TimeoutError("an instance says nothing")
        turns: list[Turn] = self._near.recv()
        return turns

    async def turns(self, begin: float, end: float, hold: float) -> list[Turn]:
        """Let it take the mutex from `begin` to `end`, and keep it for `hold` seconds each time."""
        self._near.send((begin, end, hold))
        return await self.told()

    def __enter__(self) -> Self:
        self._process.start()
        self._far.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._near.close()
        self._process.join(SOON)


def _run(url: str, orders: Connection, echoes: bool) -> None:
    asyncio.run(_echo(url, orders) if echoes else _serve(url, orders))


async def _echo(url: str, orders: Connection) -> None:
    """Send messages back until there are no more orders."""

    async def send_back() -> None:
        async for message in subscription.listen():
            if message["type"] == "message":
                await client.publish(PONG, message["data"])
            else:
                orders.send([])

    async with redis.asyncio.Redis.from_url(url) as client, client.pubsub() as subscription:
        await subscription.subscribe(PING)
        echo = asyncio.create_task(send_back())
        with contextlib.suppress(EOFError):
            await asyncio.to_thread(orders.recv)
        echo.cancel()
        await asyncio.wait((echo,))


async def _serve(url: str, orders: Connection) -> None:
    """Do what is ordered, until there are no more orders."""
    async with Guard(Throttle(storage=url, storage_timeout=PATIENT, fallback="error")) as guard:
        turns: list[Turn] = []
        while True:
            orders.send(turns)
            try:
                begin, end, hold = await asyncio.to_thread(orders.recv)
            except EOFError:
                return
            turns = await _take_turns(guard, begin, end, hold)


async def _take_turns(guard: Guard, begin: float, end: float, hold: float) -> list[Turn]:
    """Take the mutex, and ask for it anew as soon as it was given back."""
    turns: list[Turn] = []

    async def body() -> None:
        began = time.monotonic()
        if hold:
            await asyncio.sleep(hold)
        turns.append(Turn(began, time.monotonic(), asked))

    await asyncio.sleep(begin - time.monotonic())
    while (asked := time.monotonic()) < end:
        await guard.run(CALL, MUTEX, body)
    return turns
