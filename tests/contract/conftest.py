"""Lets pytest say more about a failure in the suite, which is no test module of its own."""

import pytest

pytest.register_assert_rewrite("frontmcp_py.testing.contract")
