"""Every form of a storage URI, and that a client of each does what the storage relies on."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as ConnectionLost

from frontmcp_py import ConfigurationError
from frontmcp_py.storage.redis_address import RedisAddress
from tests.fault_proxy import FaultProxy
from tests.servers import Port, Sentinel, Valkey, eventually

TAG = "{tests}"
SECRET = "p:a/s#s w@rd?"
ESCAPED = "p%3Aa%2Fs%23s%20w%40rd%3F"


@contextlib.asynccontextmanager
async def client_of(uri: str, *, timeout: float = 5, connections: int = 4) -> AsyncIterator[Any]:
    client = RedisAddress.of(uri).client(timeout, connections, TAG)
    try:
        yield client
    finally:
        await client.aclose()


# -- parsing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "kind", "hosts", "secure", "service", "options"),
    [
        ("redis://h", "server", [("h", 6379)], False, "", {}),
        ("valkey://h:7/3", "server", [("h", 7)], False, "", {"db": 3}),
        ("redis://h:7/", "server", [("h", 7)], False, "", {}),
        ("redis://[::1]:7/1", "server", [("::1", 7)], False, "", {"db": 1}),
        ("redis://[fe80::1%25lo]", "server", [("fe80::1%lo", 6379)], False, "", {}),
        ("redis://:p%40w@h", "server", [("h", 6379)], False, "", {"password": "p@w"}),
        ("redis://u%3A:p@h", "server", [("h", 6379)], False, "", {"username": "u:", "password": "p"}),
        ("redis://h?db=2&client_name=me", "server", [("h", 6379)], False, "", {"db": 2, "client_name": "me"}),
        ("redis://h?socket_keepalive=yes", "server", [("h", 6379)], False, "", {"socket_keepalive": True}),
        ("rediss://h", "server", [("h", 6379)], True, "", {"ssl_check_hostname": True}),
        (
            "valkeys://h?ssl_check_hostname=false",
            "server",
            [("h", 6379)],
            True,
            "",
            {"ssl_check_hostname": False},
        ),
        (
            "rediss://h?ssl_cert_reqs=none",
            "server",
            [("h", 6379)],
            True,
            "",
            {"ssl_check_hostname": False, "ssl_cert_reqs": "none"},
        ),
        ("redis+unix:///a/b%20c?db=2", "unix", [("/a/b c", 0)], False, "", {"db": 2}),
        ("redis+unix://:p@/a", "unix", [("/a", 0)], False, "", {"password": "p"}),
        ("redis+sentinel://a,b:7/main", "sentinel", [("a", 26379), ("b", 7)], False, "main", {}),
        (
            "rediss+sentinel://:p@a/m%2Fn/4",
            "sentinel",
            [("a", 26379)],
            True,
            "m/n",
            {"ssl_check_hostname": True, "password": "p", "db": 4},
        ),
        ("redis+cluster://a,[::2]:7", "cluster", [("a", 6379), ("::2", 7)], False, "", {}),
        ("valkeys+cluster://a/", "cluster", [("a", 6379)], True, "", {"ssl_check_hostname": True}),
    ],
)
def test_a_form_is_understood(
    uri: str, kind: str, hosts: list[tuple[str, int]], secure: bool, service: str, options: dict[str, object]
) -> None:
    address = RedisAddress.of(uri)
    assert (address.kind, list(address.hosts), address.secure) == (kind, hosts, secure)
    assert (address.service, address.options) == (service, options)


@pytest.mark.parametrize(
    "uri",
    [
        "redis://",
        "redis:///0",
        "redis://h:0",
        "redis://h:65536",
        "redis://h:x",
        "redis://h:-1",
        "redis://[::1",
        "redis://h/x",
        "redis://h/-1",
        "redis://h/0/1",
        "redis://h/0#part",
        "redis://a,b",
        "redis+unix://h/path",
        "redis+unix://",
        "rediss+unix:///path",
        "redis+sentinel://h",
        "redis+sentinel://h/",
        "redis+sentinel://h/s/x",
        "redis+sentinel://h/s/0/1",
        "redis+sentinel://,/s",
        "redis+cluster://h/0",
        "redis+other://h",
        "http://h",
    ],
)
def test_another_form_is_refused_with_the_forms_that_are_allowed(uri: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Throttle\.storage: .* is not allowed; give redis://host:port"
    ):
        RedisAddress.of(uri)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        (
            "redis://h?decode_responses=true",
            "the option 'decode_responses' of redis://h is not allowed; give user",
        ),
        ("redis://h?socket_timeout=3", "the option 'socket_timeout' of redis://h"),
        ("redis://h?ssl_ca_certs=/x", "ssl_ options need rediss://"),
        ("redis+cluster://h?db=0", "the option 'db' of"),
        ("redis+unix:///x?socket_keepalive=1", "the option 'socket_keepalive' of"),
        ("redis://h?sentinel_password=x", "the option 'sentinel_password' of"),
        ("redis://h?db=one", "db='one' of redis://h is not allowed; give a number from 0"),
        ("redis://h?health_check_interval=1.5", "give whole seconds"),
        ("redis://h?socket_keepalive=perhaps", "give true or false"),
        ("rediss://h?ssl_cert_reqs=some", "give required, optional or none"),
        (
            "rediss://h?ssl_ca_certs=/no/such/file",
            "'/no/such/file' of rediss://h is not allowed; give an existing",
        ),
    ],
)
def test_an_option_that_is_not_known_or_has_a_bad_value_is_named(uri: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisAddress.of(uri)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    [
        "redis://user:hidden@h:x",
        "redis://:hidden@[::1",
        "redis://:hid#hidden@h/0",
        "redis://:hid/hidden@h/0",
        "redis://:hid?hidden@h/0",
        "redis://:hidden@h/0#x",
        "redis+other://:hidden@h",
        "redis://h/x?password=hidden",
        "redis://:hidden@h?db=x",
        "redis://h?pasword=hidden",
    ],
)
def test_no_error_shows_a_password(uri: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        RedisAddress.of(uri)
    assert "hidden" not in str(caught.value)


def test_what_is_shown_has_no_password() -> None:
    address = RedisAddress.of("redis+sentinel://u:hidden@h/main?password=hidden&sentinel_password=hidden")
    assert address.shown == "redis+sentinel://h/main"
    assert "hidden" not in repr(address)
    assert address.sentinel == {"password": "hidden"}


# -- connecting ------------------------------------------------------------------------------------------


async def test_a_password_with_every_odd_character_and_a_database_reach_the_server() -> None:
    with Valkey("--databases", "4", password=SECRET) as server:
        for uri in (
            f"redis://:{ESCAPED}@{server.address}/3?client_name=me",
            f"redis://default:{ESCAPED}@{server.address}?db=3&client_name=me",
            f"redis://{server.address}/3?username=default&password={ESCAPED}&client_name=me",
        ):
            async with client_of(uri) as client:
                info = await client.client_info()
                assert (info["name"], int(info["db"]), info["user"]) == ("me", 3, "default")
        async with client_of(f"redis://:wrong@{server.address}") as client:
            with pytest.raises(AuthenticationError):
                await client.ping()


async def test_a_unix_socket(tmp_path: Path) -> None:
    # The path of a socket may have about a hundred characters, fewer than a folder for tests may take.
    path = Path(f"/proc/self/cwd/{tmp_path}") if len(str(tmp_path)) > 80 else tmp_path
    with Valkey("--unixsocket", str(path / "valkey")) as server:
        async with client_of(f"redis+unix://{path}/valkey?db=2") as client:
            assert int((await client.client_info())["db"]) == 2
        assert server.running


async def test_connections_over_tls_share_one_context(
    valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making one takes tens of milliseconds, in which the loop stands still."""
    make, made = ssl.create_default_context, list[ssl.SSLContext]()

    def counted(*args: Any, **options: Any) -> ssl.SSLContext:
        made.append(make(*args, **options))
        return made[-1]

    async with FaultProxy(valkey, tls=True) as proxy, client_of(proxy.url) as client:
        monkeypatch.setattr(ssl, "create_default_context", counted)
        assert await asyncio.gather(*[client.ping() for _ in range(4)]) == [True] * 4
        assert proxy.connections > 1
    assert len(made) == 1


async def test_tls_trusts_whom_it_is_told_to_and_nobody_else(valkey: Valkey) -> None:
    async with FaultProxy(valkey, tls=True) as proxy:
        async with client_of(proxy.url) as client:
            assert await client.ping()
        # The same host by a name that the certificate does not have.
        elsewhere = proxy.url.replace("127.0.0.1", "127.1")
        for refused in (f"rediss://127.0.0.1:{proxy.port}", f"redis://127.0.0.1:{proxy.port}", elsewhere):
            async with client_of(refused) as client:
                with pytest.raises(RedisError):
                    await client.ping()
        for uri in (
            f"rediss://127.1:{proxy.port}?ssl_cert_reqs=none",
            f"{elsewhere}&ssl_check_hostname=false",
        ):
            async with client_of(uri) as client:
                assert await client.ping()


async def test_a_sentinel_tells_where_the_server_is_even_if_another_is_gone(valkey: Valkey) -> None:
    gone = Port()
    with Sentinel(valkey) as sentinel:
        uri = f"redis+sentinel://127.0.0.1:{gone.number},{sentinel.address}/{sentinel.name}/1"
        async with client_of(uri) as client:
            assert int((await client.client_info())["db"]) == 1
        async with client_of(f"redis+sentinel://{sentinel.address}/other") as client:
            with pytest.raises(ConnectionLost, match="other"):
                await client.ping()
        await eventually(lambda: len(sentinel.do("CLIENT LIST")) == 1, "no connection to it is kept")
    gone.give_up()


@pytest.mark.slow
async def test_a_client_follows_the_server_that_sentinel_makes_the_primary() -> None:
    with (
        Valkey() as old,
        Valkey(replica_of=old) as new,
        Sentinel(old) as sentinel,
    ):
        await eventually(sentinel.knows_a_replica, "the Sentinel knows the replica", within=30)
        async with client_of(sentinel.url) as client:
            assert await client.ping()

            def begins() -> bool:
                with contextlib.suppress(RedisError):  # "no good slave": it has not heard of its state yet
                    sentinel.fail_over()
                return sentinel.primary_port == new.port

            await eventually(begins, "a failover begins", within=30)

            # With the roles a Sentinel changes, it also ends the connections of all clients.
            def is_the_primary(server: Valkey) -> bool | None:
                with contextlib.suppress(RedisError):
                    return bool(server.do("INFO", "replication")["role"] == "master")
                return None

            await eventually(lambda: is_the_primary(new), "the new one is the primary", within=30)
            await eventually(lambda: is_the_primary(old) is False, "the old one is told", within=30)

            async def is_written() -> bool:
                with contextlib.suppress(RedisError):
                    await client.set("y", 1)
                    return bool(new.do("GET", "y") == "1")
                return False

            await eventually(is_written, "what is written now reaches the new primary")
            assert new.do("GET", "y") == "1"


@pytest.mark.slow
async def test_a_cluster_is_entered_by_any_node_with_a_password() -> None:
    gone = Port()
    with Valkey(cluster=True, password=SECRET) as server:
        uri = f"redis+cluster://:{ESCAPED}@127.0.0.1:{gone.number},{server.address}"
        async with client_of(uri) as client:
            assert await client.set(f"{TAG}:x", 1)
        async with client_of(f"redis+cluster://:wrong@{server.address}") as client:
            with pytest.raises(ConnectionLost):
                await client.ping()
    gone.give_up()


async def test_a_server_that_is_no_cluster_is_no_answer_to_one(valkey: Valkey) -> None:
    async with client_of(f"redis+cluster://{valkey.address}") as client:
        with pytest.raises(ConnectionLost, match="no node of the cluster"):
            await client.ping()


@pytest.mark.slow
async def test_a_client_follows_the_slot_when_it_moves_to_another_node() -> None:
    bus = Port()
    options = (
        "--cluster-enabled",
        "yes",
        "--cluster-port",
        str(bus.number),
        "--cluster-announce-ip",
        "127.0.0.1",
    )
    with Valkey(cluster=True) as old, Valkey(*options) as new:
        new.do("CLUSTER MEET", "127.0.0.1", old.port, old._bus.number if old._bus else 0)
        new_id = new.do("CLUSTER MYID")
        await eventually(lambda: new_id in str(old.do("CLUSTER NODES")), "the nodes know each other")
        await eventually(
            lambda: str(new.do("CLUSTER INFO")["cluster_state"]) == "ok", "the new node is ready"
        )
        slot = old.do("CLUSTER KEYSLOT", f"{TAG}:x")
        async with client_of(old.url) as client:
            assert await client.ping()
            for node in (new, old):
                node.do("CLUSTER SETSLOT", slot, "NODE", new_id)
            assert await client.set(f"{TAG}:x", 1)
            assert new.do("GET", f"{TAG}:x") == "1"
    bus.give_up()


# -- what the storage relies on --------------------------------------------------------------------------


async def test_a_connection_that_was_lost_while_idle_is_made_anew_without_an_error(
    own_valkey: Valkey,
) -> None:
    async with client_of(own_valkey.url) as client:
        assert await client.ping()
        await asyncio.to_thread(own_valkey.restart)
        assert await client.ping()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_connection_that_was_reset_while_idle_is_made_anew_without_an_error(
    valkey: Valkey, loop: str
) -> None:
    async def main() -> None:
        async with FaultProxy(valkey) as proxy, client_of(proxy.url) as client:
            assert await client.ping()
            proxy.reset()
            for _ in range(20):
                # The loop finds it out, as it does in time while nobody asks.
                await asyncio.sleep(0)
            assert await client.ping()

    factory = pytest.importorskip("uvloop").new_event_loop if loop == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


async def test_a_question_whose_connection_is_lost_is_asked_once_more_and_not_again(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, client_of(proxy.url) as client:
        once = proxy.lose_reply("INCRBY")
        assert await client.incr("x") == 2
        assert (once.happened, proxy.count("INCRBY")) == (1, 2)
        always = proxy.lose_reply("INCRBY", times=None)
        with pytest.raises(ConnectionLost):
            await client.incr("x")
        assert (always.happened, proxy.count("INCRBY")) == (2, 4)


async def test_a_server_that_refuses_is_tried_twice_at_most(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, client_of(proxy.url) as client:
        assert await client.ping()
        cut = proxy.cut_before("CLIENT", times=None)
        proxy.reset()
        with pytest.raises(ConnectionLost):
            await client.ping()
        assert cut.happened <= 4
        proxy.heal()
        assert await client.ping()


async def test_a_cancelled_question_leaves_no_answer_to_the_next(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, client_of(proxy.url, connections=1) as client:
        await client.set("x", "old")
        proxy.hold("GET")
        question = asyncio.ensure_future(client.get("x"))
        await eventually(lambda: proxy.count("GET") == 1 and proxy.commands[-1].answered, "it is answered")
        question.cancel()
        with pytest.raises(asyncio.CancelledError):
            await question
        proxy.let_go()
        assert await client.echo("new") == b"new"
        assert await client.get("x") == b"old"


async def test_questions_cancelled_at_any_moment_take_no_connection_away(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, client_of(proxy.url, connections=2) as client:
        for turns in range(40):
            question = asyncio.ensure_future(client.echo(str(turns)))
            for _ in range(turns):
                await asyncio.sleep(0)
            if question.cancel():
                with contextlib.suppress(asyncio.CancelledError):
                    await question
        proxy.reset()
        answers = await asyncio.gather(*(client.echo(str(n)) for n in range(20)))
        assert answers == [str(n).encode() for n in range(20)]
        await eventually(lambda: proxy.connections <= 2, "no more connections than allowed")


async def test_questions_beyond_the_connections_wait_for_one(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, client_of(proxy.url, connections=3) as client:
        proxy.hold("ECHO")
        questions = [asyncio.ensure_future(client.echo(str(n))) for n in range(10)]
        await eventually(lambda: proxy.count("ECHO") == 3, "as many as there are connections are asked")
        proxy.let_go()
        assert await asyncio.gather(*questions) == [str(n).encode() for n in range(10)]
        assert proxy.connected == 3


async def test_a_listener_ends_when_its_connection_is_lost(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy:
        listener = RedisAddress.of(proxy.url).listener(5, TAG)
        async with listener.pubsub() as subscription:
            await subscription.subscribe("channel")
            assert (await anext(subscription.listen()))["type"] == "subscribe"
            proxy.reset()
            with pytest.raises(ConnectionLost):
                await anext(subscription.listen())
        await listener.aclose()
