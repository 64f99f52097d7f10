"""Which store? From a storage URI to what speaks with it; each is imported only when it is asked for."""

from __future__ import annotations

from datetime import timedelta

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import Throttle
from frontmcp_py.storage import Storage

from .plan import Limits


def storage_from(throttle: Throttle) -> Storage | None:
    """The store that a throttle names; `None` for the memory of this process.

    Raises:
        ConfigurationError: The URI is not allowed, or what speaks with such a store is not installed.
    """
    uri = throttle.storage
    if uri is None:
        return None
    scheme = uri.partition("://")[0].removeprefix("async+").partition("+")[0]
    if scheme == "memory":
        return None
    if scheme in ("redis", "rediss", "valkey", "valkeys"):
        try:
            from frontmcp_py.storage.redis import RedisStorage
        except ImportError as error:
            raise ConfigurationError(
                "Throttle.storage: a Redis or Valkey needs the package redis; install frontmcp-py[redis]"
            ) from error
        return RedisStorage(
            uri, prefix=throttle.key_prefix, lease=throttle.lease, timeout=throttle.storage_timeout
        )
    from frontmcp_py.storage.limits_bridge import LimitsStorage

    return LimitsStorage(uri, prefix=throttle.key_prefix, timeout=throttle.storage_timeout)


def check_countable(storage: Storage, tool: str, limits: Limits) -> None:
    """See whether a store can count a tool's limits.

    Raises:
        ConfigurationError: It cannot.
    """
    for limit in (*limits.global_rates, *limits.rates):
        if allowed := storage.cannot_count(limit.strategy, limit.window_ms * 1000):
            raise ConfigurationError(
                f'tool "{tool}": rate_limit: {storage.where} cannot count a {limit.strategy} of '
                f"{timedelta(milliseconds=limit.window_ms)}; give {allowed}, or use a Redis or Valkey"
            )
