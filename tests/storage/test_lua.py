"""What the scripts may use, and what each of them says of itself."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import resources

import pytest

from frontmcp_py.storage import Ask, RateNeed, SlotNeed
from frontmcp_py.storage.redis import OLDEST_REDIS, RedisStorage, script
from tests.servers import Valkey

SCRIPTS = ("take", "release", "pass_on", "renew")
SOURCES = {
    file.name: file.read_text("utf-8")
    for file in (resources.files("frontmcp_py.storage") / "lua").iterdir()
    if file.name.endswith(".lua")
}

# Each command with the release that brought it, from the pages of the commands at redis.io.
SINCE = {
    "DECR": (1, 0),
    "DEL": (1, 0),
    "GET": (1, 0),
    "GETEX": (6, 2),
    "INCR": (1, 0),
    "PEXPIRE": (2, 6),
    "PTTL": (2, 6),
    "PUBLISH": (2, 0),
    "SET": (1, 0),
    "TIME": (2, 6),
    "ZADD": (1, 2),
    "ZCARD": (1, 2),
    "ZCOUNT": (2, 0),
    "ZRANGE": (1, 2),
    "ZRANGEBYSCORE": (1, 0),
    "ZREM": (1, 2),
    "ZREMRANGEBYSCORE": (1, 2),
    "ZREVRANGE": (1, 2),
    "ZSCORE": (1, 2),
}

# Options as old as their commands, but for the PX of SET, which came with 2.6.12. Several members of ZADD and
# ZREM came with 2.4.
WORDS = {"WITHSCORES", "LIMIT", "PX"}

# What a script may call beside commands: the oldest server has no more.
LIBRARY = {
    "cjson.decode",
    "math.ceil",
    "math.floor",
    "math.max",
    "math.min",
    "redis.call",
    "string.format",
    "string.gmatch",
    "table.concat",
    "table.sort",
}


def code_of(source: str) -> str:
    return re.sub(r"--[^\n]*", "", source)


@pytest.mark.parametrize("name", SOURCES)
def test_every_command_and_option_is_in_the_oldest_server(name: str) -> None:
    calls = re.findall(r"redis\.p?call\(\s*('?)(\w+)", code_of(SOURCES[name]))
    assert all(quote for quote, _ in calls), "a command whose name cannot be read here"
    assert {command for _, command in calls} <= set(SINCE)
    assert all(SINCE[command] <= OLDEST_REDIS for _, command in calls)
    arguments = re.findall(r"redis\.call\('\w+'(.*)", code_of(SOURCES[name]))
    options = {word for line in arguments for word in re.findall(r"'([A-Z]{2,})'", line)}
    assert options - set(SINCE) <= WORDS


@pytest.mark.parametrize("name", SOURCES)
def test_the_scripts_call_nothing_else_of_the_servers_library(name: str) -> None:
    assert set(
        re.findall(r"\b(?:redis|cjson|math|string|table|bit|struct|cmsgpack)\.\w+", code_of(SOURCES[name]))
    ) <= (LIBRARY)


def test_every_command_of_the_list_is_used() -> None:
    used = set(re.findall(r"redis\.call\('(\w+)'", code_of("".join(SOURCES.values()))))
    assert used == set(SINCE)


@pytest.mark.parametrize("name", SOURCES)
def test_a_script_begins_with_what_it_is_for_and_its_invariant(name: str) -> None:
    head = SOURCES[name].split("\n\n", 1)[0].splitlines()
    assert all(line.startswith("--") for line in head)
    assert re.match(r"-- [A-Z].{15,}", head[0])
    assert sum(bool(re.match(r"-- INVARIANTS?\b", line)) for line in head) == 1


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_says_what_it_is_given_and_what_it_returns(name: str) -> None:
    head = SOURCES[f"{name}.lua"].split("\n\n", 1)[0]
    assert re.search(r"^-- KEYS  1 the hash tag$", head, re.MULTILINE)
    assert re.search(r"^-- ARGV  1 moment  2 lease in ms  3 instance  4 ", head, re.MULTILINE)
    assert re.search(r"^-- Returns  ", head, re.MULTILINE)


def test_there_is_no_other_script() -> None:
    assert set(SOURCES) == {f"{name}.lua" for name in (*SCRIPTS, "common")}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_name_of_a_script_is_that_of_the_server(valkey: Valkey, name: str) -> None:
    assert valkey.do("SCRIPT LOAD", script(name).source) == script(name).sha


async def test_every_key_and_channel_begins_with_the_hash_tag(valkey: Valkey) -> None:
    """What the server itself reports is looked at: also what is only read, or there for a moment."""
    rates = tuple(
        RateNeed(f"r{n}", strategy, 5, 60_000_000)
        for n, strategy in enumerate(("fixed-window", "moving-window", "sliding-window"))
    )
    slots = (SlotNeed("a", 1), SlotNeed("b", 2))
    one, two = (RedisStorage(valkey.url, prefix="tag", timeout=5) for _ in range(2))
    client = valkey.client()
    async with client, client.monitor() as monitor:
        await one.take(Ask("first", rates, slots))
        await two.take(Ask("second", rates, slots))
        await two.take(Ask("third", rates, slots, rank=0))
        await two.take(Ask("fourth", slots=(SlotNeed("a", 1, max_queued=1),)))
        await one.renew(["first", "gone"], [])
        await two.renew([], ["second", "third", "gone"])
        await one.release("first")
        await two.pass_on("third", 1)
        await two.release("second", undo=True)
        for key in ("r0", "r1", "r2"):
            await one.take(Ask("again", tuple(replace(rate, most=1) for rate in rates if rate.key == key)))
        await client.echo("done")
        seen: list[list[str]] = []
        while not seen or seen[-1][0] != "ECHO":
            seen.append(str((await monitor.next_command())["command"]).split(" "))
    await one.close()
    await two.close()
    by_scripts = [words for words in seen if words[0] in SINCE]
    assert {words[0] for words in by_scripts} == set(SINCE)
    assert [words for words in by_scripts if words[0] != "TIME" and not words[1].startswith("{tag}")] == []
