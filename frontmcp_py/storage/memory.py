"""Counts and slots in the memory of this process.

`WindowCounts` is a storage class of the `limits` package, so that the package's own strategies can be
run over the same counts and must decide the same. It differs from the package's `MemoryStorage` in what
a server under load needs: no thread, no lock, no clock of its own, and expiry without a sweep. Fixed
windows line up with the clock, so all subjects of one window length begin and end together, and a
window that has ended is dropped as a whole.

All times are integer nanoseconds, so that a wait is exact and no window has a rounding edge.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final, TypeAlias

from limits.storage import MovingWindowSupport, SlidingWindowCounterSupport
from limits.storage import Storage as LimitsStorage

from frontmcp_py.clock import Clock
from frontmcp_py.policy import MAX_KEYS
from frontmcp_py.scheduler import Scheduler

from .claim import Claim, RateRefusal, Verdict

_SECOND: Final = 1_000_000_000

# How many dead counts a single call helps to free: dropping a million at once would stall the loop.
_FREED_PER_CALL: Final = 64

_NEVER: Final = 1 << 63


class FixedWindows:
    """Counts of one window length, aligned with the clock: they all begin and end together."""

    __slots__ = ("_all", "begin_ns", "counts", "end_ns", "window_ns")

    def __init__(self, everything: WindowCounts, window_ns: int) -> None:
        self._all = everything
        self.window_ns: int = window_ns
        self.begin_ns: int = 0
        self.end_ns: int = 0
        self.counts: dict[str, int] = {}

    def turn(self, now_ns: int) -> None:
        """Begin the window that `now_ns` lies in, with no counts."""
        self._all.discard(self.counts)
        self.counts = {}
        self.begin_ns = now_ns - now_ns % self.window_ns
        self.end_ns = self.begin_ns + self.window_ns

    def wait_ns(self, key: str, most: int, now_ns: int, overflow: str) -> int:
        """Nanoseconds until `key` may count one more; 0 for now."""
        if not self.begin_ns <= now_ns < self.end_ns:
            self.turn(now_ns)
        count = self.counts.get(key)
        if count is None:
            if self._all.held < self._all.max_keys:
                return 0
            count = self.counts.get(overflow, 0)
        return 0 if count < most else self.end_ns - now_ns

    def hit(self, key: str, now_ns: int, overflow: str, amount: int = 1) -> int:
        """Count `amount` calls; the count."""
        if not self.begin_ns <= now_ns < self.end_ns:
            self.turn(now_ns)
        counts = self.counts
        count = counts.get(key)
        if count is None and self._all.held >= self._all.max_keys:
            key = overflow
            count = counts.get(key)
        if count is None:
            self._all.hold(self.end_ns)
            count = 0
        counts[key] = count + amount
        return count + amount

    def undo(self, key: str, overflow: str, counted_ns: int) -> None:
        """Take one call back, unless its window has ended meanwhile."""
        if not self.begin_ns <= counted_ns < self.end_ns:
            return
        if key not in self.counts:
            key = overflow
        count = self.counts.get(key, 0)
        if count > 1:
            self.counts[key] = count - 1
        elif count:
            self.clear(key)

    def clear(self, key: str) -> None:
        """Forget `key`."""
        if self.counts.pop(key, None) is not None:
            self._all.held -= 1

    def forget(self) -> None:
        """Forget every key."""
        self._all.discard(self.counts)
        self.counts = {}

    def expire(self, now_ns: int) -> int:
        """Drop what has ended; when there is something to drop next."""
        if self.counts and now_ns >= self.end_ns:
            self.turn(now_ns)
        return self.end_ns if self.counts else _NEVER


class SlidingWindows:
    """The two-counter estimate: the last window's count, weighted by how much of it is still in view."""

    __slots__ = ("_all", "begin_ns", "counts", "end_ns", "previous", "window_ns")

    def __init__(self, everything: WindowCounts, window_ns: int) -> None:
        self._all = everything
        self.window_ns: int = window_ns
        self.begin_ns: int = 0
        self.end_ns: int = 0
        self.counts: dict[str, int] = {}
        self.previous: dict[str, int] = {}

    def turn(self, now_ns: int) -> None:
        """Begin the window that `now_ns` lies in; the one before it, if just ended, stays in view."""
        followed = self.end_ns <= now_ns < self.end_ns + self.window_ns
        self._all.discard(self.previous)
        if not followed:
            self._all.discard(self.counts)
        self.previous = self.counts if followed else {}
        self.counts = {}
        self.begin_ns = now_ns - now_ns % self.window_ns
        self.end_ns = self.begin_ns + self.window_ns

    def look(self, key: str, now_ns: int) -> tuple[int, int, int]:
        """The previous count, the current one, and the nanoseconds left of the current window."""
        if not self.begin_ns <= now_ns < self.end_ns:
            self.turn(now_ns)
        return self.previous.get(key, 0), self.counts.get(key, 0), self.end_ns - now_ns

    def wait_ns(self, key: str, most: int, now_ns: int, overflow: str) -> int:
        """Nanoseconds until `key` may count one more; 0 for now.

        One more has room while `previous * left / window < most - current`.
        """
        previous, current, left = self.look(key, now_ns)
        if not previous and not current and self._all.held >= self._all.max_keys:
            previous, current, left = self.look(overflow, now_ns)
        if previous * left < (most - current) * self.window_ns:
            return 0
        if current < most:
            return left - ((most - current) * self.window_ns - 1) // previous
        # Not before the next window, where what is current now is weighted in its turn.
        most_left = min(self.window_ns, (most * self.window_ns - 1) // current)
        return left + self.window_ns - most_left

    def hit(self, key: str, now_ns: int, overflow: str, amount: int = 1) -> None:
        """Count `amount` calls."""
        if not self.begin_ns <= now_ns < self.end_ns:
            self.turn(now_ns)
        if key not in self.counts:
            if key not in self.previous and self._all.held >= self._all.max_keys:
                key = overflow
            if key not in self.counts:
                self._all.hold(self.end_ns)
        self.counts[key] = self.counts.get(key, 0) + amount

    def undo(self, key: str, overflow: str, counted_ns: int) -> None:
        """Take one call back, unless its window is out of view."""
        if self.begin_ns <= counted_ns < self.end_ns:
            counts = self.counts
        elif self.begin_ns - self.window_ns <= counted_ns < self.begin_ns:
            counts = self.previous
        else:
            return
        if key not in counts:
            key = overflow
        count = counts.get(key, 0)
        if count > 1:
            counts[key] = count - 1
        elif count and counts.pop(key):
            self._all.held -= 1

    def clear(self, key: str) -> None:
        """Forget `key`."""
        for counts in (self.counts, self.previous):
            if counts.pop(key, None) is not None:
                self._all.held -= 1

    def forget(self) -> None:
        """Forget every key."""
        self._all.discard(self.counts)
        self._all.discard(self.previous)
        self.counts, self.previous = {}, {}

    def expire(self, now_ns: int) -> int:
        """Drop what has ended; when there is something to drop next."""
        if (self.counts or self.previous) and now_ns >= self.end_ns:
            self.turn(now_ns)
        return self.end_ns if self.counts or self.previous else _NEVER


class MovingWindows:
    """The exact log: every call of the last `window` is remembered, by the monotonic clock."""

    __slots__ = ("_all", "log", "window_ns")

    def __init__(self, everything: WindowCounts, window_ns: int) -> None:
        self._all = everything
        self.window_ns: int = window_ns
        # In order of the latest call, so that what has expired stands in front.
        self.log: OrderedDict[str, deque[int]] = OrderedDict()

    def entries(self, key: str) -> deque[int] | None:
        """The calls of `key` still in view, oldest first."""
        entries = self.log.get(key)
        if entries:
            horizon = self._all.clock.monotonic_ns() - self.window_ns
            while entries and entries[0] <= horizon:
                entries.popleft()
        return entries

    def wait_ns(self, key: str, most: int, now_ns: int, overflow: str) -> int:
        """Nanoseconds until `key` may count one more; 0 for now. `now_ns` is the wall's and not used."""
        entries = self.entries(key)
        if entries is None and self._all.held >= self._all.max_keys:
            entries = self.entries(overflow)
        if not entries or len(entries) < most:
            return 0
        return max(1, entries[-most] + self.window_ns - self._all.clock.monotonic_ns())

    def hit(self, key: str, now_ns: int, overflow: str, amount: int = 1) -> None:
        """Remember `amount` calls."""
        entries = self.log.get(key)
        if entries is None and self._all.held >= self._all.max_keys:
            key = overflow
            entries = self.log.get(key)
        if entries is None:
            entries = self.log[key] = deque()
            self._all.hold(now_ns + self.window_ns)
        else:
            self.log.move_to_end(key)
        entries.extend([self._all.clock.monotonic_ns()] * amount)

    def undo(self, key: str, overflow: str, counted_ns: int) -> None:
        """Forget the latest call. `counted_ns` is the wall's and not used."""
        if key not in self.log:
            key = overflow
        entries = self.log.get(key)
        if entries:
            entries.pop()
            if not entries:
                self.clear(key)

    def clear(self, key: str) -> None:
        """Forget `key`."""
        if self.log.pop(key, None) is not None:
            self._all.held -= 1

    def forget(self) -> None:
        """Forget every key."""
        self._all.held -= len(self.log)
        self.log.clear()

    def expire(self, now_ns: int) -> int:
        """Drop a few of what has ended; when there is something to drop next."""
        horizon = self._all.clock.monotonic_ns() - self.window_ns
        for _ in range(_FREED_PER_CALL):
            if not self.log:
                return _NEVER
            key, entries = next(iter(self.log.items()))
            if entries and entries[-1] > horizon:
                return now_ns + entries[-1] - horizon
            self.clear(key)
        return now_ns


Windows: TypeAlias = FixedWindows | SlidingWindows | MovingWindows


class WindowCounts(LimitsStorage, MovingWindowSupport, SlidingWindowCounterSupport):
    """Every rate count of this process, by strategy and window length.

    Args:
        clock: Tells the time; the wall's for windows that line up with it, else the monotonic one.
        max_keys: How many subjects may be held; beyond it new ones share one count per limit.
    """

    STORAGE_SCHEME: list[str] | None = None

    def __init__(self, clock: Clock, max_keys: int = MAX_KEYS) -> None:
        super().__init__()
        self.clock = clock
        self.max_keys = max_keys
        self.held: int = 0
        """How many counts are held."""
        self.due_ns: int = _NEVER
        """The wall's time at which there is something to free."""
        self._fixed: dict[int, FixedWindows] = {}
        self._sliding: dict[int, SlidingWindows] = {}
        self._moving: dict[int, MovingWindows] = {}
        self._discarded: list[dict[str, int]] = []

    def windows(self, strategy: str, window_ns: int) -> Windows:
        """The counts of one strategy and window length."""
        if strategy == "fixed-window":
            return self.fixed(window_ns)
        if strategy == "moving-window":
            return self.moving(window_ns)
        return self.sliding(window_ns)

    def fixed(self, window_ns: int) -> FixedWindows:
        """The counts of fixed windows of this length."""
        if window_ns not in self._fixed:
            self._fixed[window_ns] = FixedWindows(self, window_ns)
        return self._fixed[window_ns]

    def sliding(self, window_ns: int) -> SlidingWindows:
        """The counts of sliding windows of this length."""
        if window_ns not in self._sliding:
            self._sliding[window_ns] = SlidingWindows(self, window_ns)
        return self._sliding[window_ns]

    def moving(self, window_ns: int) -> MovingWindows:
        """The logs of moving windows of this length."""
        if window_ns not in self._moving:
            self._moving[window_ns] = MovingWindows(self, window_ns)
        return self._moving[window_ns]

    def hold(self, until_ns: int) -> None:
        """One more count is held, until then at least."""
        self.held += 1
        if until_ns < self.due_ns:
            self.due_ns = until_ns

    def discard(self, counts: dict[str, int]) -> None:
        """Counts that have ended: no longer held, and freed a few with each call."""
        self.held -= len(counts)
        if len(counts) > _FREED_PER_CALL:
            self._discarded.append(counts)
            self.due_ns = 0

    def free(self, now_ns: int) -> None:
        """Free what has expired, a bounded part of it; called when `due_ns` has come."""
        self.due_ns = _NEVER
        due = min((windows.expire(now_ns) for windows in self._everything()), default=_NEVER)
        if self._discarded:
            last = self._discarded[-1]
            for _ in range(min(_FREED_PER_CALL, len(last))):
                last.popitem()
            if not last:
                self._discarded.pop()
        self.due_ns = 0 if self._discarded else due

    def _everything(self) -> list[Windows]:
        return [*self._fixed.values(), *self._sliding.values(), *self._moving.values()]

    # -- what the strategies of `limits` ask for; their times are seconds ----------------------

    @property
    def base_exceptions(self) -> type[Exception]:
        """Nothing here fails; the package wants a type."""
        return RuntimeError

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Count `amount` in the fixed window of `expiry` seconds; the count."""
        return self.fixed(expiry * _SECOND).hit(key, self.clock.wall_ns(), key, amount)

    def get(self, key: str) -> int:
        """The count of a fixed window."""
        now = self.clock.wall_ns()
        return next((w.counts[key] for w in self._fixed.values() if w.expire(now) and key in w.counts), 0)

    def get_expiry(self, key: str) -> float:
        """When the fixed window of `key` ends, in seconds since the epoch; now, if there is none."""
        now = self.clock.wall_ns()
        ends = (w.end_ns for w in self._fixed.values() if w.expire(now) and key in w.counts)
        return next(ends, now) / _SECOND

    def check(self) -> bool:
        """Memory is always there."""
        return True

    def reset(self) -> int:
        """Forget every count; how many there were."""
        held = self.held
        for windows in self._everything():
            windows.forget()
        return held

    def clear(self, key: str) -> None:
        """Forget `key`, whatever its window."""
        for windows in self._everything():
            windows.clear(key)

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Remember `amount` calls in the moving window, if they have room."""
        windows = self.moving(expiry * _SECOND)
        if len(windows.entries(key) or ()) + amount > limit:
            return False
        windows.hit(key, self.clock.wall_ns(), key, amount)
        return True

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        """When the oldest call in view was made, in seconds since the epoch, and how many are in view."""
        entries = self.moving(expiry * _SECOND).entries(key)
        now = self.clock.wall_ns()
        if not entries:
            return now / _SECOND, 0
        return (now - self.clock.monotonic_ns() + entries[0]) / _SECOND, len(entries)

    def acquire_sliding_window_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Count `amount` in the current window, if the estimate leaves room for them."""
        windows = self.sliding(expiry * _SECOND)
        now = self.clock.wall_ns()
        if amount > limit or windows.wait_ns(key, limit - amount + 1, now, key):
            return False
        windows.hit(key, now, key, amount)
        return True

    def get_sliding_window(self, key: str, expiry: int) -> tuple[int, float, int, float]:
        """Previous count and the seconds it stays in view, current count and the seconds it does."""
        windows = self.sliding(expiry * _SECOND)
        previous, current, left = windows.look(key, self.clock.wall_ns())
        return previous, left / _SECOND, current, (left + windows.window_ns) / _SECOND

    def clear_sliding_window(self, key: str, expiry: int) -> None:
        """Forget `key` in the sliding window of `expiry` seconds."""
        self.sliding(expiry * _SECOND).clear(key)


class MemoryStorage:
    """Rates and slots of one process: a decision is one synchronous step."""

    def __init__(self, clock: Clock, max_keys: int = MAX_KEYS) -> None:
        self.clock: Clock = clock
        self.counts: WindowCounts = WindowCounts(clock, max_keys)
        self.scheduler: Scheduler = Scheduler()
        # Straight to the scheduler, on the way of every call.
        self.release: Callable[[Claim], None] = self.scheduler.release

    def use_clock(self, clock: Clock) -> None:
        """Tell the time by `clock` from now on."""
        self.clock = self.counts.clock = clock

    def take(self, claim: Claim) -> Verdict | RateRefusal:
        """Look at every rate limit and place of the claim, and take all of them or nothing."""
        rates = claim.rates
        if not rates:
            return Verdict.TAKEN if self.scheduler.offer(claim) else Verdict.FULL
        now = self.clock.wall_ns()
        counts = self.counts
        if now >= counts.due_ns:
            counts.free(now)
        for rule, key in rates:
            if rule.windows.wait_ns(key, rule.most, now, rule.overflow):
                refusal = _longest(claim, now)
                assert refusal is not None
                return refusal
        if not self.scheduler.offer(claim):
            return Verdict.FULL
        claim.counted_ns = now
        for rule, key in rates:
            rule.windows.hit(key, now, rule.overflow)
        return Verdict.TAKEN

    def force(self, claim: Claim, *, count: bool) -> None:
        """Take the places whether there is room or not, and count the call only if asked to."""
        self.scheduler.force(claim)
        if count:
            claim.counted_ns = now = self.clock.wall_ns()
            for rule, key in claim.rates:
                rule.windows.hit(key, now, rule.overflow)
        else:
            claim.rates = ()

    def wait(self, claim: Claim) -> None:
        """A claim that was `FULL` joins the queue."""
        self.scheduler.wait(claim)

    def refuse(self, claim: Claim) -> None:
        """A claim that was `FULL` goes away."""
        self.scheduler.refuse(claim)

    def leave(self, claim: Claim) -> None:
        """A waiter gives up."""
        self.scheduler.leave(claim)

    def undo(self, claim: Claim) -> None:
        """The claim was taken but its work never began: it is released and not counted."""
        if claim.is_holding:
            for rule, key in claim.rates:
                rule.windows.undo(key, rule.overflow, claim.counted_ns)
            self.scheduler.release(claim)

    def turns(self) -> list[tuple[Claim, RateRefusal | None]]:
        """Let everybody start who can now, in order.

        Each waiter whose turn has come is listed once: with `None` it has started; with a refusal its rate
        limit has run out meanwhile, and its turn has passed on in the same step.
        """
        turns: list[tuple[Claim, RateRefusal | None]] = []
        while (ticket := self.scheduler.next()) is not None:
            assert isinstance(ticket, Claim)
            if ticket.is_gone:
                self.scheduler.release(ticket)
                continue
            refusal = self._count(ticket)
            if refusal is not None:
                self.scheduler.release(ticket)
            turns.append((ticket, refusal))
        return turns

    def _count(self, claim: Claim) -> RateRefusal | None:
        if not claim.rates:
            return None
        now = self.clock.wall_ns()
        refusal = _longest(claim, now)
        if refusal is None:
            claim.counted_ns = now
            for rule, key in claim.rates:
                rule.windows.hit(key, now, rule.overflow)
        return refusal


def _longest(claim: Claim, now_ns: int) -> RateRefusal | None:
    waits = [
        RateRefusal(rule, rule.windows.wait_ns(key, rule.most, now_ns, rule.overflow))
        for rule, key in claim.rates
    ]
    longest = max(waits, key=lambda each: each.wait_ns)
    return longest if longest.wait_ns else None
