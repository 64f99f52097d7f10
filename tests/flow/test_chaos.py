"""Processes that share slots are stopped, killed and cut off at random, and every promise holds.

`CHAOS_SEED=123` in the environment repeats the choices of a run, `CHAOS_SECONDS=60` makes it longer.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio

from tests.fault_proxy import FaultProxy
from tests.flow.chaos_worker import LEASE, RULES, Orders, work
from tests.guard.support import Held
from tests.history import EVERYBODY, Event, History, Rules
from tests.instances import every_key_ends, instance, keys, slot
from tests.servers import Valkey, eventually
from tests.servers import own_valkey as own_valkey

SECONDS = float(os.environ.get("CHAOS_SECONDS", "20"))
PROCESSES = 3


class Chaos:
    """Three processes at work, and what happens to them."""

    def __init__(self, server: Valkey, proxy: FaultProxy, folder: Path, seed: int) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.flow.program", "uvicorn", "tests.flow.chaos_worker"])
        self._server = server
        self._proxy = proxy
        self._folder = folder
        self._random = random.Random(seed)
        self._until = time.monotonic() + SECONDS
        self._workers: dict[str, ForkServerProcess] = {}
        self._stopped: set[str] = set()
        self._born = 0
        self.events: list[Event] = []
        self.done: Counter[str] = Counter()

    @property
    def journals(self) -> list[Path]:
        return sorted(self._folder.iterdir())

    async def run(self) -> None:
        for _ in range(PROCESSES):
            self._bear()
        await eventually(lambda: len(self._at_work()) == PROCESSES, "all processes are at work")
        deeds = [self._kill, self._reset, self._refuse]
        deeds += 2 * [self._stop_briefly, self._stop_long, self._drop_messages, self._lose_replies]
        async with self._pings():
            async with asyncio.TaskGroup() as group:
                while time.monotonic() < self._until:
                    await asyncio.sleep(self._random.random())
                    deed = self._random.choice(deeds)
                    self.done[deed.__name__.strip("_")] += 1
                    group.create_task(deed())
            self._proxy.heal()
            await eventually(self._have_left, "all have left", within=45)
        assert {each.exitcode for each in self._workers.values()} == {0}

    def end(self) -> None:
        """End whatever is left."""
        for each in self._workers.values():
            each.kill()
            each.join()

    def _have_left(self) -> bool:
        return not any(each.is_alive() for each in self._workers.values())

    # -- what happens ---------------------------------------------------------------------------

    async def _kill(self) -> None:
        name = self._anybody()
        self._note(name, "killed")
        worker = self._workers.pop(name)
        worker.kill()
        worker.join()
        self._bear()

    async def _stop_briefly(self) -> None:
        await self._stop(LEASE * 0.4 * self._random.random())

    async def _stop_long(self) -> None:
        await self._stop(LEASE * (0.8 + self._random.random()))

    async def _stop(self, seconds: float) -> None:
        name = self._anybody()
        if name in self._stopped:
            return
        pid = self._workers[name].pid
        assert pid is not None
        self._stopped.add(name)
        self._note(name, "stopped")
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self._stopped.remove(name)
        if name in self._workers:
            self._note(name, "went on")
            os.kill(pid, signal.SIGCONT)

    async def _drop_messages(self) -> None:
        share = self._random.random() / 2
        self._proxy.drop_messages(lambda channel, payload: random.random() < share)
        await asyncio.sleep(self._random.random())
        self._proxy.deliver_messages()

    async def _lose_replies(self) -> None:
        lose = self._random.choice([self._proxy.lose_reply, self._proxy.cut_before, self._proxy.cut_after])
        for _ in range(5):
            lose("EVALSHA", nth=self._random.randrange(1, 200))

    async def _reset(self) -> None:
        self._proxy.reset()

    async def _refuse(self) -> None:
        since = time.monotonic()
        self._proxy.refuse()
        await asyncio.sleep(LEASE * 0.1)
        self._proxy.accept()
        # Whoever failed to renew tries again with the next beat.
        self._note(EVERYBODY, "still", since=since, later=LEASE / 3)

    # -- parts ----------------------------------------------------------------------------------

    def _bear(self) -> None:
        self._born += 1
        name = f"p{self._born}"
        journal = self._folder / name
        orders = Orders(
            self._proxy.url, name, journal, self._random.randrange(1 << 30), self._until, self._born % 3 == 0
        )
        self._workers[name] = self._context.Process(target=work, args=(orders,), daemon=True)
        self._workers[name].start()

    def _at_work(self) -> list[str]:
        journals = {name: self._folder / name for name in self._workers}
        return [name for name, file in journals.items() if file.exists() and file.stat().st_size]

    def _anybody(self) -> str:
        return self._random.choice(self._at_work() or list(self._workers))

    def _note(self, who: str, what: str, *, since: float = 0.0, later: float = 0.0) -> None:
        self.events.append(Event(time.monotonic() + later, who, what, since=since))

    @asynccontextmanager
    async def _pings(self) -> AsyncIterator[None]:
        """Tell when the store, or the way to it, stood still by itself."""

        async def ping() -> None:
            client: Any = redis.asyncio.Redis.from_url(self._server.url)
            async with client:
                while True:
                    since = time.monotonic()
                    await client.ping()
                    await asyncio.sleep(LEASE / 50)
                    if time.monotonic() - since > LEASE / 8:
                        self._note(EVERYBODY, "still", since=since)

        task = asyncio.create_task(ping())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))


@contextmanager
def at_work(chaos: Chaos) -> Iterator[Chaos]:
    try:
        yield chaos
    finally:
        chaos.end()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_no_promise_about_shared_slots_is_broken(tmp_path: Path, own_valkey: Valkey) -> None:
    seed = int(os.environ.get("CHAOS_SEED") or random.SystemRandom().randrange(1_000_000))
    sys.stdout.write(f"CHAOS_SEED={seed}\n")  # shown when it fails
    with FaultProxy(own_valkey) as proxy, at_work(Chaos(own_valkey, proxy, tmp_path, seed)) as chaos:
        await chaos.run()
        every_key_ends(own_valkey)
        # Whatever anybody left behind is gone after a lease, the dead among them.
        await eventually(lambda: keys(own_valkey) == {}, f"no key is left: {keys(own_valkey)}")
    history = History.read(chaos.journals, RULES, chaos.events)
    sys.stdout.write(f"{summary(history)} {dict(chaos.done)}\n")
    assert history.violations() == [], f"CHAOS_SEED={seed}"
    await every_place_is_free(own_valkey)


async def every_place_is_free(server: Valkey) -> None:
    async with instance(server.url) as guard:
        held = [
            Held(guard, f"{name}{nth}", slot(most, 0, key=name))
            for name, most in RULES.slots.items()
            for nth in range(most)
        ]
        await eventually(lambda: all(each.runs for each in held), "everybody runs at once")
        for each in held:
            await each.end()


def summary(history: History) -> str:
    """What happened, in numbers."""
    counts = Counter(event.what for event in history.events)
    codes = Counter(event.code for event in history.events if event.what == "answered")
    return f"{dict(counts)} {dict(codes)}"


# ----------------------------------------------------------------------------------- the checker finds it all

ONE = Rules(slots={"a": 1, "b": 2}, tools={"x": ("a",), "y": ("b",), "xy": ("a", "b")}, lease=1.0)


def of(*events: tuple[float, str, str], tools: str = "x", more: Iterable[Event] = ()) -> History:
    """A history: moments, calls (`process.number`) and what happened to them."""
    told = [
        Event(
            at, call.partition(".")[0], what, call if "." in call else "", tools if what == "asked" else "",
            "ok" if what == "answered" else "",
        )
        for at, call, what in events
    ]  # fmt: skip
    return History([*told, *more], ONE)


def whole(call: str, asked: float, began: float, ended: float) -> list[tuple[float, str, str]]:
    return [(asked, call, "asked"), (began, call, "began"), (ended, call, "ended"), (ended, call, "answered")]


def test_a_history_in_which_all_went_well_has_no_violation() -> None:
    assert of(*whole("p.1", 0, 1, 2), *whole("q.1", 0.5, 2, 3)).violations() == []


def test_two_holders_of_one_place_are_found() -> None:
    history = of(*whole("p.1", 0, 1, 2), *whole("q.1", 0.5, 1.9, 3))
    assert history.violations() == ["['p.1', 'q.1'] hold a at 1.9000, of 1"]


def test_every_slot_of_a_call_counts() -> None:
    calls = [*whole("p.1", 0, 1, 2), *whole("q.1", 0.5, 1.5, 3)]
    assert len(of(*calls, tools="xy").over_the_limit()) == 1
    assert of(*calls, tools="y").over_the_limit() == []
    assert len(of(*calls, *whole("r.1", 1, 1.8, 2), tools="y").over_the_limit()) == 1


@pytest.mark.parametrize("end", ["lost", "killed", "stopped"])
def test_a_holder_counts_until_its_lease_may_have_ended(end: str) -> None:
    process = "p" if end != "lost" else "p.1"
    begun: list[tuple[float, str, str]] = [(0, "p.1", "asked"), (1, "p.1", "began"), (2, process, end)]
    assert of(*begun, *whole("q.1", 0.5, 2.1, 3)).over_the_limit() == []
    assert len(of(*begun, *whole("q.1", 0.5, 1.9, 3)).over_the_limit()) == 1


def test_a_short_stop_ends_nothing() -> None:
    begun = [*whole("p.1", 0, 1, 5), (2.0, "p", "stopped"), (2.4, "p", "went on")]
    assert len(of(*begun, *whole("q.1", 0.5, 3, 4)).over_the_limit()) == 1
    # Two of them with little time between are a long one.
    again = [(2.5, "p", "stopped"), (2.9, "p", "went on")]
    assert of(*begun, *again, *whole("q.1", 0.5, 3, 4)).over_the_limit() == []


def test_what_begins_after_a_stop_counts() -> None:
    stop = [(0.5, "p", "stopped"), (3.0, "p", "went on")]
    late = Event(3.02, "p", "still", since=0.49)
    history = of(*stop, *whole("q.1", 0, 1, 5), *whole("p.1", 0, 3.01, 4), more=[late])
    assert len(history.over_the_limit()) == 1


def test_a_spell_of_everybody_is_one_of_each() -> None:
    spell = Event(2.6, EVERYBODY, "still", since=2.0)
    calls = [*whole("p.1", 0, 1, 4), *whole("q.1", 0.5, 2.5, 4)]
    assert of(*calls, more=[spell]).over_the_limit() == []
    assert len(of(*calls).over_the_limit()) == 1


def test_a_call_without_an_answer_is_found_unless_its_process_was_killed() -> None:
    assert of((0, "p.1", "asked")).violations() == ["p.1 (x) was never answered"]
    assert of((0, "p.1", "asked"), (1, "p", "killed")).violations() == []


def test_an_answer_that_a_patient_caller_never_gets_is_found() -> None:
    events = [Event(0, "p", "asked", "p.1", "x"), Event(1, "p", "answered", "p.1", code="QUEUE_TIMEOUT")]
    assert History(events, ONE).violations() == ["p.1 (x) was answered QUEUE_TIMEOUT"]


def test_work_that_never_ends_is_found() -> None:
    history = of((0, "p.1", "asked"), (1, "p.1", "began"), (2, "p.1", "answered"))
    assert history.violations() == ["p.1 (x) never ended"]


def test_whoever_overtakes_is_found() -> None:
    first = [(0.1, "p.1", "queued"), *whole("p.1", 0, 3, 4)]
    assert of(*first, *whole("q.1", 0.5, 1, 2)).violations() == ["q.1 overtook p.1 in the line of a"]
    assert of(*first, *whole("q.1", 0.05, 1, 2)).violations() == [], "it asked before"
    assert of(*first, *whole("q.1", 0.5, 1, 2), tools="y").violations() == [], "not certain with two places"
    stop = [(0.2, "p", "stopped"), (1.2, "p", "went on")]
    assert of(*first, *stop, *whole("q.1", 0.5, 1, 2)).violations() == [], "it may have lost its place"
    unread = [(0.02, "p", "stopped"), (0.62, "p", "went on"), (0.65, "p.1", "queued"), *whole("p.1", 0, 3, 4)]
    assert of(*unread, *whole("q.1", 0.7, 1, 2)).violations() == [], "it was told late that it has one"


def test_a_line_that_a_killed_process_did_not_finish_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "p"
    file.write_text('{"at": 0, "who": "p", "what": "asked", "call": "p.1", "tool": "x"}\n{"at": 1, "wh')
    history = History.read([file], ONE)
    assert [event.what for event in history.events] == ["asked"]
