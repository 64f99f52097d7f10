"""One suite over every storage, each on a real server."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar

import pytest

from frontmcp_py.storage import Storage
from frontmcp_py.storage.redis import RedisStorage
from frontmcp_py.testing.contract import StorageContract
from frontmcp_py.testing.in_process import InProcessStorage, InProcessStore
from tests.servers import Valkey, _shared_valkey

_PREFIXES = itertools.count()


class TestInProcess(StorageContract):
    def make_instances(self, count: int, *, lease: float, now_us: Callable[[], int]) -> Sequence[Storage]:
        store = InProcessStore(lease=lease, now_us=now_us)
        return [InProcessStorage(store) for _ in range(count)]


class RedisContract(StorageContract):
    """Over whatever speaks Redis; a subclass says where that is."""

    url: ClassVar[str]

    def make_instances(self, count: int, *, lease: float, now_us: Callable[[], int]) -> Sequence[Storage]:
        # A prefix of its own: what other tests have left there does not matter.
        prefix = f"contract-{next(_PREFIXES)}"
        make = partial(RedisStorage, self.url, prefix=prefix, lease=lease, timeout=10, now_us=now_us)
        return [make() for _ in range(count)]


class TestValkey(RedisContract):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls) -> None:
        cls.url = _shared_valkey().url


@pytest.mark.slow
class TestCluster(RedisContract):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls) -> Iterator[None]:
        with Valkey(cluster=True) as server:
            cls.url = server.url
            yield
