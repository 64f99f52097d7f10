"""How is the server? One word for it, and whether it should be sent more calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from frontmcp_py.policy import Admission

Status: TypeAlias = Literal["draining", "overloaded", "stuck", "degraded", "unguarded", "busy", "ready"]
"""What holds for a server; of several the first one in this order.

`draining`: it is shutting down. `overloaded`: another call would be refused. `stuck`: half of its places are
taken by work whose callers were answered long ago. `degraded`: the store that instances share does not
answer. `unguarded`: the throttle is switched off. `busy`: calls
wait. `ready`: none of these.
"""


@dataclass(frozen=True, slots=True)
class Health:
    """What `/readyz` answers.

    Attributes:
        status: The state in one word.
        is_ready: Whether more calls should be sent here.
        active: Calls whose work has not ended.
        waiting: Calls in the queue.
        places: Places taken in admission.
        admission: The limits of the process, if there are any.
    """

    status: Status
    is_ready: bool
    active: int
    waiting: int
    places: int
    admission: Admission | None


def is_stuck(abandoned_places: int, admission: Admission | None) -> bool:
    """Whether half of admission's places are taken by work that nobody waits for any more."""
    return admission is not None and 2 * abandoned_places >= admission.max_active


def judge(
    *,
    active: int,
    waiting: int,
    places: int,
    abandoned_places: int,
    admission: Admission | None,
    has_normal_place: bool,
    is_draining: bool,
    is_enforced: bool,
    is_observed: bool,
    is_store_down: bool,
    is_store_needed: bool,
) -> Health:
    """The health of a server.

    Args:
        active: Calls whose work has not ended.
        waiting: Calls in the queue.
        places: Places taken in admission.
        abandoned_places: Of these, those that abandoned calls keep.
        admission: The limits of the process, if there are any.
        has_normal_place: Whether a place is free that is not reserved for control calls.
        is_draining: Whether it takes no calls any more.
        is_enforced: Whether the throttle is on.
        is_observed: Whether it only counts what would have been refused; then nobody ever is.
        is_store_down: Whether the store that instances share does not answer.
        is_store_needed: Whether calls are refused then.
    """
    refuses = False
    if admission is not None and not is_observed:
        full = waiting >= admission.max_queued
        refuses = full if admission.max_queued else not has_normal_place
    status: Status = "ready"
    if is_draining:
        status = "draining"
    elif refuses:
        status = "overloaded"
    elif is_stuck(abandoned_places, admission):
        status = "stuck"
    elif is_store_down:
        status = "degraded"
    elif not is_enforced:
        status = "unguarded"
    elif waiting:
        status = "busy"
    lacks_store = is_store_down and is_store_needed and not is_observed
    return Health(status, not (is_draining or refuses or lacks_store), active, waiting, places, admission)
