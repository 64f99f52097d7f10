"""Who calls what."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from frontmcp_py.call import Call, Caller


def test_nothing_is_known_of_a_caller_that_nobody_described() -> None:
    caller = Call("search").caller
    assert (caller.user_id, caller.client_id, caller.session_id, caller.client_ip) == (None, None, None, None)
    assert caller.transport == "in-process"


def test_calls_do_not_share_their_arguments() -> None:
    assert Call("search").arguments == {}
    assert Call("search").arguments is not Call("search").arguments


def test_a_caller_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Caller().user_id = "somebody else"  # type: ignore[misc]
