"""FrontMCP's `throttle` object, as its JSON has it, in the names of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast
from urllib.parse import quote

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import check_count, check_flag, check_text, naming, not_allowed
from frontmcp_py.tables import as_table, check_names

SECTIONS: Final = ("throttle", "concurrency", "tools")

TRUSTS: Final = "trustProxy"

# FrontMCP's fields of `throttle` that have another name here, with the fields of what stands there.
_RATE_NAMES: Final = {"maxRequests": "max_requests", "windowMs": "window", "partitionBy": "partition_by"}
_SLOT_NAMES: Final = {
    "maxConcurrent": "max_concurrent",
    "queueTimeoutMs": "queue_timeout",
    "partitionBy": "partition_by",
}
_TIMEOUT_NAMES: Final = {"executeMs": "execute"}
_FILTER_NAMES: Final = {"allowList": "allow", "denyList": "deny", "defaultAction": "default"}
_FIELD_NAMES: Final = {
    "keyPrefix": "key_prefix",
    "global": "global_rate_limit",
    "globalConcurrency": "global_concurrency",
    "defaultRateLimit": "default_rate_limit",
    "defaultConcurrency": "default_concurrency",
    "defaultTimeout": "default_timeout",
    "ipFilter": "ip_filter",
}
_NESTED_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "global_rate_limit": _RATE_NAMES,
    "global_concurrency": _SLOT_NAMES,
    "default_rate_limit": _RATE_NAMES,
    "default_concurrency": _SLOT_NAMES,
    "default_timeout": _TIMEOUT_NAMES,
}


def translated(throttle: Mapping[Any, object]) -> dict[str, object]:
    """The fields of a `Throttle`, from a mapping that may have FrontMCP's names for them.

    What FrontMCP has and this package has not is an error, with what to give instead.

    Args:
        throttle: The mapping, which is not changed. Names that FrontMCP does not have stay as they are.

    Raises:
        ConfigurationError: A field has no counterpart here, or both names for one were given.
    """
    fields_given = _renamed(throttle, _FIELD_NAMES)
    is_theirs = any(name in _FIELD_NAMES for name in throttle)
    for name, names in _NESTED_NAMES.items():
        value = fields_given.get(name)
        if isinstance(value, Mapping):
            with naming(_their_name(name, throttle)):
                fields_given[name] = _renamed(cast("Mapping[str, object]", value), names)
    if isinstance(filtering := fields_given.get("ip_filter"), Mapping):
        with naming(_their_name("ip_filter", throttle)):
            fields_given["ip_filter"] = _filter(cast("Mapping[str, object]", filtering), fields_given)
    if is_theirs and isinstance(prefix := fields_given.get("key_prefix"), str):
        fields_given["key_prefix"] = prefix.rstrip(":")
    if isinstance(store := fields_given.get("storage"), Mapping):
        with naming("storage"):
            _store(cast("Mapping[str, object]", store), fields_given)
    return fields_given


def _their_name(name: str, given: Mapping[Any, object]) -> str:
    """A field as the mapping that was given calls it."""
    known = (theirs for theirs, ours in _FIELD_NAMES.items() if ours == name and theirs in given)
    return next(known, name)


def _renamed(given: Mapping[Any, object], names: Mapping[str, str]) -> dict[str, object]:
    fields_given: dict[str, object] = {}
    for name, value in given.items():
        ours = names.get(name, name)
        if ours != name and ours in given:
            raise ConfigurationError(f"{name!r} and {ours!r} are two names for one field; give one of them")
        if ours != name:
            value = _theirs(name, value)
        fields_given[ours] = value
    return fields_given


def _theirs(name: str, value: object) -> object:
    """A value as FrontMCP writes it: milliseconds, and `userId`."""
    if name.endswith("Ms"):
        # JSON has one kind of number, so 500.0 is whole there. Nothing here lasts 10¹⁵ milliseconds.
        number = None if isinstance(value, bool) or not isinstance(value, int | float) else value
        if number is None or not abs(number) < 10**15 or number % 1:
            raise not_allowed(name, value, "whole milliseconds")
        return number / 1000
    return "user_id" if (name, value) == ("partitionBy", "userId") else value


def _filter(given: Mapping[str, object], throttle: dict[str, object]) -> dict[str, object]:
    filtering = _renamed(given, _FILTER_NAMES)
    trusts = check_flag(filtering.pop(TRUSTS, False), TRUSTS)
    depth = filtering.pop("trustedProxyDepth", 1)
    check_count(depth, "trustedProxyDepth", 1, 1000)
    if trusts:
        throttle[TRUSTS] = True
    return filtering


# Fields of FrontMCP's storage that say where a Redis is, in whichever place they stand.
_REDIS_FIELDS: Final = ("url", "host", "port", "password", "db", "tls", "username")


def _store(given: Mapping[str, object], throttle: dict[str, object]) -> None:
    """FrontMCP's storage as a URI, a fallback and a prefix, put into the throttle's fields."""
    store = dict(given)
    kind = store.pop("type", None) or store.pop("provider", None) or ("redis" if "redis" in store else "auto")
    if "fallback" in store:
        throttle["fallback"] = store.pop("fallback")
    prefixes = [store.pop("prefix", "")]
    if kind == "memory":
        throttle["storage"] = None
        _memory(store.pop("memory", {}))
    elif kind == "redis":
        redis = _flat(store)
        prefixes.insert(0, redis.pop("keyPrefix", ""))
        throttle["storage"] = _redis_uri(redis)
    else:
        raise not_allowed("type", kind, "'memory' or 'redis', which this package has")
    if store:
        # What is left over belongs to no store, or to another one than is meant.
        raise ConfigurationError(f"there is no field {next(iter(store))!r} for {kind!r}")
    parts = [*prefixes, throttle.get("key_prefix", "")]
    if any(prefixes):
        throttle["key_prefix"] = ":".join(str(part).strip(":") for part in parts if part)


def _memory(options: object) -> None:
    table = as_table(options, "memory")
    if "maxEntries" in table:
        raise ConfigurationError(
            "memory.maxEntries drops live counts; give max_keys, beyond which new subjects share one"
        )
    with naming("memory"):
        # The sweeper has no counterpart: nothing is left behind here that would have to be swept.
        check_names(table, ("enableSweeper", "sweepIntervalSeconds"))


def _flat(store: dict[str, object]) -> dict[str, object]:
    """All that is said about a Redis, taken out of the places where it may stand."""
    redis: dict[str, object] = {name: store.pop(name) for name in _REDIS_FIELDS if name in store}
    nested = dict(as_table(store.pop("redis", {}), "redis"))
    redis.update(as_table(nested.pop("config", {}), "redis.config"))
    redis.update(nested)
    return redis


def _redis_uri(redis: Mapping[str, object]) -> str:
    check_names(redis, _REDIS_FIELDS)
    if "url" in redis:
        if len(redis) > 1:
            raise ConfigurationError("redis: the url says where it is; leave out host, port, db and so on")
        return check_text(redis["url"], "url")
    host = check_text(redis.get("host", "localhost"), "host")
    port = check_count(redis.get("port", 6379), "port", 1, 65_535)
    database = check_count(redis.get("db", 0), "db", 0, 10**6)
    scheme = "rediss" if check_flag(redis.get("tls", False), "tls") else "redis"
    user, password = (quote(str(redis.get(name) or ""), safe="") for name in ("username", "password"))
    login = f"{user}:{password}@" if user or password else ""
    return f"{scheme}://{login}{f'[{host}]' if ':' in host else host}:{port}/{database}"


def is_bare_throttle(document: Mapping[str, object]) -> bool:
    """Whether a document is such an object by itself, not one of the sections of a file."""
    names = {*_FIELD_NAMES, "enabled", "storage"}
    return not any(section in document for section in SECTIONS) and any(name in names for name in document)
