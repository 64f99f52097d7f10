"""The guard: the questions a call is asked, in order.

1. **May this address call?** Over HTTP only, and asked at the door (`http.door`), before there is a call.
2. **Is the server taking calls?** While it drains: `OVERLOADED`.
3. **Has it been called too often?** Global rate limit, the tool's own limits or the default.
4. **Is there a slot?** Global concurrency, the tool's own slots or the default, shared keys.
5. **Is there room in the process?** Admission and worker threads.

Then it starts: in one indivisible step its rates are counted and its places taken. A refused call consumes
nothing. A call that waits holds nothing and is counted when it starts. Last, **how long may it run?**

`Guard._ask` is where this order stands; each question has a module of its own: `ip_filter`, `partition` (who
shares a count?), `rates`, `slots` and `deadline`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, Final, TypeVar, cast

import anyio

from frontmcp_py.call import Call
from frontmcp_py.clock import Clock, SystemClock
from frontmcp_py.errors import Cancelled, GuardError, Overloaded, PartitionError
from frontmcp_py.policy import (
    DEFAULT_RESERVED_THREADS,
    DEFAULT_SHUTDOWN_GRACE,
    DEFAULT_WORKER_THREADS,
    SHUTDOWN_GRACE_RANGE,
    UNSET,
    WORKER_THREADS_RANGE,
    Admission,
    Duration,
    Policy,
    Throttle,
    ThrottleOption,
    check_count,
    names_options,
    parse_duration,
)
from frontmcp_py.scheduler import Pool, Slot, Ticket
from frontmcp_py.signal import AbortSignal
from frontmcp_py.storage import Claim, MemoryStorage, RateRefusal, Storage, Verdict

from .bodies import body_of
from .deadline import Deadlines
from .events import Counts, KeyUse, Row, Statistics, total
from .health import Health, is_stuck, judge
from .plan import Limits, Needs, Plan, Plans
from .rates import too_often
from .run import Ending, Run
from .shared import Shared
from .slots import Slots
from .stores import check_countable, storage_from
from .threads import in_thread

__all__ = ["Counts", "Guard", "Health", "KeyUse", "Limits", "Plan", "Run", "Statistics"]

logger: logging.Logger = logging.getLogger("frontmcp_py.guard")

ResultT = TypeVar("ResultT")

# Plans that `run` keeps for policies it was given; with more, it makes them again.
_PLANS_KEPT: Final = 1024

# Stands for any call that is not a control call.
_NORMAL: Final = Ticket()

# How long work that was cancelled at shutdown may take to notice, in seconds, before it is left behind.
_LAST_CALL: Final = 0.3


class Guard:
    """Decides for every call whether it may start, waits with it for its turn, and ends it in time.

    Args:
        throttle: The server-wide limits: a `Throttle`, a mapping of its fields, or `False` for no limits at
            all. Without one, tools' own limits and admission's defaults hold.
        worker_threads: How many threads run `def` tools, 1 to 1000; control tools have a reserve beyond that.
        shutdown_grace: How long running work may take to end when the last user of the guard leaves, 0 to
            600 seconds.
        clock: Tells the time.
        production: Whether calls are refused while the store cannot be reached, if the throttle's `fallback`
            does not say; else this instance counts alone meanwhile.
        storage: The store that instances share, instead of the one that the throttle's `storage` names.

    Raises:
        ConfigurationError: A value is not allowed.

    Use it as `async with guard:` so that work is brought to an end when the block is left. It may be entered
    several times, also on one event loop after another, but not on two running loops at once.

    Attributes:
        throttle: The server-wide limits, if any were given.
        admission: The limits of the process that are in force; in `observe` mode they are only counted.
        worker_threads: How many threads run `def` tools, the reserve for control tools left out.
        storage: The store that instances share, if there is one and limits are on.
        counts_alone: Whether this instance's own counts decide while the store is down; if not, calls that
            need it are refused.
    """

    @names_options
    def __init__(
        self,
        throttle: ThrottleOption = None,
        *,
        worker_threads: int = DEFAULT_WORKER_THREADS,
        shutdown_grace: Duration = DEFAULT_SHUTDOWN_GRACE,
        clock: Clock | None = None,
        production: bool = False,
        storage: Storage | None = None,
    ) -> None:
        self.throttle: Throttle | None = Throttle.of(throttle, "Guard.throttle")
        throttle = self.throttle
        check_count(worker_threads, "Guard.worker_threads", *WORKER_THREADS_RANGE)
        low, high = SHUTDOWN_GRACE_RANGE
        self._grace = parse_duration(shutdown_grace, field="Guard.shutdown_grace", low=low, high=high)
        self._enforces = throttle is None or throttle.enabled
        self._observes = throttle is not None and throttle.enabled and throttle.mode == "observe"
        admission = (throttle.admission if throttle is not None else Admission()) if self._enforces else None
        self.admission: Admission | None = admission
        self.worker_threads: int = worker_threads
        self._admission = Pool("admission", admission.max_active, admission.reserved) if admission else None
        self._longest_wait = admission.queue_timeout if admission else None
        reserve = admission.reserved if admission else DEFAULT_RESERVED_THREADS
        self._threads = Pool("threads", worker_threads + reserve, reserve)
        max_keys = (throttle or Throttle()).max_keys
        self._memory = MemoryStorage(clock or SystemClock(), max_keys)
        self._scheduler = self._memory.scheduler
        self._slots = Slots(
            self._memory, None if self._observes else admission, self._admission, self._threads, admission
        )
        self.storage: Storage | None = None
        if self._enforces:
            self.storage = storage or storage_from(throttle or Throttle())
        fallback = throttle.fallback if throttle is not None else None
        self.counts_alone: bool = fallback == "memory" or (fallback is None and not production)
        self._shared: Shared | None = None
        self._outages = 0
        self._plans = Plans(throttle, self._memory.counts, self._scheduler, self._admission, self._threads)
        self._bound: dict[tuple[str, Policy], Plan] = {}
        self._rows: dict[str, Row] = {}
        self._unknown = 0
        self._abandoned_places = 0
        self._said_stuck = False
        self._draining = False
        # Set when `drain` has been called, and settled when it is over.
        self._drained: asyncio.Event | None = None
        self._users = 0
        self._peak_active = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadlines: Deadlines | None = None

    # -- for everybody -------------------------------------------------------------------------

    async def run(
        self,
        call: Call,
        policy: Policy,
        fn: Callable[[], Awaitable[ResultT]] | Callable[[AbortSignal], Awaitable[ResultT]],
        signal: AbortSignal | None = None,
    ) -> ResultT:
        """Run `fn` under the limits of `policy`.

        Args:
            call: Who calls what; limits are shared by tool name, and by what `partition_by` says.
            policy: The limits. Calls of one tool are meant to have one policy.
            fn: An async callable. If it has a positional parameter without a default, or one that is called
                `signal`, it is given the call's `AbortSignal` there.
            signal: Cancels the call when it is aborted.

        Returns:
            What `fn` returns.

        Raises:
            GuardError: The call was refused, timed out or was cancelled through `signal`.
            asyncio.CancelledError: The awaiting task was cancelled.
            ConfigurationError: The policy disagrees with another one about a shared slot.
        """
        if not isinstance(call, Call) or not isinstance(policy, Policy):
            wrong, kind = (call, "Call") if not isinstance(call, Call) else (policy, "Policy")
            raise TypeError(f"Guard.run: {wrong!r} is not allowed; give a {kind}")
        plan = self._bound.get((call.tool, policy)) or self._bind_anew(call.tool, policy)
        body, listens = body_of(fn)
        return await self.call(plan, call, body, signal=signal, inline=plan.cancels and not listens)

    async def __aenter__(self) -> Guard:
        deadlines = self.attach()
        await self.reach_store()
        self._users += 1
        if self._drained is None:
            # Work that has its grace since the last user left goes on: nobody is leaving any more.
            self._draining = False
            deadlines.recall()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        deadlines = self._deadlines
        if self._loop is not asyncio.get_running_loop() or deadlines is None:
            # Its loop had ended without it, and another one has taken over.
            return
        self._users -= 1
        if self._drained is not None:
            with anyio.CancelScope(shield=True):
                await self._drained.wait()
        elif not self._users:
            await self._close(deadlines)
        if self._shared is not None and not self._users:
            with anyio.CancelScope(shield=True):
                await self._shared.close()

    async def reach_store(self) -> None:
        """See whether the store that instances share is there, if there is one; `async with guard` does, too.

        Raises:
            ConfigurationError: It cannot be reached, and nothing may stand in for it; or it cannot be used.
        """
        self.attach()
        if self._shared is not None:
            await self._shared.open()

    def statistics(self) -> Statistics:
        """What the guard is doing and has done, as a frozen snapshot."""
        running = self._deadlines.running if self._deadlines else {}
        return Statistics(
            active=len(running) + self._slots.called,
            abandoned=sum(run.is_answered for run in running),
            waiting=self._slots.waiting,
            asking=self._slots.asking,
            places=self._admission.held if self._admission else 0,
            counts=total(self._rows.values()).freeze(),
            tools=MappingProxyType({tool: row.freeze() for tool, row in self._rows.items()}),
            unknown=self._unknown,
            peak_active=max(self._peak_active, self._deadlines.peak_active if self._deadlines else 0),
            peak_waiting=self._slots.peak_waiting,
            peak_places=self._admission.peak if self._admission else 0,
            abandoned_places=self._abandoned_places,
            oldest_running_s=self._deadlines.oldest_s if self._deadlines else 0.0,
            keys=MappingProxyType(
                {
                    key: KeyUse(slot.capacity, slot.held, self._waiting_for(slot), slot.peak)
                    for key, slot in self._plans.keys().items()
                }
            ),
            storage=None if self.storage is None else "down" if self._is_store_down else "up",
            outages=self._outages + (self._shared.outages if self._shared else 0),
        )

    def health(self) -> Health:
        """How the guard is, in one word, and whether more calls should be sent to it."""
        places = self._admission
        return judge(
            active=(len(self._deadlines.running) if self._deadlines else 0) + self._slots.called,
            waiting=self._slots.waiting,
            places=places.held if places else 0,
            abandoned_places=self._abandoned_places,
            admission=self.admission,
            has_normal_place=places is None or places.has_room(_NORMAL),
            is_draining=self._draining,
            is_enforced=self._enforces,
            is_observed=self._observes,
            is_store_down=self._is_store_down,
            is_store_needed=not self.counts_alone,
        )

    async def drain(self) -> None:
        """Take no more calls, and bring those that are there to an end; there is no way back on this loop.

        New calls and waiting ones are refused with `OVERLOADED`. Running ones have the guard's
        `shutdown_grace` to end; what still runs then is answered, its signal is aborted and its task
        cancelled, and it has a moment more. Meant for a process that was told to stop: leaving
        `async with guard` does the same when its last user leaves.
        """
        deadlines = self.attach()
        if self._drained is not None:
            await self._drained.wait()
            return
        self._drained = asyncio.Event()
        # Whose grace was running because the last user had left has what this one gives it.
        deadlines.recall()
        try:
            await self._close(deadlines)
        finally:
            self._drained.set()

    # -- for servers ---------------------------------------------------------------------------

    def bind(self, tool: str, policy: Policy, *, threads: bool = False, cancels: bool | None = None) -> Plan:
        """Bind a tool's limits, once, so that its calls only look them up.

        Args:
            tool: The tool's name.
            policy: What it declares.
            threads: Whether its body needs a worker thread.
            cancels: Whether a cancelled call cancels its body's task, if the policy does not say.

        Raises:
            ConfigurationError: Tools that share a slot disagree about it, or a wait would have no end.
        """
        if self.storage is not None:
            check_countable(self.storage, tool, self.limits_of(policy))
        if policy.on_cancel is not UNSET:
            cancels = policy.on_cancel == "cancel"
        row = self._rows.get(tool) or Row()
        plan = self._plans.make(tool, policy, threads=threads, cancels=bool(cancels), row=row)
        self._rows[tool] = row
        # A tool that is served anew may have more slots than before.
        self._slots.advance()
        return plan

    def declare(self, tool: str, policy: Policy) -> None:
        """Let a tool that is not served take part in the agreement about shared slots.

        Raises:
            ConfigurationError: It disagrees.
        """
        self._plans.declare(tool, policy)

    @property
    def plans(self) -> Mapping[str, Plan]:
        """What was bound, by tool."""
        return self._plans.made

    def unbind(self, tool: str) -> None:
        """A tool is gone. Its counters stay."""
        self._plans.forget(tool)

    def limits_of(self, policy: Policy) -> Limits:
        """The limits that are really enforced for a tool of this policy.

        A call never waits longer than admission lets it, whatever its own limits say.
        """
        limits = Limits.of(policy, self.throttle)
        if self._observes:
            return Limits((), (), limits.timeout, (), ())
        if self._longest_wait is None:
            return limits
        return limits.waiting_at_most(self._longest_wait)

    def use_clock(self, clock: Clock) -> None:
        """Tell the time by `clock` from now on; meant for tests."""
        self._memory.use_clock(clock)

    def count_unknown(self) -> None:
        """Somebody called a tool that does not exist: it counts towards nothing else."""
        self._unknown += 1

    async def call(
        self,
        plan: Plan,
        call: Call,
        body: Callable[[Run], Awaitable[ResultT]],
        *,
        signal: AbortSignal | None = None,
        parent: Run | None = None,
        inline: bool = False,
    ) -> ResultT:
        """Ask a call its questions, wait for its turn, and run its body.

        Args:
            plan: What `bind` made for its tool.
            call: Who calls what.
            body: The work.
            signal: Cancels the call when it is aborted.
            parent: The running call that makes this one.
            inline: The body may run in the caller's task, if nothing but a cancelled caller can end it early.
        """
        deadlines = self.attach()
        run = self._ask(plan if parent is None else plan.nested, call, body, signal, parent)
        if signal is None:
            if run.stake is not None:
                return cast("ResultT", await self._call_shared(deadlines, run, inline=inline))
            if run.turn is not None:
                await self._slots.turn(run)
            result: ResultT
            if inline and plan.timeout_s is None:
                result = await deadlines.in_callers_task(run)
            else:
                result = await deadlines.in_own_task(run)
            return result
        forget = signal.add_callback(lambda: self._signalled(run))
        try:
            if run.stake is not None:
                return cast("ResultT", await self._call_shared(deadlines, run, inline=False))
            if run.turn is not None:
                await self._slots.turn(run)
            result = await deadlines.in_own_task(run)
            return result
        finally:
            forget()

    async def _call_shared(self, deadlines: Deadlines, run: Run, *, inline: bool) -> Any:
        """The rest of a call that the store has a say in."""
        assert self._shared is not None
        await self._shared.start(run)
        try:
            if inline and run.plan.timeout_s is None:
                result = await deadlines.in_callers_task(run)
            else:
                result = await deadlines.in_own_task(run)
        except Exception:
            await self._shared.given_back(run)
            raise
        await self._shared.given_back(run)
        return result

    async def in_thread(self, run: Run, work: Callable[[], ResultT]) -> ResultT:
        """Run a `def` body in the worker thread that its call has a place for."""
        # The signal belongs to this loop, also when the thread is the first to ask for it.
        _ = run.signal
        return await in_thread(self.attach(), run, work)

    def pause(self, run: Run) -> None:
        """The tool asks its client something: its clock stands still, and its callers' clocks."""
        deadlines = self.attach()
        for each in run.lineage():
            deadlines.pause(each)

    def resume(self, run: Run) -> None:
        """The client has answered: the clocks go on."""
        deadlines = self.attach()
        for each in run.lineage():
            deadlines.resume(each)

    # -- the questions -------------------------------------------------------------------------

    def _ask(
        self,
        plan: Plan,
        call: Call,
        body: Callable[[Run], Awaitable[Any]],
        signal: AbortSignal | None,
        parent: Run | None,
    ) -> Run:
        """Every question of a call, in order; what comes back has started or waits for its turn."""
        row = plan.row
        row.submitted += 1
        try:
            if self._draining and parent is None:
                raise Overloaded(tool=plan.tool, shutting_down=True)
            if signal is not None and signal.aborted:
                row.cancelled_waiting += 1
                raise Cancelled(plan.tool)
            rates, slots = plan.everybody or self._needs(plan, call)
            run = Run(plan, call, body, rates, slots, parent)
            if self._shared is not None:
                self._shared.split(run, observed=self._observes)
            if self._observes:
                self._observe(run)
            verdict = self._memory.take(run)
            if verdict is Verdict.TAKEN:
                if run.stake is None or run.stake.is_alone:
                    row.started += 1
                else:
                    self._slots.ask(run)
            elif isinstance(verdict, RateRefusal):
                self._memory.refuse(run)
                raise too_often(plan.tool, verdict)
            else:
                self._slots.queue(run)
            return run
        except GuardError as refusal:
            if not isinstance(refusal, Cancelled):
                row.rejected[refusal.code] += 1
                row.refused_on_arrival += 1
            raise

    def _needs(self, plan: Plan, call: Call) -> Needs:
        """Who shares a count with this call."""
        try:
            return plan.needs(call, self._scheduler)
        except PartitionError as error:
            if not self._observes:
                raise
            plan.row.would_reject[error.code] += 1
            return (), ()

    def _observe(self, run: Run) -> None:
        """Count what would have become of the call, and let it pass all limits but that of threads."""
        row = run.plan.row
        places = tuple(pool for pool in run.pools if pool is not self._threads)
        shadow = Claim(run.rates, run.slots, places, control=run.control, nested=run.parent is not None)
        run.rates, run.slots = (), ()
        run.pools = tuple(pool for pool in run.pools if pool is self._threads)
        run.shadow = shadow
        verdict = self._memory.take(shadow)
        if isinstance(verdict, RateRefusal):
            row.would_reject[too_often(run.plan.tool, verdict).code] += 1
            self._memory.force(shadow, count=False)
        elif verdict is Verdict.FULL:
            code = self._slots.would_refuse(run, shadow)
            if code is None:
                row.would_wait += 1
            else:
                row.would_reject[code] += 1
            self._memory.force(shadow, count=code is None)

    # -- around them ---------------------------------------------------------------------------

    def attach(self) -> Deadlines:
        """Belong to the running loop from now on.

        Raises:
            RuntimeError: Another loop is running with this guard.
        """
        loop = asyncio.get_running_loop()
        if self._loop is loop and self._deadlines is not None:
            return self._deadlines
        if self._loop is not None:
            if self._loop.is_running():
                raise RuntimeError(
                    "this guard (or its server) is in use on another event loop that is still running; "
                    "make one for each loop, or use it on one loop after the other"
                )
            self._leave_loop()
            # Those who had entered it there did not come to leave it.
            self._users = 0
        self._loop = loop
        self._draining = False
        self._drained = None
        self._deadlines = Deadlines(loop, self._give_back, self._shutting_down, self._abandoned)
        self._slots.attach(loop)
        if self.storage is not None:
            throttle = self.throttle or Throttle()
            self._shared = self._slots.elsewhere = Shared(
                loop,
                self.storage,
                self._memory,
                self._slots,
                budget=throttle.storage_timeout,
                lease=throttle.lease,
                fallback=self.counts_alone,
            )
        return self._deadlines

    @property
    def _is_store_down(self) -> bool:
        return self._shared is not None and not self._shared.is_up

    def _waiting_for(self, slot: Slot) -> int:
        return slot.waiting + (self._shared.waiting_for(slot) if self._shared else 0)

    def _bind_anew(self, tool: str, policy: Policy) -> Plan:
        plan = self.bind(tool, policy)
        if len(self._bound) >= _PLANS_KEPT:
            self._bound.clear()
        self._bound[tool, policy] = plan
        return plan

    def _give_back(self, run: Run) -> None:
        """A call's work has really ended: its places go to whoever is next."""
        self._memory.release(run)
        if run.shadow is not None:
            self._memory.release(run.shadow)
        if run.stake is not None and self._shared is not None:
            self._shared.give_back(run)
        if run.is_abandoned and run.parent is None and self._admission is not None:
            self._abandoned_places -= 1
            # It is said again only after half of that work has really ended.
            if self._said_stuck and not is_stuck(2 * self._abandoned_places, self.admission):
                self._said_stuck = False
        if self._scheduler.waiting:
            self._slots.advance()

    def _abandoned(self, run: Run) -> None:
        """A call has been answered, but its work goes on in its places."""
        if run.parent is not None or self._admission is None:
            return
        self._abandoned_places += 1
        if not self._said_stuck and is_stuck(self._abandoned_places, self.admission):
            self._said_stuck = True
            assert self._deadlines is not None
            tools = Counter(run.plan.tool for run in self._deadlines.running if run.is_abandoned)
            logger.error(
                "stuck: %d of %d places are taken by work whose callers were answered, but which goes on: %s",
                self._abandoned_places,
                self._admission.capacity,
                ", ".join(f'"{tool}" ({times})' for tool, times in tools.most_common(10)),
            )

    def _signalled(self, run: Run) -> None:
        """The signal that a call was given is aborted."""
        if not self._slots.cancel(run) and run.answer is not None and self._deadlines is not None:
            self._deadlines.end(run, Ending.CANCELLED)

    def _shutting_down(self, run: Run) -> Overloaded:
        return self._slots.overloaded(run, shutting_down=True)

    async def _close(self, deadlines: Deadlines) -> None:
        """Nobody new comes in: running work gets its grace, then is aborted, cancelled and left."""
        self._draining = True
        self._slots.refuse_everybody()
        is_over = True
        try:
            # Whoever leaves may be cancelled: running work still gets its grace.
            with anyio.CancelScope(shield=True):
                is_over = await deadlines.drain(self._grace, _LAST_CALL)
        except BaseException:
            deadlines.stop()
            raise
        finally:
            if is_over and (not self._users or self._drained is not None):
                self._draining = self._drained is not None
                why = "the server shuts down" if self._draining else "nobody is connected any more"
                for run in deadlines.running:
                    logger.warning(
                        '"%s" has not ended although %s: %s; it keeps its places',
                        run.plan.tool,
                        why,
                        _why_it_runs(run),
                    )

    def _leave_loop(self) -> None:
        """The loop has ended: forget what still ran or waited there; rate counts live on."""
        if self._deadlines is not None:
            for run in self._deadlines.running:
                logger.warning(
                    '"%s" is left behind on an event loop that has ended: %s',
                    run.plan.tool,
                    _why_it_runs(run),
                )
            self._peak_active = max(self._peak_active, self._deadlines.peak_active)
            if self._shared is not None:
                self._outages += self._shared.outages
                self._shared.detach()
                self._shared = self._slots.elsewhere = None
            self._slots.detach()
            self._deadlines.close()
        self._loop = self._deadlines = None


def _why_it_runs(run: Run) -> str:
    if run.threads:
        return "its worker thread hangs"
    return "it ignores its cancellation" if run.was_cancelled else "it had no time to end"
