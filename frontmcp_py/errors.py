"""Every refusal: what it is called, what it says, and when to try again.

A refusal of the guard is a `GuardError`, with a `code` that programs can rely on and a message that a model
can act on. A mistake in a program or in its configuration is a `ConfigurationError`; no caller ever sees it.
"""

from __future__ import annotations

import secrets
from typing import Any, ClassVar, Final

# An overloaded server asks its callers back in about a second. The spread keeps those who were refused
# together from coming back together.
_RETRY_MS: Final = 1000
_RETRY_SPREAD_MS: Final = 200


class ConfigurationError(ValueError):
    """A limit, an option or a file is not as it has to be. Names the field, the value and what is allowed."""


class GuardError(Exception):
    """A call was refused or stopped, or its result was kept back.

    Errors can be pickled and copied with all they carry, and so can subclasses, whatever their constructors
    look like.

    Args:
        message: What the caller is told, in production as in development.
        tool: The tool that was called, if one was.
        retry_after: Seconds until another try makes sense, if that is known.
        limit: The number of the limit that refused.
        scope: Whose limit that was: `tool`, `key` (a shared slot), `global` or `admission`.
    """

    code: ClassVar[str] = "INTERNAL_ERROR"
    """What happened, for programs. A subclass that sets none answers with its parent's."""

    _error_id: str

    def __init__(
        self,
        message: str,
        *,
        tool: str | None = None,
        retry_after: float | None = None,
        limit: int | float | None = None,
        scope: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.tool = tool
        self.retry_after = retry_after
        self.limit = limit
        self.scope = scope

    @property
    def error_id(self) -> str:
        """`err_` and 16 hexadecimal digits, the same in the answer and in the log.

        Made when it is first asked for, as few refusals are logged; from then on it stays, in copies too.
        """
        if "_error_id" not in self.__dict__:
            # `setdefault` is one step: of two threads that ask at once, both get the id of the first.
            self.__dict__.setdefault("_error_id", f"err_{secrets.token_hex(8)}")
        return self._error_id

    def meta(self) -> dict[str, object]:
        """What stands in the `_meta` of the answer; what does not apply is left out."""
        fields: dict[str, object] = {
            "errorId": self.error_id,
            "code": self.code,
            "retryAfterMs": None if self.retry_after is None else round(self.retry_after * 1000),
            "limit": self.limit,
            "scope": self.scope,
        }
        return {name: value for name, value in fields.items() if value is not None}

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is unpickled by calling its class with `args`, which is the message alone here. So the
        # constructor is passed over, and the fields are put back as they are, the id included.
        return _restore, (type(self), self.args), {**self.__dict__, "_error_id": self.error_id}


def _restore(cls: type[GuardError], args: tuple[object, ...]) -> GuardError:
    return cls.__new__(cls, *args)


class RateLimitExceeded(GuardError):
    """A rate limit has no room.

    Args:
        tool: The tool that was called.
        retry_after_ms: Milliseconds until a lone retry is admitted.
        limit: How many calls the limit allows in a window.
        scope: `tool` or `global`.
    """

    code = "RATE_LIMIT_EXCEEDED"

    def __init__(self, tool: str, retry_after_ms: int, limit: int, scope: str = "tool") -> None:
        # Rounded up, so that who waits as told is admitted.
        seconds = max(1, -(-retry_after_ms // 1000))
        super().__init__(
            f"Rate limit exceeded. Retry after {seconds} seconds",
            tool=tool,
            retry_after=retry_after_ms / 1000,
            limit=limit,
            scope=scope,
        )


class ConcurrencyLimit(GuardError):
    """No slot is free, and the call may not wait or not with so many others.

    Args:
        tool: The tool that was called.
        limit: How many calls may run at once.
        scope: `tool`, `key` or `global`.
        waits_for_itself: The slot is held by a call that waits for this one.
    """

    code = "CONCURRENCY_LIMIT"

    def __init__(self, tool: str, limit: int, scope: str = "tool", waits_for_itself: bool = False) -> None:
        reason = ": it would wait for itself" if waits_for_itself else ""
        super().__init__(
            f'Concurrency limit reached for "{tool}" (max: {limit}){reason}',
            tool=tool,
            limit=limit,
            scope=scope,
        )
        self.waits_for_itself = waits_for_itself


class QueueTimeout(GuardError):
    """A call waited for a slot as long as it may.

    Args:
        tool: The tool that was called.
        waited_ms: How long it waited, in milliseconds.
        limit: How many calls may run at once.
        scope: `tool`, `key` or `global`.
    """

    code = "QUEUE_TIMEOUT"

    def __init__(self, tool: str, waited_ms: float, limit: int, scope: str = "tool") -> None:
        self.waited_ms: int | float = _plain(waited_ms)
        super().__init__(
            f'Queue timeout for "{tool}" after waiting {self.waited_ms}ms for a concurrency slot',
            tool=tool,
            limit=limit,
            scope=scope,
        )


class ExecutionTimeout(GuardError):
    """A call took longer than it may. This ends the call, not the work.

    Args:
        tool: The tool that was called.
        timeout_ms: How long a call may take, in milliseconds.
    """

    code = "EXECUTION_TIMEOUT"

    def __init__(self, tool: str, timeout_ms: float) -> None:
        self.timeout_ms: int | float = _plain(timeout_ms)
        super().__init__(
            f'Execution of "{tool}" timed out after {self.timeout_ms}ms',
            tool=tool,
            limit=self.timeout_ms,
            scope="tool",
        )


class Overloaded(GuardError):
    """The server has no room for the call, or is shutting down.

    Args:
        running: How many calls hold a place.
        waiting: How many calls wait for one.
        waited_ms: How long this call waited for a place, in milliseconds; `None`: it was refused on arrival.
        shutting_down: The server takes no calls any more.
        retry_after: Seconds until another try makes sense; by default about one, never quite the same.
        tool: The tool that was called.
        limit: How many places there are.
    """

    code = "OVERLOADED"

    def __init__(
        self,
        running: int = 0,
        waiting: int = 0,
        waited_ms: float | None = None,
        shutting_down: bool = False,
        retry_after: float | None = None,
        *,
        tool: str | None = None,
        limit: int | None = None,
    ) -> None:
        self.running = running
        self.waiting = waiting
        self.waited_ms: int | float | None = None if waited_ms is None else _plain(waited_ms)
        self.shutting_down = shutting_down
        if shutting_down:
            reason = "shutting down"
        elif waited_ms is None:
            reason = f"{running} calls running, {waiting} waiting"
        else:
            reason = f"waited {self.waited_ms}ms for a place ({running} calls running, {waiting} waiting)"
        super().__init__(
            f"Server overloaded: {reason}. Try again shortly.",
            tool=tool,
            retry_after=_about_a_second() if retry_after is None else retry_after,
            limit=limit,
            scope="admission",
        )


class Cancelled(GuardError):
    """The client cancelled the call or went away.

    Args:
        tool: The tool that was called, if it is known.
    """

    code = "CANCELLED"

    def __init__(self, tool: str | None = None) -> None:
        super().__init__(f"{_call_to(tool)} was cancelled", tool=tool)


class GuardStorageUnavailable(GuardError):
    """The store that holds the limits cannot be reached and nothing may stand in for it.

    The message does not say where the store is: that is for the log alone.
    """

    code = "GUARD_STORAGE_UNAVAILABLE"

    def __init__(self, tool: str | None = None) -> None:
        super().__init__(
            "Service temporarily unavailable: the rate-limit store cannot be reached. Retry shortly.",
            tool=tool,
        )


class _AddressRefused(GuardError):
    """What the two answers of the IP filter have in common."""

    def __init__(self, address: str | None, verdict: str) -> None:
        super().__init__(f'IP address "{address or "unknown"}" {verdict}')
        self.address = address


class IpBlocked(_AddressRefused):
    """The IP filter denies this address.

    Args:
        address: The client's address as text, or `None` if it has none.
    """

    code = "IP_BLOCKED"

    def __init__(self, address: str | None) -> None:
        super().__init__(address, "is blocked")


class IpNotAllowed(_AddressRefused):
    """The IP filter allows other addresses than this one.

    Args:
        address: The client's address as text, or `None` if it has none.
    """

    code = "IP_NOT_ALLOWED"

    def __init__(self, address: str | None) -> None:
        super().__init__(address, "is not allowed")


class OutputLimit(GuardError):
    """What came out of a call is larger than it may be.

    Args:
        tool: The tool that was called, if one was.
        max_bytes: How many bytes are allowed.
        process: It was the output of a child process, which was ended, not the tool's result.
    """

    code = "OUTPUT_LIMIT"

    def __init__(self, tool: str | None, max_bytes: int, *, process: bool = False) -> None:
        whose = "" if tool is None else f' of "{tool}"'
        if process:
            message = f"Process output{whose} is larger than {max_bytes} bytes; the process was ended."
        else:
            # Who reads this must not run it again just because there is nothing to read.
            message = f"Result{whose} is larger than {max_bytes} bytes; the tool has run."
        super().__init__(message, tool=tool, limit=max_bytes)
        self.max_bytes = max_bytes


class PartitionError(GuardError):
    """The function that says who shares a count failed or returned something other than text.

    Args:
        tool: The tool that was called, if it is known.
    """

    code = "PARTITION_ERROR"

    def __init__(self, tool: str | None = None) -> None:
        super().__init__(
            f"{_call_to(tool)} was refused: whose limit it counts against could not be told.", tool=tool
        )


class LeaseLost(GuardError):
    """The call held a shared slot whose lease ran out, so another call may run by now.

    Args:
        tool: The tool that was called, if it is known.
    """

    code = "LEASE_LOST"

    def __init__(self, tool: str | None = None) -> None:
        super().__init__(f"{_call_to(tool)} lost its slot to other callers while it was running.", tool=tool)


class InternalError(GuardError):
    """Something went wrong inside; the log has the details under the same id.

    Args:
        tool: The tool that was called, if it is known.
    """

    code = "INTERNAL_ERROR"

    def __init__(self, tool: str | None = None) -> None:
        super().__init__(f"{_call_to(tool)} failed because of an internal error.", tool=tool)


CODES: Final[tuple[str, ...]] = tuple(
    error.code
    for error in (
        RateLimitExceeded,
        ConcurrencyLimit,
        QueueTimeout,
        ExecutionTimeout,
        Overloaded,
        Cancelled,
        GuardStorageUnavailable,
        IpBlocked,
        IpNotAllowed,
        OutputLimit,
        PartitionError,
        LeaseLost,
        InternalError,
    )
)
"""Every code that a caller may be answered with."""


def _call_to(tool: str | None) -> str:
    return "Call" if tool is None else f'Call to "{tool}"'


def _plain(milliseconds: float) -> int | float:
    """Milliseconds as people write them: whole ones without a point, others with at most three decimals."""
    rounded = round(milliseconds, 3)
    return int(rounded) if rounded == int(rounded) else rounded


def _about_a_second() -> float:
    jitter = secrets.randbelow(2 * _RETRY_SPREAD_MS + 1) - _RETRY_SPREAD_MS
    return (_RETRY_MS + jitter) / 1000
