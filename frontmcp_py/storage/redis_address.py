"""Where is the Redis? From a storage URI to a client of redis-py.

The URIs are those of the `limits` package, so that one setting serves both:

* `redis://[[user]:password@]host[:port][/db]`, or `valkey://`
* `rediss://...` or `valkeys://...` over TLS
* `redis+unix://[[user]:password@]/path/to/socket[?db=0]`
* `redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/service[/db]`; user and password are those
  of the server, `?sentinel_username=` and `?sentinel_password=` those of the Sentinels
* `redis+cluster://[[user]:password@]host[:port][,host[:port]...]`

Sentinel and Cluster speak TLS, with all servers, when the scheme begins with `rediss+` or `valkeys+`.
Characters with a meaning in URIs are percent-encoded in users and passwords. These options may follow as a
query:

| option | meaning |
|---|---|
| `username`, `password` | the same as before the host |
| `db` | the database, by number; not for a cluster |
| `client_name` | what the server lists the connections under |
| `health_check_interval` | after so many idle seconds a connection is tried before it is used |
| `socket_keepalive` | `true` or `false`: whether the system probes idle connections |
| `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` | files: whom to trust, and who this client is |
| `ssl_cert_reqs` | `required` (default), `optional` or `none` |
| `ssl_check_hostname` | `true` (default) or `false`: whether the certificate has to name the host |
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import (
    BlockingConnectionPool,
    Connection,
    Redis,
    Sentinel,
    SSLConnection,
    UnixDomainSocketConnection,
)
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError
from redis.backoff import NoBackoff
from redis.crc import key_slot
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import RedisError, ResponseError

from frontmcp_py.errors import ConfigurationError

FORMS: Final = (
    "redis://host:port/db, rediss://, redis+unix:///path, redis+sentinel://host:port,host:port/service or "
    "redis+cluster://host:port,host:port"
)

Place: TypeAlias = tuple[str, int]
"""Host and port."""

_SCHEMES: Final = ("redis", "rediss", "valkey", "valkeys")
_KINDS: Final = ("", "unix", "sentinel", "cluster")
_SENTINEL_PORT: Final = 26379
_PORT: Final = 6379
_PORTS: Final = range(1, 65536)

_ELSEWHERE: Final = frozenset({"MOVED", "READONLY", "CLUSTERDOWN", "MASTERDOWN"})
"""Errors that say: this server does not take the question, but another one may."""


@dataclass(frozen=True)
class RedisAddress:
    """A parsed storage URI.

    Attributes:
        kind: `server`, `unix`, `sentinel` or `cluster`.
        shown: The address for logs, without user, password and options.
        hosts: Host and port of each server named; for `unix` the path.
        secure: Whether TLS is spoken.
        service: The name that Sentinel knows the server by.
        options: What else redis-py's connections are made with.
        sentinel: The same for connections to Sentinels.
    """

    kind: str
    shown: str
    hosts: tuple[Place, ...]
    secure: bool
    service: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)
    sentinel: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @classmethod
    def of(cls, uri: str) -> RedisAddress:
        """Parse a URI.

        Raises:
            ConfigurationError: It has none of the forms, or an option that is not known.
        """
        try:
            parts = urlsplit(uri)
        except ValueError:
            raise _malformed(uri.partition("://")[0] + "://...") from None
        scheme, _, kind = parts.scheme.partition("+")
        shown = _shown(parts)
        if scheme not in _SCHEMES or kind not in _KINDS or parts.fragment:
            raise _malformed(shown)
        kind, secure = kind or "server", scheme in ("rediss", "valkeys")
        try:
            hosts, service, db = _location(parts, kind)
        except ValueError:
            raise _malformed(shown) from None
        if kind == "unix" and secure:
            raise _malformed(shown)
        options = {**_login(parts), **db, **_options(parts, shown, _known(kind, secure))}
        if secure:
            options = {"ssl_check_hostname": options.get("ssl_cert_reqs") != "none", **options}
        ours = {name: value for name, value in options.items() if not name.startswith("sentinel_")}
        sentinel = {name[9:]: value for name, value in options.items() if name.startswith("sentinel_")}
        sentinel |= {name: value for name, value in options.items() if name.startswith("ssl_")}
        return cls(kind, shown, hosts, secure, service, ours, sentinel)

    def client(self, timeout: float, connections: int, tag: str, *, retries: int = 1) -> Any:
        """A client that answers soon or not at all. It has to be closed.

        Args:
            timeout: Seconds that making a connection may take.
            connections: How many there are at most; a question that finds none free waits.
            tag: What all keys begin with, a hash tag: which node of a cluster has them.
            retries: How often a lost connection is made anew, at once, and the question repeated, which every
                one of ours may be. How long it may take in all is for whoever asks: by cancelling.
        """
        return Redis.from_pool(
            BlockingConnectionPool(
                max_connections=connections,
                timeout=None,
                socket_connect_timeout=timeout,
                retry=Retry(NoBackoff(), retries, supported_errors=(ConnectionLost,)),
                retry_on_error=[ConnectionLost],  # redis-py 5 asks both
                **self._target(timeout, tag),
                **self.options,
            )
        )

    def listener(self, timeout: float, tag: str) -> Any:
        """A client for one subscription, which ends when its connection is lost. It has to be closed."""
        return self.client(timeout, 1, tag, retries=0)

    def _target(self, timeout: float, tag: str) -> dict[str, Any]:
        host, port = self.hosts[0]
        if self.kind == "unix":
            return {"connection_class": _Unix, "path": host}
        tls: dict[str, Any] = {"contexts": {}} if self.secure else {}
        if self.kind == "server":
            return {"connection_class": _SSL if self.secure else _TCP, "host": host, "port": port, **tls}
        # However many there are to ask, one that hangs leaves time for the others.
        share = timeout / (len(self.hosts) + 1)
        brief: dict[str, Any] = {
            "socket_connect_timeout": share,
            "socket_timeout": share,
            "retry": Retry(NoBackoff(), 0),
            "ssl": self.secure,
        }
        locate: Callable[[], Awaitable[Place]]
        if self.kind == "sentinel":
            locate = _BySentinel(self.hosts, self.service, {**brief, **self.sentinel})
        else:
            locate = _ByCluster(self.hosts, key_slot(tag.encode()), {**brief, **self.options})
        return {"connection_class": _LocatedSSL if self.secure else _Located, "locate": locate, **tls}


# -- connections -----------------------------------------------------------------------------------------


class _Writing:
    """Says in redis-py's words that a connection was lost while nobody used it.

    Whoever writes to it is told in others: from Python 3.12 on, asyncio misses an attribute of the transport,
    and uvloop says that its handler is closed.
    """

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        base: Any = super()  # typed in parts only, like the rest of what it is called for here
        try:
            await base.send_packed_command(*args, **options)
        except (AttributeError, RuntimeError) as error:
            raise ConnectionLost("the connection was lost") from error


class _TCP(_Writing, Connection):
    pass


class _SSL(_Writing, SSLConnection):
    """Shares one context with all connections of its client: making one takes long, and stops the loop."""

    def __init__(self, *, contexts: dict[str, Any], **options: Any) -> None:
        base: Any = super()
        base.__init__(**options)
        self.ssl_context = contexts.setdefault("shared", self.ssl_context)


class _Unix(_Writing, UnixDomainSocketConnection):
    pass


class _Located(_TCP):
    """A connection that asks where its server is each time it is made, and ends when that is another one."""

    def __init__(self, *, locate: Callable[[], Awaitable[Place]], **options: Any) -> None:
        base: Any = super()
        base.__init__(**options)
        self._locate = locate

    async def _connect(self) -> None:
        self.host, self.port = await self._locate()
        base: Any = super()
        await base._connect()

    async def read_response(self, *args: Any, **options: Any) -> Any:
        base: Any = super()
        try:
            return await base.read_response(*args, **options)
        except ResponseError as error:
            if not _is_elsewhere(error):
                raise
            await self.disconnect()
            raise ConnectionLost(f"{self.host}:{self.port} is not the server any more: {error}") from error


class _LocatedSSL(_Located, _SSL):
    pass


# -- servers that move -----------------------------------------------------------------------------------


def _is_elsewhere(error: ResponseError) -> bool:
    # Newer releases of redis-py take the code off the text and tell it by the class.
    told = type(error).__name__.removesuffix("Error").upper()
    return told in _ELSEWHERE or str(error).split(" ", 1)[0] in _ELSEWHERE


class _BySentinel:
    """Asks the Sentinels for the server of that name; who answers is asked first the next time."""

    def __init__(self, hosts: Iterable[Place], service: str, options: dict[str, Any]) -> None:
        sentinel: Any = Sentinel
        self._sentinel: Any = sentinel(list(hosts), sentinel_kwargs=options)
        self._service = service
        self._one = asyncio.Lock()

    async def __call__(self) -> Place:
        async with self._one:
            try:
                host, port = await self._sentinel.discover_master(self._service)
            except MasterNotFoundError as error:
                raise ConnectionLost(f"no Sentinel knows a server of the name {self._service!r}") from error
            finally:
                for each in self._sentinel.sentinels:
                    await each.aclose()
        return host, port


class _ByCluster:
    """Asks the nodes of a cluster which of them has that slot; the one that had it is asked first."""

    def __init__(self, hosts: Iterable[Place], slot: int, options: dict[str, Any]) -> None:
        self._hosts = list(hosts)
        self._slot = slot
        self._options = options
        self._latest: list[Place] = []
        self._one = asyncio.Lock()

    async def __call__(self) -> Place:
        async with self._one:
            why: Exception | None = None
            for place in dict.fromkeys([*self._latest, *self._hosts]):
                try:
                    found = await self._ask(place)
                except (RedisError, OSError) as error:
                    why = error
                    continue
                if found:
                    self._latest = found
                    return found[0]
            raise ConnectionLost(f"no node of the cluster tells who has slot {self._slot}") from why

    async def _ask(self, place: Place) -> list[Place]:
        """The primary and the replicas of the slot, as this node knows them."""
        host, port = place
        client: Any = Redis(host=host, port=port, **self._options)
        async with client as node:
            ranges: Any = await node.execute_command("CLUSTER", "SLOTS")
        for begin, end, *nodes in ranges:
            if begin <= self._slot <= end:
                # A node that does not know its own name leaves it out.
                return [((each[0] or b"").decode() or host, int(each[1])) for each in nodes]
        return []


# -- parsing ---------------------------------------------------------------------------------------------


def _location(parts: SplitResult, kind: str) -> tuple[tuple[Place, ...], str, dict[str, int]]:
    """The hosts, the service and the database. A `ValueError` means that there is no telling."""
    netloc = parts.netloc.rpartition("@")[2]
    if kind == "unix":
        if netloc or not parts.path.strip("/"):
            raise ValueError(parts.path)
        return ((unquote(parts.path), 0),), "", {}
    hosts = tuple(_host(each, _SENTINEL_PORT if kind == "sentinel" else _PORT) for each in netloc.split(","))
    names = [unquote(each) for each in parts.path.split("/")[1:] if each]
    service = ""
    if kind == "sentinel":
        service = names.pop(0) if names else ""
        if not service:
            raise ValueError(parts.path)
    elif kind == "server" and len(hosts) > 1:
        raise ValueError(netloc)
    if len(names) > (kind != "cluster"):
        raise ValueError(parts.path)
    return hosts, service, {"db": _number(names[0])} if names else {}


def _host(text: str, port: int) -> Place:
    parts = urlsplit(f"//{text}")
    if parts.port is not None:
        port = parts.port
    if not parts.hostname or port not in _PORTS:
        raise ValueError(text)
    return unquote(parts.hostname), port


def _login(parts: SplitResult) -> dict[str, str]:
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    given = {"username": unquote(user), "password": unquote(password)}
    return {name: value for name, value in given.items() if value}


def _number(text: str) -> int:
    if not text.isdecimal() or not text.isascii():
        raise ValueError(text)
    return int(text)


def _flag(text: str) -> bool:
    truth = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}.get(text.lower())
    if truth is None:
        raise ValueError(text)
    return truth


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise ValueError(text)
    return text


def _requirement(text: str) -> str:
    if text not in ("required", "optional", "none"):
        raise ValueError(text)
    return text


_Known: TypeAlias = dict[str, tuple[Callable[[str], Any], str]]

_ANY: Final[_Known] = {
    "username": (str, "text"),
    "password": (str, "text"),
    "client_name": (str, "text"),
    "health_check_interval": (_number, "whole seconds"),
}
_DB: Final[_Known] = {"db": (_number, "a number from 0")}
_SOCKET: Final[_Known] = {"socket_keepalive": (_flag, "true or false")}
_SENTINEL: Final[_Known] = {"sentinel_username": (str, "text"), "sentinel_password": (str, "text")}
_TLS: Final[_Known] = {
    "ssl_ca_certs": (_file, "an existing file"),
    "ssl_certfile": (_file, "an existing file"),
    "ssl_keyfile": (_file, "an existing file"),
    "ssl_cert_reqs": (_requirement, "required, optional or none"),
    "ssl_check_hostname": (_flag, "true or false"),
}


def _known(kind: str, secure: bool) -> _Known:
    return {
        **_ANY,
        **(_DB if kind != "cluster" else {}),
        **(_SOCKET if kind != "unix" else {}),
        **(_SENTINEL if kind == "sentinel" else {}),
        **(_TLS if secure else {}),
    }


def _options(parts: SplitResult, shown: str, known: _Known) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, text in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            hint = "; ssl_ options need rediss://" if name in _TLS else ""
            raise ConfigurationError(
                f"Throttle.storage: the option {name!r} of {shown} is not allowed; "
                f"give {', '.join(known)}{hint}"
            )
        read, allowed = known[name]
        try:
            options[name] = read(text)
        except ValueError:
            raise ConfigurationError(
                f"Throttle.storage: {name}={text!r} of {shown} is not allowed; give {allowed}"
            ) from None
    return options


def _shown(parts: SplitResult) -> str:
    """The address without anything that may be secret."""
    netloc = parts.netloc.rpartition("@")[2]
    if netloc == parts.netloc and "@" in f"{parts.path}{parts.query}{parts.fragment}":
        # A password that was not percent-encoded has torn the address apart.
        return f"{parts.scheme}://...@..."
    return f"{parts.scheme}://{netloc}{parts.path}"


def _malformed(shown: str) -> ConfigurationError:
    return ConfigurationError(
        f"Throttle.storage: {shown} is not allowed; give {FORMS} "
        "(in users and passwords, characters with a meaning in URIs are percent-encoded)"
    )
