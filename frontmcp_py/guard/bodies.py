"""Does the body listen? Whether an async callable wants to be given the call's `AbortSignal`."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from types import FunctionType
from typing import Any

from .run import Run


def body_of(fn: Callable[..., Awaitable[Any]]) -> tuple[Callable[[Run], Awaitable[Any]], bool]:
    """`fn` as the body of a run, and whether it is given the signal.

    It is if it has a positional parameter without a default, or one that is called `signal`.
    """
    # Most have no parameter at all, and a signature costs more to look at than the whole call.
    if (isinstance(fn, FunctionType) and not fn.__code__.co_argcount) or not _takes_signal(fn):
        return (lambda _: fn()), False
    return (lambda run: fn(run.signal)), True


def _takes_signal(fn: Callable[..., Awaitable[Any]]) -> bool:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(
        each.kind in positional and (each.default is each.empty or each.name == "signal")
        for each in inspect.signature(fn).parameters.values()
    )
