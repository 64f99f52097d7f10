from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp.server.auth.middleware.auth_context import auth_context_var
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.requests import Request

from frontmcp_py.call import Caller
from frontmcp_py.identity import SESSIONS_ARE_CHECKED, caller_of, principal

HANDSHAKE, MODERN = "2025-11-25", "2026-07-28"


def token(client_id: str = "client", issuer: str | None = None, subject: str | None = None) -> AccessToken:
    claims = None if issuer is None else {"iss": issuer}
    return AccessToken(token="secret", client_id=client_id, scopes=[], subject=subject, claims=claims)


def request(
    peer: tuple[str, int] | None = ("203.0.113.7", 4711),
    headers: dict[str, str] | None = None,
    *,
    checks_sessions: bool | None = True,
) -> Request:
    """What an HTTP app is asked: one that checks sessions, one that does not, or no app at all."""
    scope: dict[str, Any] = {
        "type": "http",
        "client": peer,
        "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
    }
    if checks_sessions is not None:
        scope["app"] = SimpleNamespace(state=SimpleNamespace(**{SESSIONS_ARE_CHECKED: checks_sessions}))
    return Request(scope)


def caller(request: Request | None, version: str = HANDSHAKE, local: str = "stdio") -> Caller:
    # Of the SDK's context of a request, which has a whole connection behind it, two things are looked at.
    context: Any = SimpleNamespace(request=request, protocol_version=version)
    return caller_of(context, local)


@contextmanager
def signed_in(who: AccessToken) -> Iterator[None]:
    reset = auth_context_var.set(AuthenticatedUser(who))
    yield
    auth_context_var.reset(reset)


# --------------------------------------------------------------------------------------------------- user


def test_a_principal_is_issuer_and_subject() -> None:
    assert principal(token("client", "https://issuer.example", "ann")) == "https%3A%2F%2Fissuer.example|ann"


def test_without_a_subject_it_is_the_client() -> None:
    assert principal(token("the client", "https://issuer.example")) == "the%20client"
    assert principal(token("client")) == "client"


def test_two_users_of_one_client_are_two_and_one_user_of_two_clients_is_one() -> None:
    issuer = "https://issuer.example"
    assert principal(token("c", issuer, "ann")) != principal(token("c", issuer, "bob"))
    assert principal(token("c", issuer, "ann")) == principal(token("d", issuer, "ann"))
    assert principal(token("c", issuer, "ann")) != principal(token("c", "https://other.example", "ann"))


texts = st.text(min_size=1, alphabet=st.sampled_from("ab|%/: "))


@given(
    st.tuples(texts, st.none() | texts, st.none() | texts),
    st.tuples(texts, st.none() | texts, st.none() | texts),
)
def test_no_two_principals_have_one_text(
    one: tuple[str, str | None, str | None], other: tuple[str, str | None, str | None]
) -> None:
    def who(parts: tuple[str, str | None, str | None]) -> object:
        client, issuer, subject = parts
        return (client,) if subject is None else (issuer, subject)

    assert (principal(token(*one)) == principal(token(*other))) == (who(one) == who(other))


def test_a_verified_token_says_who_calls() -> None:
    with signed_in(token("client", "https://issuer.example", "ann")):
        who = caller(request())
    assert (who.user_id, who.client_id) == ("https%3A%2F%2Fissuer.example|ann", "client")


def test_who_is_not_signed_in_is_nobody_whatever_the_headers_say() -> None:
    who = caller(request(headers={"authorization": "Bearer ann", "x-user": "ann"}))
    assert (who.user_id, who.client_id) == (None, None)


# ------------------------------------------------------------------------------------------------ address


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        (("203.0.113.7", 1), "203.0.113.7"),
        (("::ffff:203.0.113.7", 1), "203.0.113.7"),
        (("fe80::1%eth0", 1), "fe80::1"),
        (("testclient", 1), None),
        (None, None),
    ],
)
def test_the_address_is_that_of_the_socket(peer: tuple[str, int] | None, expected: str | None) -> None:
    assert caller(request(peer)).client_ip == expected


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip"])
def test_a_forwarding_header_is_not_believed(header: str) -> None:
    assert caller(request(headers={header: "198.51.100.1"})).client_ip == "203.0.113.7"


# ------------------------------------------------------------------------------------------------ session


def test_a_session_id_that_the_app_has_checked_is_the_session() -> None:
    assert caller(request(headers={"mcp-session-id": "s1"})).session_id == "s1"


@pytest.mark.parametrize(
    ("version", "checks"), [(MODERN, True), (HANDSHAKE, False), (HANDSHAKE, None), (MODERN, None)]
)
def test_a_session_header_that_nobody_has_checked_is_none(version: str, checks: bool | None) -> None:
    who = caller(request(headers={"mcp-session-id": "forged"}, checks_sessions=checks), version)
    assert who.session_id is None


def test_without_the_header_there_is_no_session() -> None:
    assert caller(request()).session_id is None


# ---------------------------------------------------------------------------------------------- transport


@pytest.mark.parametrize("local", ["stdio", "in-process"])
def test_what_did_not_come_over_http_is_local_and_has_no_address(local: str) -> None:
    assert caller(None, local=local) == Caller(transport=local)


def test_what_came_over_http_says_so() -> None:
    assert caller(request()).transport == "streamable-http"
