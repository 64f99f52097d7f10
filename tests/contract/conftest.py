"""Lets pytest say more about a failure in the suite, which is no test module of its own."""

import pytest

from tests.servers import memcached as memcached
from tests.servers import valkey as valkey

pytest.register_assert_rewrite("frontmcp_py.testing.contract")
