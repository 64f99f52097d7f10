"""Who shares a count? From a call to the text of the subject it is counted under.

Texts are escaped, so that no two subjects collide whatever characters they hold, and long ones are digested.
Whoever is missing shares one count with all others who are: nobody gets a fresh count by leaving
something out.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from functools import lru_cache
from typing import Final
from urllib.parse import quote

from frontmcp_py.address import address_block, parse_address
from frontmcp_py.call import Call, Caller
from frontmcp_py.errors import PartitionError
from frontmcp_py.policy import LONGEST_SUBJECT, PartitionBy

logger: logging.Logger = logging.getLogger(__name__)

EVERYBODY: Final = ""
ANONYMOUS: Final = "anonymous"
UNRESOLVED: Final = "unresolved"


def escape(text: str) -> str:
    """`text` as one path segment of a key: without separators, and at most 128 characters long."""
    # Only what is short is remembered: a caller may choose the text, and its length.
    return _escape_short(text) if len(text) <= LONGEST_SUBJECT else _digest(text)


@lru_cache(maxsize=4096)
def _escape_short(text: str) -> str:
    escaped = quote(text, safe="", errors="surrogatepass")
    return escaped if len(escaped) <= LONGEST_SUBJECT else _digest(text)


def _digest(text: str) -> str:
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    # A colon never stands in escaped text, so a digest equals nobody's name.
    return f"sha256:{digest}"


def subject(partition_by: PartitionBy, call: Call) -> str:
    """The subject that `call` is counted under.

    Raises:
        PartitionError: A partition function failed or returned something other than text.
    """
    if partition_by == "global":
        return EVERYBODY
    if callable(partition_by):
        return _from_function(partition_by, call)
    caller = call.caller
    if partition_by == "ip":
        address = parse_address(caller.client_ip)
        return f"ip:{escape(address_block(address))}" if address is not None else _user(caller, UNRESOLVED)
    if partition_by == "session" and caller.session_id:
        return f"session:{escape(caller.session_id)}"
    return _user(caller, ANONYMOUS)


def _user(caller: Caller, otherwise: str) -> str:
    return f"user:{escape(caller.user_id)}" if caller.user_id else otherwise


def _from_function(partition_by: PartitionBy, call: Call) -> str:
    assert callable(partition_by)
    error = PartitionError(call.tool)
    try:
        text: object = partition_by(call)
    except (Exception, asyncio.CancelledError) as exc:
        # Nothing is awaited there, so a cancellation is the function's own, such as a cancelled future's.
        logger.exception("[%s] the partition function of tool %r failed", error.error_id, call.tool)
        raise error from exc
    if text is None:
        text = ""
    if not isinstance(text, str):
        logger.error(
            "[%s] the partition function of tool %r returned %s; it must return text",
            error.error_id,
            call.tool,
            type(text).__name__,
        )
        raise error
    return f"by:{escape(text)}"
