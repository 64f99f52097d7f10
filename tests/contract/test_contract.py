"""One suite over every storage, each on a real server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest

from frontmcp_py.storage import Storage
from frontmcp_py.storage.limits_bridge import LimitsStorage
from frontmcp_py.storage.redis import RedisStorage
from frontmcp_py.testing.contract import MINUTE, StorageContract
from frontmcp_py.testing.in_process import InProcessStorage, InProcessStore
from tests.fault_proxy import FaultProxy
from tests.servers import Memcached, Valkey

_PREFIXES = itertools.count()


class TestInProcess(StorageContract):
    def make_instances(self, count: int, *, lease: float, now_us: Callable[[], int]) -> Sequence[Storage]:
        store = InProcessStore(lease=lease, now_us=now_us)
        return [InProcessStorage(store) for _ in range(count)]


class RedisContract(StorageContract):
    """Over whatever speaks Redis; a subclass says where that is."""

    url: str

    def make_instances(self, count: int, *, lease: float, now_us: Callable[[], int]) -> Sequence[Storage]:
        # A prefix of its own: what other tests have left there does not matter.
        prefix = f"contract-{next(_PREFIXES)}"
        make = partial(RedisStorage, self.url, prefix=prefix, lease=lease, timeout=60, now_us=now_us)
        return [make() for _ in range(count)]


class TestValkey(RedisContract):
    @pytest.fixture(autouse=True)
    def server(self, valkey: Valkey) -> None:
        self.url = valkey.url


@pytest.mark.slow
class TestValkeyBehindTls(RedisContract):
    @pytest.fixture(autouse=True)
    def server(self, valkey: Valkey) -> Iterator[None]:
        with FaultProxy(valkey, tls=True) as proxy:
            self.url = proxy.url
            yield


@pytest.fixture(scope="session")
def cluster() -> Iterator[Valkey]:
    with Valkey(cluster=True) as server:
        yield server


@pytest.mark.slow
class TestCluster(RedisContract):
    @pytest.fixture(autouse=True)
    def server(self, cluster: Valkey) -> None:
        self.url = cluster.url


@pytest.mark.slow
class TestMemcached(StorageContract):
    """Rates only, by the clock, and one limit at a time."""

    time_can_be_set = False
    is_atomic = False
    longest_window_us = 15 * 24 * 60 * MINUTE

    @pytest.fixture(autouse=True)
    def server(self, memcached: Memcached) -> None:
        self.url = memcached.url

    def make_instances(self, count: int, *, lease: float, now_us: Callable[[], int]) -> Sequence[Storage]:
        prefix = f"contract-{next(_PREFIXES)}"
        return [LimitsStorage(self.url, prefix=prefix, timeout=10) for _ in range(count)]
