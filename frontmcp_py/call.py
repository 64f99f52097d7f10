"""Who calls what: all that a partition function, an event or a log line needs to know of a call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose call it is, as far as the server itself could verify. What is not known is `None`."""

    user_id: str | None = None
    """The verified principal of the access token: issuer and subject, else client id, as one escaped text."""

    client_id: str | None = None
    """The OAuth client that the access token was issued to."""

    session_id: str | None = None
    """The session, if the server itself handed out or checked its id; never a header taken on trust."""

    client_ip: str | None = None
    """The client's address: the socket's peer."""

    transport: str = "in-process"
    """How the call came in, such as `stdio`, `streamable-http` or `in-process`."""


# One is made for every call, and a frozen one takes a microsecond longer to make.
@dataclass(slots=True)
class Call:
    """One call of a tool. Nobody changes it after it was made."""

    tool: str
    """The name of the tool."""

    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The arguments as they were sent: not validated, and chosen by the caller."""

    caller: Caller = Caller()
    """Whose call it is."""
