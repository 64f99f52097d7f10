"""The guard: the questions a call is asked, in order.

1. **Is the server taking calls?** While it drains: `OVERLOADED`.
2. **Has it been called too often?** Global rate limit, the tool's own limits or the default.
3. **Is there a slot?** Global concurrency, the tool's own slots or the default, shared keys.
4. **Is there room in the process?** Admission and worker threads.

Then it starts: in one indivisible step its rates are counted and its places taken. A refused call consumes
nothing. A call that waits holds nothing and is counted when it starts. Last, **how long may it run?**

`Guard._ask` is where this order stands; each question has a module of its own: `partition` (who shares
a count?), `rates`, `slots` and `deadline`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import MappingProxyType, TracebackType
from typing import Any, Final, TypeVar

import anyio

from frontmcp_py.call import Call
from frontmcp_py.clock import Clock, SystemClock
from frontmcp_py.errors import Cancelled, ConfigurationError, GuardError, Overloaded, PartitionError
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
from frontmcp_py.scheduler import Pool
from frontmcp_py.signal import AbortSignal
from frontmcp_py.storage import Claim, MemoryStorage, RateRefusal, Verdict

from .bodies import body_of
from .deadline import Deadlines
from .events import Counts, Row, Statistics, total
from .plan import Limits, Needs, Plan, Plans
from .rates import too_often
from .run import Ending, Run
from .slots import Slots
from .threads import in_thread

__all__ = ["Counts", "Guard", "Limits", "Plan", "Run", "Statistics"]

logger: logging.Logger = logging.getLogger("frontmcp_py.guard")

ResultT = TypeVar("ResultT")

# Plans that `run` keeps for policies it was given; with more, it makes them again.
_PLANS_KEPT: Final = 1024

# How long work that was cancelled at shutdown may take to notice, in seconds, before it is left behind.
_LAST_CALL: Final = 0.5


class Guard:
    """Decides for every call whether it may start, waits with it for its turn, and ends it in time.

    Args:
        throttle: The server-wide limits: a `Throttle`, a mapping of its fields, or `False` for no limits at
            all. Without one, tools' own limits and admission's defaults hold.
        worker_threads: How many threads run `def` tools, 1 to 1000; control tools have a reserve beyond that.
        shutdown_grace: How long running work may take to end when the last user of the guard leaves, 0 to
            600 seconds.
        clock: Tells the time.

    Raises:
        ConfigurationError: A value is not allowed.

    Use it as `async with guard:` so that work is brought to an end when the block is left. It may be entered
    several times, also on one event loop after another, but not on two running loops at once.
    """

    @names_options
    def __init__(
        self,
        throttle: ThrottleOption = None,
        *,
        worker_threads: int = DEFAULT_WORKER_THREADS,
        shutdown_grace: Duration = DEFAULT_SHUTDOWN_GRACE,
        clock: Clock | None = None,
    ) -> None:
        self.throttle: Throttle | None = _enforceable(Throttle.of(throttle, "Guard.throttle"))
        throttle = self.throttle
        check_count(worker_threads, "Guard.worker_threads", *WORKER_THREADS_RANGE)
        low, high = SHUTDOWN_GRACE_RANGE
        self._grace = parse_duration(shutdown_grace, field="Guard.shutdown_grace", low=low, high=high)
        self._enforces = throttle is None or throttle.enabled
        self._observes = throttle is not None and throttle.enabled and throttle.mode == "observe"
        admission = (throttle.admission if throttle is not None else Admission()) if self._enforces else None
        self._admission = Pool("admission", admission.max_active, admission.reserved) if admission else None
        self._longest_wait = admission.queue_timeout if admission else None
        reserve = admission.reserved if admission else DEFAULT_RESERVED_THREADS
        self._threads = Pool("threads", worker_threads + reserve, reserve)
        max_keys = (throttle or Throttle()).max_keys
        self._storage = MemoryStorage(clock or SystemClock(), max_keys)
        self._scheduler = self._storage.scheduler
        self._slots = Slots(
            self._storage, None if self._observes else admission, self._admission, self._threads, admission
        )
        self._plans = Plans(throttle, self._storage.counts, self._scheduler, self._admission, self._threads)
        self._bound: dict[tuple[str, Policy], Plan] = {}
        self._rows: dict[str, Row] = {}
        self._unknown = 0
        self._draining = False
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
        self._users += 1
        # Work that has its grace since the last user left goes on: nobody is leaving any more.
        self._draining = False
        deadlines.recall()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not asyncio.get_running_loop():
            # Its loop had ended without it, and another one has taken over.
            return
        self._users -= 1
        if not self._users:
            await self._close()

    def statistics(self) -> Statistics:
        """What the guard is doing and has done, as a frozen snapshot."""
        running = self._deadlines.running if self._deadlines else {}
        return Statistics(
            active=len(running) + self._slots.called,
            abandoned=sum(run.is_answered for run in running),
            waiting=self._scheduler.waiting,
            places=self._admission.held if self._admission else 0,
            counts=total(self._rows.values()).freeze(),
            tools=MappingProxyType({tool: row.freeze() for tool, row in self._rows.items()}),
            unknown=self._unknown,
            peak_active=max(self._peak_active, self._deadlines.peak_active if self._deadlines else 0),
            peak_waiting=self._slots.peak_waiting,
        )

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
        if policy.on_cancel is not UNSET:
            cancels = policy.on_cancel == "cancel"
        row = self._rows.get(tool) or Row()
        plan = self._plans.make(tool, policy, threads=threads, cancels=bool(cancels), row=row)
        self._rows[tool] = row
        # A tool that is served anew may have more slots than before.
        self._slots.advance()
        return plan

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
        self._storage.use_clock(clock)

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
            if run.turn is not None:
                await self._slots.turn(run)
            result = await deadlines.in_own_task(run)
            return result
        finally:
            forget()

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
            if self._observes:
                self._observe(run)
            verdict = self._storage.take(run)
            if verdict is Verdict.TAKEN:
                row.started += 1
            elif isinstance(verdict, RateRefusal):
                self._storage.refuse(run)
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
        verdict = self._storage.take(shadow)
        if isinstance(verdict, RateRefusal):
            row.would_reject[too_often(run.plan.tool, verdict).code] += 1
            self._storage.force(shadow, count=False)
        elif verdict is Verdict.FULL:
            code = self._slots.would_refuse(run, shadow)
            if code is None:
                row.would_wait += 1
            else:
                row.would_reject[code] += 1
            self._storage.force(shadow, count=code is None)

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
            self._abandon()
            # Those who had entered it there did not come to leave it.
            self._users = 0
        self._loop = loop
        self._draining = False
        self._deadlines = Deadlines(loop, self._give_back, self._shutting_down)
        self._slots.attach(loop)
        return self._deadlines

    def _bind_anew(self, tool: str, policy: Policy) -> Plan:
        plan = self.bind(tool, policy)
        if len(self._bound) >= _PLANS_KEPT:
            self._bound.clear()
        self._bound[tool, policy] = plan
        return plan

    def _give_back(self, run: Run) -> None:
        """A call's work has really ended: its places go to whoever is next."""
        self._storage.release(run)
        if run.shadow is not None:
            self._storage.release(run.shadow)
        if self._scheduler.waiting:
            self._slots.advance()

    def _signalled(self, run: Run) -> None:
        """The signal that a call was given is aborted."""
        if not self._slots.cancel(run) and run.answer is not None and self._deadlines is not None:
            self._deadlines.end(run, Ending.CANCELLED)

    def _shutting_down(self, run: Run) -> Overloaded:
        return self._slots.overloaded(run, shutting_down=True)

    async def _close(self) -> None:
        """The last user leaves: running work gets its grace, then is aborted, cancelled and left."""
        deadlines = self._deadlines
        if deadlines is None:
            return
        self._draining = True
        self._slots.refuse_everybody()
        try:
            # Whoever leaves may be cancelled: running work still gets its grace.
            with anyio.CancelScope(shield=True):
                await deadlines.drain(self._grace, _LAST_CALL)
        except BaseException:
            deadlines.stop()
            raise
        finally:
            if not self._users:
                self._draining = False
                for run in deadlines.running:
                    logger.warning(
                        '"%s" has not ended although nobody is connected any more: %s; it keeps its places',
                        run.plan.tool,
                        _why_it_runs(run),
                    )

    def _abandon(self) -> None:
        """The loop has ended: forget what still ran or waited there; rate counts live on."""
        if self._deadlines is not None:
            for run in self._deadlines.running:
                logger.warning(
                    '"%s" is left behind on an event loop that has ended: %s',
                    run.plan.tool,
                    _why_it_runs(run),
                )
            self._peak_active = max(self._peak_active, self._deadlines.peak_active)
            self._slots.detach()
            self._deadlines.abandon()
        self._loop = self._deadlines = None


def _why_it_runs(run: Run) -> str:
    if run.threads:
        return "its worker thread hangs"
    return "it ignores its cancellation" if run.was_cancelled else "it had no time to end"


def _enforceable(throttle: Throttle | None) -> Throttle | None:
    """A throttle without what this version cannot do: counts must not silently stay apart."""
    if throttle is not None and throttle.storage is not None:
        raise ConfigurationError(
            "Throttle.storage: this version counts in the process only; leave it out (None)"
        )
    return throttle
