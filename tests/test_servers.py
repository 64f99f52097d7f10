"""The servers that tests run, and the proxy that breaks their connections, do what they promise."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio

from tests import servers
from tests.fault_proxy import Command, FaultProxy, Incomplete, parse
from tests.servers import HOST, Memcached, Sentinel, Valkey, eventually

own_valkey = servers.own_valkey
memcached = servers.memcached
valkey = servers.valkey

# A client that writes to a stream that was lost meanwhile meets an AttributeError in some releases of Python.
LOST = (redis.ConnectionError, AttributeError)
NO_RETRY = redis.asyncio.retry.Retry(redis.backoff.NoBackoff(), 0)


@contextlib.asynccontextmanager
async def client(url: str, **options: Any) -> AsyncIterator[Any]:
    """A client that does not try again."""
    async with redis.asyncio.Redis.from_url(url, retry=NO_RETRY, **options) as made:
        yield made


# ------------------------------------------------------------------------------------------------ servers


async def test_the_shared_valkey_is_empty(valkey: Valkey) -> None:
    async with client(valkey.url) as first:
        assert await first.dbsize() == 0
        await first.set("left", "behind")
        sha = await first.script_load("return 1")
        valkey.empty()
        assert await first.dbsize() == 0
        assert await first.script_exists(sha) == [False]


async def test_a_server_restarts_on_its_port_without_its_data(own_valkey: Valkey) -> None:
    port, pid = own_valkey.port, own_valkey.pid
    async with client(own_valkey.url) as asking:
        await asking.set("a", 1)
        own_valkey.kill()
        assert not own_valkey.running
        with pytest.raises(redis.ConnectionError):
            await asking.get("a")
        own_valkey.restart()
        assert own_valkey.port == port
        assert own_valkey.pid != pid
        assert await asking.get("a") is None


def test_nobody_gets_the_port_of_a_server_that_is_down(own_valkey: Valkey) -> None:
    own_valkey.stop()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind((HOST, own_valkey.port))
    with pytest.raises(ConnectionRefusedError), socket.create_connection((HOST, own_valkey.port), 5):
        pass
    own_valkey.start()


async def test_a_frozen_server_does_nothing_until_it_is_thawed(own_valkey: Valkey) -> None:
    async with client(own_valkey.url) as asking:
        await asking.ping()
        own_valkey.freeze()
        answer = asyncio.create_task(asking.incr("a"))
        assert own_valkey.running
        done, _ = await asyncio.wait([answer], timeout=0.05)
        assert not done
        own_valkey.thaw()
        assert await answer == 1


def test_a_frozen_server_ends_too() -> None:
    with Valkey() as server:
        folder = server._folder
        server.freeze()
        server.stop()
        assert "ready to exit" in server.log
        assert not server.running
        server.start()
        server.freeze()
    assert not server.running
    assert not folder.exists()


async def test_options_and_passwords_reach_the_server() -> None:
    with Valkey("--maxmemory", "3mb", password="open sesame") as server:
        assert server.do("CONFIG GET", "maxmemory")["maxmemory"] == str(3 << 20)
        async with server.client() as asking:
            assert await asking.set("a", 1)
        with pytest.raises(redis.AuthenticationError):
            async with client(f"redis://{server.address}/0") as stranger:
                await stranger.ping()


def test_a_server_that_cannot_start_says_why() -> None:
    server = Valkey("--no-such-option", "1")
    with pytest.raises(RuntimeError, match="no-such-option"):
        server.start()
    server.close()


async def test_waiting_for_what_never_comes_ends() -> None:
    with pytest.raises(AssertionError, match="the sun"):
        await eventually(lambda: False, "the sun", within=0.02)


def test_servers_end_with_the_process_that_started_them() -> None:
    program = (
        "from tests.servers import *; server = Valkey().start(); print(server.port); server.freeze(); 1/0"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert "ZeroDivisionError" in done.stderr
    with pytest.raises(ConnectionRefusedError), socket.create_connection((HOST, int(done.stdout)), 5):
        pass


def test_memcached_is_empty_and_restarts(memcached: Memcached) -> None:
    assert memcached.do("set a 0 0 1\r\nx") == "STORED"
    memcached.empty()
    assert memcached.do("get a") == "END"
    with Memcached() as own:
        own.do("set a 0 0 1\r\nx")
        own.restart()
        assert own.do("get a") == "END"


@pytest.mark.slow
async def test_a_cluster_of_one_node_serves_every_slot() -> None:
    with Valkey(cluster=True, password="pw") as server:
        assert server.url.startswith("redis+cluster://:pw@")
        async with server.cluster_client() as asking:
            for key in map(str, range(50)):
                await asking.set(key, key)
            assert await asking.get("7") == b"7"
        async with FaultProxy(server) as proxy:
            server.announce(proxy.port)
            asking = redis.asyncio.RedisCluster(host=HOST, port=proxy.port, password="pw")
            async with asking:
                assert await asking.get("7") == b"7"
            assert proxy.count("GET") == 1


@pytest.mark.slow
async def test_a_sentinel_makes_the_replica_the_primary() -> None:
    with Valkey() as primary, Valkey(replica_of=primary) as replica, Sentinel(primary) as sentinel:
        assert sentinel.primary_port == primary.port
        await eventually(sentinel.knows_a_replica)
        primary.kill()
        await eventually(lambda: sentinel.primary_port == replica.port)
        async with replica.client() as asking:
            await eventually(lambda: replica.do("ROLE")[0] == "master")
            assert await asking.set("a", 1)


# -------------------------------------------------------------------------------------------------- proxy


@pytest.mark.parametrize("protocol", [2, 3])
async def test_commands_and_round_trips_are_counted(valkey: Valkey, protocol: int) -> None:
    async with FaultProxy(valkey) as proxy, client(proxy.url, protocol=protocol) as asking:
        await asking.set("a", "x" * 300_000)
        assert len(await asking.get("a")) == 300_000
        pipeline = asking.pipeline(transaction=True)
        for _ in range(500):
            pipeline.hset("h", mapping={"k": "v" * 100})
        pipeline.hgetall("h")
        assert (await pipeline.execute())[-1] == {b"k": b"v" * 100}
        await asyncio.gather(*(asking.get("a") for _ in range(10)))
        assert proxy.count("HSET") == 500
        assert proxy.names()["GET"] == 11
        assert proxy.trips("HSET") == proxy.trips("exec") == 1
        assert proxy.trips("GET") == 11
        assert proxy.trips() == 13
        assert proxy.count("CLIENT") > 0
        assert all(command.answered for command in proxy.commands)
        assert [command.reply for command in proxy.commands if command.name == "SET"] == [b"OK"]
        assert proxy.connected == proxy.connections == 10
        proxy.forget()
        assert proxy.count() == proxy.trips() == 0


@pytest.mark.parametrize(("how", "counted"), [("cut_before", 2), ("lose_reply", 3), ("cut_after", 3)])
async def test_a_connection_is_cut_at_the_command_that_was_named(
    valkey: Valkey, how: str, counted: int
) -> None:
    async with FaultProxy(valkey) as proxy, client(proxy.url) as asking:
        fault = getattr(proxy, how)("INCRBY", nth=3)
        assert await asking.incr("a") == 1
        await asking.get("a")
        assert await asking.incr("a") == 2
        if how == "cut_after":
            assert await asking.incr("a") == 3
            await eventually(lambda: proxy.connections == 0)
            with pytest.raises(LOST):
                await asking.incr("a")
        else:
            with pytest.raises(redis.ConnectionError):
                await asking.incr("a")
        assert valkey.do("GET", "a") == str(counted)
        assert fault.happened == 1
        assert await asking.incr("a") == counted + 1


async def test_a_cut_in_the_middle_of_a_pipeline_leaves_what_stands_before_it(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, client(proxy.url) as asking:
        proxy.cut_before(lambda command: command.words[1] == b"c")
        pipeline = asking.pipeline(transaction=False)
        for key in "abcd":
            pipeline.incr(key)
        with pytest.raises(redis.ConnectionError):
            await pipeline.execute()
        assert sorted(valkey.do("KEYS", "*")) == ["a", "b"]


def test_what_was_sent_before_a_cut_is_answered(valkey: Valkey) -> None:
    with FaultProxy(valkey) as proxy:
        proxy.cut_before("PING", nth=3)
        with socket.create_connection((HOST, proxy.port), 20) as raw, raw.makefile("rb") as answers:
            raw.sendall(b"*1\r\n$4\r\nPING\r\n" * 4)
            assert [answers.readline() for _ in range(2)] == [b"+PONG\r\n"] * 2
            with pytest.raises(ConnectionResetError):
                answers.readline()


def test_commands_that_arrive_in_pieces_are_one_round_trip(valkey: Valkey) -> None:
    ping = b"*1\r\n$4\r\nPING\r\n"
    with (
        FaultProxy(valkey) as proxy,
        socket.create_connection((HOST, proxy.port), 20) as raw,
        raw.makefile("rb") as answers,
    ):
        raw.sendall(ping + ping[:9])
        assert answers.readline() == b"+PONG\r\n"
        raw.sendall(ping[9:])
        assert answers.readline() == b"+PONG\r\n"
        assert (proxy.count("PING"), proxy.trips("PING")) == (2, 1)
        raw.sendall(ping)
        assert answers.readline() == b"+PONG\r\n"
        assert (proxy.count("PING"), proxy.trips("PING")) == (3, 2)


async def test_faults_repeat_as_often_as_told(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, client(proxy.url) as asking:
        twice = proxy.lose_reply("INCRBY", nth=2, times=2)
        outcomes = [await asyncio.gather(asking.incr("a"), return_exceptions=True) for _ in range(5)]
        assert [isinstance(outcome[0], int) for outcome in outcomes] == [True, False, False, True, True]
        assert twice.happened == 2
        always = proxy.cut_before("INCRBY", times=None)
        for _ in range(3):
            with pytest.raises(redis.ConnectionError):
                await asking.incr("a")
        assert always.happened == 3
        proxy.heal()
        assert await asking.incr("a") == 6


async def test_replies_are_delayed_each_by_as_much(valkey: Valkey) -> None:
    loop = asyncio.get_running_loop()
    async with FaultProxy(valkey) as proxy, client(proxy.url) as asking:
        await asking.ping()
        proxy.delay(0.05, "INCRBY")
        await asking.ping()
        began = loop.time()
        pipeline = asking.pipeline(transaction=False)
        for _ in range(5):
            pipeline.incr("a")
        assert await pipeline.execute() == [1, 2, 3, 4, 5]
        assert loop.time() - began >= 0.05
        proxy.heal()
        assert await asking.incr("a") == 6


async def test_replies_are_held_until_they_may_go(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, client(proxy.url) as asking:
        proxy.hold("INCRBY")
        held = [asyncio.create_task(asking.incr("a")) for _ in range(3)]
        await eventually(lambda: valkey.do("GET", "a") == "3")
        assert await asking.get("a") == b"3"
        assert not any(task.done() for task in held)
        proxy.let_go()
        assert sorted(await asyncio.gather(*held)) == [1, 2, 3]


async def test_connections_are_reset_and_refused(valkey: Valkey) -> None:
    async with FaultProxy(valkey) as proxy, client(proxy.url) as asking:
        await asking.ping()
        proxy.reset()
        await eventually(lambda: proxy.connections == 0)
        with pytest.raises(LOST):
            await asking.ping()
        waiting = asyncio.create_task(asking.blpop(["nothing"]))
        await eventually(lambda: proxy.count("BLPOP") == 1)
        proxy.refuse()
        with pytest.raises(redis.ConnectionError):
            await waiting
        for _ in range(2):
            with pytest.raises(LOST):
                await asking.ping()
        assert proxy.connections == 0
        proxy.accept()
        assert await asking.ping()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_messages_are_dropped(valkey: Valkey, protocol: int) -> None:
    async with (
        FaultProxy(valkey) as proxy,
        client(proxy.url, protocol=protocol) as asking,
        asking.pubsub(ignore_subscribe_messages=True) as listening,
    ):
        await listening.subscribe("a", "b")
        await listening.psubscribe("c*")
        await eventually(lambda: proxy.answered("PSUBSCRIBE") == 1)
        proxy.drop_messages(lambda channel, payload: payload == b"2")
        for payload in "123":
            valkey.do("PUBLISH", "a", payload)
        await eventually(lambda: len(proxy.messages) == 3)
        proxy.drop_messages()
        valkey.do("PUBLISH", "b", "4")
        await eventually(lambda: proxy.dropped == 2)
        proxy.deliver_messages()
        valkey.do("PUBLISH", "cd", "5")
        got: list[tuple[bytes, bytes]] = []
        while len(got) < 3:
            message = await listening.get_message(timeout=20)
            if message is not None:
                got.append((message["channel"], message["data"]))
        assert got == [(b"a", b"1"), (b"a", b"3"), (b"cd", b"5")]
        assert proxy.messages == [(b"a", b"1"), (b"a", b"2"), (b"a", b"3"), (b"b", b"4"), (b"cd", b"5")]
        replies = {each.name: each.reply for each in proxy.commands}
        assert replies["SUBSCRIBE"] == [b"subscribe", b"b", 2]
        assert replies["PSUBSCRIBE"] == [b"psubscribe", b"c*", 3]


async def test_clients_may_have_to_speak_tls(valkey: Valkey) -> None:
    async with FaultProxy(valkey, tls=True) as proxy:
        async with client(proxy.url) as asking:
            assert await asking.set("a", 1)
            lost = proxy.lose_reply("GET")
            with pytest.raises(redis.ConnectionError):
                await asking.get("a")
            assert lost.happened == 1
            assert await asking.get("a") == b"1"
        async with client(f"rediss://{HOST}:{proxy.port}/0") as stranger:
            with pytest.raises(redis.ConnectionError, match="certificate verify failed"):
                await stranger.ping()
        async with client(f"redis://{HOST}:{proxy.port}/0", socket_timeout=5) as stranger:
            with pytest.raises(redis.ConnectionError):
                await stranger.ping()
        assert proxy.ca_file.exists()


async def test_a_proxy_without_its_server_resets_whoever_comes(own_valkey: Valkey) -> None:
    async with FaultProxy(own_valkey) as proxy, client(proxy.url) as asking:
        assert await asking.ping()
        own_valkey.kill()
        for _ in range(2):
            with pytest.raises(LOST):
                await asking.ping()
        own_valkey.restart()
        assert await asking.ping()


def test_a_proxy_runs_in_a_thread_for_those_who_block(valkey: Valkey) -> None:
    with FaultProxy(valkey, tls=True) as proxy:
        asking = redis.Redis.from_url(proxy.url, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0))
        with asking:
            assert asking.incr("a") == 1
            lost = proxy.lose_reply("INCRBY")
            with pytest.raises(redis.ConnectionError):
                asking.incr("a")
            assert lost.happened == 1
            proxy.refuse()
            with pytest.raises(redis.ConnectionError):
                asking.incr("a")
            proxy.accept()
            assert asking.incr("a") == 3
            assert proxy.trips("INCRBY") == 3


async def test_a_proxy_in_a_thread_serves_a_loop_too(valkey: Valkey) -> None:
    with FaultProxy(valkey) as proxy:
        async with client(proxy.url) as asking:
            proxy.hold()
            answer = asyncio.create_task(asking.incr("a"))
            await eventually(lambda: proxy.connections == 1)
            proxy.let_go()
            assert await answer == 1


@pytest.mark.parametrize(
    ("sent", "value"),
    [
        (b"+OK\r\n", b"OK"),
        (b"-ERR no\r\n", b"ERR no"),
        (b":-7\r\n", -7),
        (b"$-1\r\n", None),
        (b"*-1\r\n", []),
        (b"$4\r\na\r\nb\r\n", b"a\r\nb"),
        (b"*2\r\n*1\r\n:1\r\n$0\r\n\r\n", [[1], b""]),
        (b"%1\r\n+k\r\n#t\r\n", [b"k", b"t"]),
        (b">3\r\n+message\r\n+c\r\n_\r\n", [b"message", b"c", b""]),
        (b"|1\r\n+ttl\r\n:3\r\n,1.5\r\n", b"1.5"),
        (b"~1\r\n=7\r\ntxt:abc\r\n", [b"txt:abc"]),
    ],
)
def test_a_value_ends_where_the_protocol_says(sent: bytes, value: object) -> None:
    assert parse(sent + b"more") == (value, len(sent))
    for cut in range(len(sent)):
        with pytest.raises(Incomplete):
            parse(sent[:cut])


def test_what_is_not_the_protocol_is_an_error() -> None:
    with pytest.raises(ValueError, match="not the Redis protocol"):
        parse(b"HTTP/1.1 200 OK\r\n")
    assert Command((b"get", b"a"), 1, 1).name == "GET"
