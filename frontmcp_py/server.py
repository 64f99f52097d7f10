"""FrontMCP: apps, the guard and the SDK's server, composed into one object that serves."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, ParamSpec, TypeVar, Unpack, overload

import anyio
from mcp.client import Client
from mcp.server.auth.provider import TokenVerifier
from mcp.server.auth.settings import AuthSettings
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette

from frontmcp_py.app import App, as_tools, check_list
from frontmcp_py.config import ConfigOption, Settings
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.guard import Guard
from frontmcp_py.http.endpoints import METRICS_ACCESS, MetricsAccess, healthz, readyz
from frontmcp_py.http.endpoints import metrics as metrics_endpoint
from frontmcp_py.http.peer import TrustedProxies
from frontmcp_py.policy import (
    DEFAULT_MAX_RESULT_BYTES,
    DEFAULT_SHUTDOWN_GRACE,
    DEFAULT_WORKER_THREADS,
    MAX_RESULT_BYTES_RANGE,
    SHUTDOWN_GRACE_RANGE,
    WORKER_THREADS_RANGE,
    Duration,
    IPRule,
    Throttle,
    ThrottleOption,
    check_choice,
    check_count,
    check_flag,
    check_text,
    names_options,
    nearest,
    not_allowed,
    parse_duration,
)
from frontmcp_py.tool import Tool, ToolOptions, tool
from frontmcp_py.wire import GuardedServer

P = ParamSpec("P")
R = TypeVar("R")

Lifespan = Callable[[MCPServer[Any]], AbstractAsyncContextManager[Any]]

logger: logging.Logger = logging.getLogger("frontmcp_py.server")

# What FrontMCP itself says to `MCPServer`.
_OWN_OPTIONS = ("name", "version", "instructions", "lifespan", "auth", "token_verifier")


class FrontMCP:
    """An MCP server that survives its users.

    Args:
        name: What the server is called.
        version: Its version.
        instructions: What the model is told about it.
        apps: Whose tools, resources and prompts it serves.
        tools: Further tools; plain functions become tools without limits of their own.
        throttle: The server-wide limits: a `Throttle`, a mapping of its fields, or `False` for no limits at
            all. Without one, tools' own limits and admission's defaults hold. The mapping may be FrontMCP's
            `throttle` object.
        config: The operator's file, which changes limits without touching code: the path of a TOML or JSON
            file, or a mapping of what it holds. `FRONTMCP_CONFIG` names another one.
        production: Whether clients are kept from what a tool raises unforeseen; they always are where
            `FRONTMCP_ENV` says `production`.
        lifespan: As in the SDK: entered once for each stdio process, HTTP session manager or in-process
            client.
        auth: As in the SDK.
        token_verifier: As in the SDK.
        trusted_proxies: Addresses and networks of the proxies in front of the server, as in `IPFilter`: of
            these, `X-Forwarded-For` says who the client is. Nobody else is believed.
        describe_limits: Whether tools' descriptions tell the model of their limits.
        worker_threads: How many threads run `def` tools, 1 to 1000; control tools have a reserve beyond
            these.
        shutdown_grace: How long running work may take to end when the last connection closes or the process
            is told to stop, 0 to 600 seconds.
        max_result_bytes: The largest result, serialised: 1 KiB to 1 GiB.
        metrics: Who may read `GET /metrics`: `local`, this machine; `public`, everybody; `False`, nobody.
        mcp_options: Further options of `MCPServer`.

    Raises:
        ConfigurationError: A value is not allowed, two tools have one name, tools disagree about a shared
            slot, or the operator's file cannot be read.

    Attributes:
        mcp: The SDK's server. A tool registered there gets the globals, the defaults and admission.
        guard: The guard.
        shutdown_grace: Seconds that running work gets at the end.
    """

    @names_options
    def __init__(
        self,
        name: str,
        *,
        version: str = "",
        instructions: str | None = None,
        apps: Iterable[App] = (),
        tools: Iterable[Tool[..., Any] | Callable[..., Any]] = (),
        throttle: ThrottleOption = None,
        config: ConfigOption = None,
        production: bool = False,
        lifespan: Lifespan | None = None,
        auth: AuthSettings | None = None,
        token_verifier: TokenVerifier | None = None,
        trusted_proxies: Sequence[IPRule] = (),
        describe_limits: bool = True,
        worker_threads: int = DEFAULT_WORKER_THREADS,
        shutdown_grace: Duration = DEFAULT_SHUTDOWN_GRACE,
        max_result_bytes: int = DEFAULT_MAX_RESULT_BYTES,
        metrics: MetricsAccess = "local",
        mcp_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name: str = check_text(name, "FrontMCP.name")
        self.shutdown_grace: float = parse_duration(
            shutdown_grace,
            field="FrontMCP.shutdown_grace",
            low=SHUTDOWN_GRACE_RANGE[0],
            high=SHUTDOWN_GRACE_RANGE[1],
        )
        if lifespan is not None and not callable(lifespan):
            raise not_allowed("FrontMCP.lifespan", lifespan, "a function of the server, or None")
        self._lifespan = lifespan
        production = _production(production)
        settings = Settings.of(throttle, config, trusts_proxies=bool(trusted_proxies))
        self.guard: Guard = Guard(
            _warned(settings.throttle),
            worker_threads=check_count(worker_threads, "FrontMCP.worker_threads", *WORKER_THREADS_RANGE),
            shutdown_grace=self.shutdown_grace,
            production=production,
        )
        options = _mcp_options(mcp_options)
        try:
            self.mcp: GuardedServer = GuardedServer(
                self.guard,
                production=production,
                describe_limits=check_flag(describe_limits, "FrontMCP.describe_limits"),
                max_result_bytes=check_count(
                    max_result_bytes, "FrontMCP.max_result_bytes", *MAX_RESULT_BYTES_RANGE
                ),
                config=settings,
                trusted=TrustedProxies(trusted_proxies, "FrontMCP.trusted_proxies"),
                name=name,
                version=_text(version, "FrontMCP.version"),
                instructions=None if instructions is None else _text(instructions, "FrontMCP.instructions"),
                lifespan=self._alive,
                auth=auth,
                token_verifier=token_verifier,
                **options,
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, ConfigurationError):
                raise
            raise ConfigurationError(f"FrontMCP: {error}") from error
        self._closed: asyncio.Event | None = None
        self._add_probes(_metrics_access(metrics))
        apps = tuple(check_list(apps, "FrontMCP.apps", "App objects"))
        for app in apps:
            if not isinstance(app, App):
                raise not_allowed("FrontMCP.apps", app, "App objects")
            for declared in app.tools:
                self.mcp.register(declared, f'app "{app.name}"')
        for each in as_tools(tools, "FrontMCP.tools"):
            self.mcp.register(each, "the server itself")
        # Last, as it closes them: an app is not bound by a server that could not be built.
        for app in apps:
            app.serve(self.name, self.mcp)

    @overload
    def tool(self, fn: Callable[P, R], /) -> Tool[P, R]: ...

    @overload
    def tool(
        self, fn: None = None, /, **options: Unpack[ToolOptions]
    ) -> Callable[[Callable[P, R]], Tool[P, R]]: ...

    def tool(self, fn: Callable[..., Any] | None = None, /, **options: Any) -> Any:
        """`@tool`, served at once; the options are those of `tool`."""
        make = tool(**options)

        def register(function: Callable[..., Any]) -> Tool[..., Any]:
            made = make(function)
            self.mcp.register(made, "the server itself")
            return made

        return register if fn is None else register(fn)

    def connect(self, **client: Any) -> Client:
        """A client in this process, for `async with server.connect() as client`; the same guard applies.

        Args:
            client: Options of the SDK's `Client`.

        Raises:
            ConfigurationError: The operator's file names tools or keys that the server does not have.
        """
        self.mcp.check_config()
        return Client(self.mcp, **client)

    def http_app(self, **http: Any) -> Starlette:
        """An ASGI app that serves MCP at `/mcp`, and `/healthz`, `/readyz` and `/metrics`.

        Whoever runs it instead of `run` drains it with `guard.drain`, before the connections are closed.

        Args:
            http: Options of the SDK's `streamable_http_app`.

        Raises:
            ConfigurationError: The operator's file names tools or keys that the server does not have.
        """
        self.mcp.check_config()
        return self.mcp.streamable_http_app(**http)

    def run(
        self,
        transport: Literal["stdio", "http"] = "stdio",
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        **http: Any,
    ) -> None:
        """Serve until the process is told to stop.

        Args:
            transport: `stdio` for one client that started this process, `http` for many.
            host: The address to listen on.
            port: The port to listen on; 0 takes a free one.
            http: Further options of `http_app`.

        Raises:
            SystemExit: Over HTTP, the address cannot be listened on, or the store that instances share cannot
                be reached; the message says why.
            ConfigurationError: There is no such transport, it does not take an option, or the operator's
                file names tools or keys that the server does not have; or, on stdio, the store.
        """
        if transport == "stdio":
            if http or (host, port) != ("127.0.0.1", 8000):
                raise ConfigurationError(
                    'host, port and HTTP options are for run("http", ...), not for stdio'
                )
            self.mcp.check_config()
            self.mcp.local_transport = "stdio"
            try:
                anyio.run(self._serve_stdio)
            finally:
                self.mcp.local_transport = "in-process"
        elif transport == "http":
            from frontmcp_py.http.serve import serve

            check_text(host, "host")
            check_count(port, "port", 0, 65_535)
            app = self.http_app(host=host, **http)
            log_level = self.mcp.settings.log_level.lower()
            try:
                grace = self.shutdown_grace
                serve(app, guard=self.guard, host=host, port=port, grace=grace, log_level=log_level)
            except ConfigurationError as error:
                raise SystemExit(f"frontmcp_py: {error}") from None
        else:
            raise ConfigurationError(f"transport: {transport!r} is not allowed; give 'stdio' or 'http'")

    @contextlib.asynccontextmanager
    async def _alive(self, mcp: MCPServer[Any]) -> AsyncGenerator[Any, None]:
        """The SDK's lifespan: the author's, with the guard inside, so that running work ends before it."""
        cancelled: asyncio.CancelledError | None = None
        try:
            async with (self._lifespan or _no_lifespan)(mcp) as state:
                try:
                    async with self.guard:
                        yield state
                except asyncio.CancelledError as error:
                    # So the runner ends it on stdio; the author's clean-up is as after any other end.
                    if self._closed is None:
                        raise
                    cancelled = error
        finally:
            if self._closed is not None:
                self._closed.set()
        if cancelled is not None:
            raise cancelled

    async def _serve_stdio(self) -> None:
        from frontmcp_py.stdio import serve_stdio

        await self.guard.reach_store()
        self._closed = asyncio.Event()
        try:
            await serve_stdio(
                self.mcp.run_stdio_async, guard=self.guard, grace=self.shutdown_grace, closed=self._closed
            )
        finally:
            self._closed = None

    def _add_probes(self, access: Literal["local", "public"] | None) -> None:
        self.mcp.custom_route("/healthz", ["GET"])(healthz(self.name))
        self.mcp.custom_route("/readyz", ["GET"])(readyz(self.name, self.guard))
        if access is not None:
            public = access == "public"
            endpoint = metrics_endpoint(self.name, self.guard, self.mcp.arrivals, public=public)
            self.mcp.custom_route("/metrics", ["GET"])(endpoint)


@contextlib.asynccontextmanager
async def _no_lifespan(_: MCPServer[Any]) -> AsyncGenerator[dict[str, Any], None]:
    yield {}


def _warned(throttle: Throttle | None) -> Throttle | None:
    if throttle is not None and not throttle.enabled:
        logger.warning(
            "the throttle is off: rate limits, concurrency limits, admission and the default timeout "
            "are ignored"
        )
    return throttle


def _text(value: str, field: str) -> str:
    if not isinstance(value, str):
        raise not_allowed(field, value, "text")
    return value


def _production(value: bool) -> bool:
    # Checked, whatever the environment says. That may keep details from clients, never reveal them.
    given = check_flag(value, "FrontMCP.production")
    return given or os.environ.get("FRONTMCP_ENV", "").strip().lower() == "production"


def _metrics_access(value: MetricsAccess) -> Literal["local", "public"] | None:
    if isinstance(value, bool):
        return "local" if value else None
    return check_choice(value, "FrontMCP.metrics", METRICS_ACCESS, otherwise=", True or False")


def _mcp_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is not None and not isinstance(options, Mapping):
        raise not_allowed("FrontMCP.mcp_options", options, "a mapping of options of MCPServer")
    given = dict(options or {})
    valid = [name for name in inspect.signature(MCPServer).parameters if name not in _OWN_OPTIONS]
    for name in given:
        if name in _OWN_OPTIONS:
            raise ConfigurationError(
                f"FrontMCP.mcp_options: {name!r} is not allowed there; give it to FrontMCP"
            )
        if name not in valid:
            raise ConfigurationError(
                f"FrontMCP.mcp_options: MCPServer has no option {name!r}; {nearest(name, valid)}"
            )
    return given
