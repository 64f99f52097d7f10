"""Signals, seen from within one process: who hears of them, and who still does afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading

import pytest

from frontmcp_py.shutdown import Shutdown


async def drain_at_once() -> None:
    pass


async def test_listening_leaves_handlers_and_the_bell_of_others_as_they_were() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    ours, others = socket.socketpair()
    others.setblocking(False)
    bell = signal.set_wakeup_fd(others.fileno())
    try:
        with Shutdown(60, drain_at_once).listening():
            assert signal.getsignal(signal.SIGTERM) != before[0]
        assert signal.set_wakeup_fd(bell) == others.fileno()
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    finally:
        signal.set_wakeup_fd(bell)
        ours.close()
        others.close()


async def test_the_loops_own_handlers_of_other_signals_still_hear_theirs() -> None:
    heard = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, heard.set)
    try:
        with Shutdown(60, drain_at_once).listening():
            os.kill(os.getpid(), signal.SIGUSR1)
            await asyncio.wait_for(heard.wait(), 15)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_begins_the_drain_and_nothing_else(number: int) -> None:
    drained: list[int] = []

    async def drain() -> None:
        drained.append(1)

    shutdown = Shutdown(60, drain)
    with shutdown.listening():
        os.kill(os.getpid(), number)
        await asyncio.wait_for(shutdown.drained(), 15)
        assert (shutdown.received, drained) == (number, [1])


async def test_a_drain_that_fails_is_logged_and_over(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise LookupError("drained too far")

    shutdown = Shutdown(60, fails)
    with shutdown.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait_for(shutdown.drained(), 15)
    assert "draining failed" in caplog.text


async def test_a_process_that_nobody_told_to_stop_goes_on() -> None:
    shutdown = Shutdown(0, drain_at_once)
    with shutdown.listening():
        shutdown.end()
    shutdown.end()


async def test_the_watchdog_ends_with_the_listening() -> None:
    # That of a test before may take a moment to end.
    before = set(threading.enumerate())
    with Shutdown(60, drain_at_once).listening():
        (watchdog,) = [each for each in set(threading.enumerate()) - before if each.name == "shutdown"]
    watchdog.join(15)
    assert not watchdog.is_alive()


def test_outside_of_the_main_thread_nobody_listens_and_nothing_is_changed() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen: list[object] = []

    async def listen() -> None:
        with Shutdown(60, drain_at_once).listening():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=lambda: asyncio.run(listen()))
    thread.start()
    thread.join(15)
    assert seen == [before]
