"""Where is the Redis? From a storage URI to a client of redis-py.

The URIs are those of the `limits` package, so that one setting serves both:

* `redis://[[user]:password@]host[:port][/db]`, or `valkey://`
* `rediss://...` or `valkeys://...` over TLS; `?ssl_ca_certs=/path/ca.pem` names an authority of one's own
* `redis+unix:///path/to/socket[?db=0]`
* `redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/service[/db]`
* `redis+cluster://[[user]:password@]host[:port][,host[:port]...]`

Sentinel and Cluster speak TLS when the scheme begins with `rediss+` or `valkeys+`. Options of redis-py's connections
may follow as a query, also for these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from redis.asyncio import BlockingConnectionPool, Redis, RedisCluster, Sentinel
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as ConnectionLost

from frontmcp_py.errors import ConfigurationError

FORMS: Final = (
    "redis://host:port/db, rediss://, redis+unix:///path, redis+sentinel://host:port,host:port/service or "
    "redis+cluster://host:port,host:port"
)

_SENTINEL_PORT: Final = 26379
_PORT: Final = 6379


@dataclass(frozen=True)
class RedisAddress:
    """A parsed storage URI.

    Attributes:
        kind: `server`, `unix`, `sentinel` or `cluster`.
        shown: The address for logs, without user and password.
        hosts: Host and port of each server named; for `unix` the path.
        secure: Whether TLS is spoken.
        service: The name that Sentinel knows the server by.
        options: What else redis-py's connections are made with.
    """

    kind: str
    shown: str
    hosts: tuple[tuple[str, int], ...]
    secure: bool
    service: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @classmethod
    def of(cls, uri: str) -> RedisAddress:
        """Parse a URI.

        Raises:
            ConfigurationError: It has none of the forms.
        """
        parts = urlsplit(uri)
        scheme, _, kind = parts.scheme.partition("+")
        if scheme not in ("redis", "rediss", "valkey", "valkeys") or kind not in _KINDS:
            raise _malformed(parts)
        secure = scheme in ("rediss", "valkeys")
        netloc = parts.netloc.rpartition("@")[2]
        shown = f"{parts.scheme}://{netloc}{parts.path}"
        options = _options(parts)
        try:
            if kind == "unix":
                if netloc or not parts.path:
                    raise _malformed(parts)
                return cls("unix", shown, ((parts.path, 0),), False, options=options)
            default = _SENTINEL_PORT if kind == "sentinel" else _PORT
            hosts = tuple(_host(each, default) for each in netloc.split(","))
            if kind == "cluster":
                if parts.path.strip("/"):
                    raise _malformed(parts)
                return cls("cluster", shown, hosts, secure, options=options)
            names = [unquote(each) for each in parts.path.split("/")[1:] if each]
            service = names.pop(0) if kind == "sentinel" and names else ""
            if len(names) > 1 or (kind == "sentinel") != bool(service) or (kind != "sentinel" and len(hosts) > 1):
                raise _malformed(parts)
            if names:
                options["db"] = int(names[0])
        except ValueError:
            raise _malformed(parts) from None
        return cls(kind or "server", shown, hosts, secure, service, options)

    def client(self, timeout: float, connections: int) -> Any:
        """A client that answers soon or not at all.

        A lost connection is made anew once, at once: every question of ours may be repeated. How long a
        question may take is for whoever asks.
        """
        pool: dict[str, Any] = {"max_connections": connections, "timeout": None}
        if self.kind == "cluster":
            nodes = [ClusterNode(host, port) for host, port in self.hosts]
            return RedisCluster(
                startup_nodes=nodes,
                ssl=self.secure,
                max_connections=connections,
                **self._connection(timeout),
            )
        if self.kind == "sentinel":
            sentinel = Sentinel(list(self.hosts), sentinel_kwargs=self._to_sentinel(timeout))
            return sentinel.master_for(self.service, ssl=self.secure, **self._connection(timeout))
        return Redis.from_pool(BlockingConnectionPool.from_url(self._url(), **pool, **self._connection(timeout)))

    def listener(self, client: Any, timeout: float) -> Any:
        """A client for a subscription, which keeps a connection of its own."""
        if self.kind == "cluster":
            # A message reaches the subscribers of every node.
            node = client.get_random_node() if client.get_nodes() else ClusterNode(*self.hosts[0])
            return Redis(host=node.host, port=node.port, ssl=self.secure, **self._connection(timeout))
        return self.client(timeout, 1)

    def _url(self) -> str:
        host, port = self.hosts[0]
        if self.kind == "unix":
            return f"unix://{host}"
        literal = f"[{host}]" if ":" in host else host
        return f"{'rediss' if self.secure else 'redis'}://{literal}:{port}"

    def _connection(self, timeout: float) -> dict[str, Any]:
        return {
            "socket_connect_timeout": timeout,
            "retry": Retry(NoBackoff(), 1, supported_errors=(ConnectionLost, ConnectionResetError)),
            **self.options,
        }

    def _to_sentinel(self, timeout: float) -> dict[str, Any]:
        tls = {name: value for name, value in self.options.items() if name.startswith("ssl_")}
        return {"socket_connect_timeout": timeout, "socket_timeout": timeout, "ssl": self.secure, **tls}


_KINDS: Final = ("", "unix", "sentinel", "cluster")


def _host(text: str, port: int) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError(text)
    return parts.hostname, parts.port if parts.port is not None else port


def _options(parts: SplitResult) -> dict[str, Any]:
    options: dict[str, Any] = {
        name: int(value) if value.isdigit() else value for name, value in parse_qsl(parts.query)
    }
    if "@" in parts.netloc:
        user, _, password = parts.netloc.rpartition("@")[0].partition(":")
        if user:
            options["username"] = unquote(user)
        if password:
            options["password"] = unquote(password)
    return options


def _malformed(parts: SplitResult) -> ConfigurationError:
    netloc = parts.netloc.rpartition("@")[2]
    return ConfigurationError(
        f"Throttle.storage: {parts.scheme}://{netloc}{parts.path} is not allowed; give {FORMS}"
    )
