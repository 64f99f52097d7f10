"""What the reference can do beyond the contract, for tests in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from frontmcp_py.storage import Ask, SlotNeed, Started, StorageUnavailable, Turn
from frontmcp_py.testing import settle, virtual_time
from frontmcp_py.testing.in_process import InProcessStorage, InProcessStore


def ask(lease: str) -> Ask:
    return Ask(lease, slots=(SlotNeed("slot", 1),))


@virtual_time
async def test_a_store_that_is_gone_answers_nothing_and_comes_back_as_it_was() -> None:
    store = InProcessStore()
    storage = InProcessStorage(store)
    await storage.take(ask("one"))
    store.reachable = False
    for question in (
        storage.open(),
        storage.take(ask("two")),
        storage.pass_on("one", 1),
        storage.release("one"),
        storage.renew(["one"], []),
        storage.listen(lambda turn: None, lambda: None),
    ):
        with pytest.raises(StorageUnavailable):
            await question
    store.reachable = True
    assert (await storage.renew(["one", "two"], [])).lost == ("two",)


@virtual_time
async def test_leases_go_by_the_time_of_the_loop() -> None:
    storage = InProcessStorage(InProcessStore(lease=10))
    await storage.take(ask("one"))
    await asyncio.sleep(10)
    assert isinstance(await storage.take(ask("two")), Started)


@virtual_time
async def test_a_question_is_decided_when_it_arrives_and_answered_later() -> None:
    store = InProcessStore(latency=1)
    storage = InProcessStorage(store)
    lost = asyncio.create_task(storage.take(ask("one")))
    await asyncio.sleep(1.5)
    lost.cancel()
    assert not isinstance(await storage.take(ask("two")), Started)
    assert asyncio.get_running_loop().time() == 3.5


@virtual_time
async def test_what_is_told_while_nobody_listens_is_lost() -> None:
    store = InProcessStore()
    storage, other = InProcessStorage(store), InProcessStorage(store)
    heard: list[Turn] = []
    await other.take(ask("one"))
    await storage.take(ask("two"))
    await other.release("one")
    listener = asyncio.create_task(storage.listen(heard.append, lambda: None))
    await settle()
    assert heard == []
    await other.take(ask("three"))
    await storage.take(ask("four"))
    await storage.release("two")
    await other.release("three")
    await settle()
    assert heard == [Turn("four", 1)]
    listener.cancel()
