from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver.tools import Tool as SdkTool
from mcp_types import CallToolResult, TextContent
from mcp_types import Tool as SeenTool

from frontmcp_py import (
    Admission,
    App,
    Call,
    Concurrency,
    ConfigurationError,
    FrontMCP,
    IPFilter,
    RateLimit,
    Throttle,
    Timeout,
    ToolContext,
    tool,
)
from frontmcp_py.config import FILE_NAME, Origin, Overrides, Settings, ToolInForce, for_target, translated
from frontmcp_py.guard import Guard
from tests.guard.support import every_guard_ends_clean


@pytest.fixture(autouse=True)
def guards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Guard]]:
    """Every guard that the test makes. Each must have nothing left when the test has ended."""
    for variable in ("FRONTMCP_CONFIG", "FRONTMCP_THROTTLE", "FRONTMCP_ENV"):
        monkeypatch.delenv(variable, raising=False)
    with every_guard_ends_clean(monkeypatch) as made:
        yield made


async def export() -> str:
    """Export."""
    return "done"


async def merge() -> str:
    """Merge."""
    return "done"


def threaded() -> str:
    """Run in a thread."""
    return "done"


def by_user(call: Call) -> str:
    return call.caller.user_id or "anonymous"


def file_of(folder: Path, text: str, name: str = FILE_NAME) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def throttle_of(config: Any, throttle: Any = None) -> Throttle:
    made = Settings.of(throttle, config).throttle
    assert made is not None
    return made


def in_force(server: FrontMCP, name: str) -> ToolInForce:
    return server.mcp.in_force[name]


async def listed(server: FrontMCP) -> dict[str, SeenTool]:
    async with server.connect() as client:
        return {each.name: each for each in (await client.list_tools()).tools}


async def call(server: FrontMCP, name: str, **arguments: Any) -> CallToolResult:
    async with server.connect() as client:
        return await client.call_tool(name, arguments)


def text_of(result: CallToolResult) -> str:
    [block] = result.content
    assert isinstance(block, TextContent)
    return block.text


# ------------------------------------------------------------------------------------------ where it is found


def test_without_a_file_nothing_is_changed() -> None:
    throttle = Throttle(default_timeout=5)
    assert Settings.of().throttle is None
    assert Settings.of(throttle).throttle is throttle
    assert Settings.of(throttle, {}).throttle is throttle


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_is_named_by_its_path(kind: type[str | Path], tmp_path: Path) -> None:
    path = file_of(tmp_path, "[throttle]\ndefault_timeout = 7")
    assert throttle_of(kind(path)).default_timeout == Timeout(7)


def test_an_empty_file_says_nothing(tmp_path: Path) -> None:
    assert Settings.of(None, file_of(tmp_path, "")).throttle is None


def test_a_mapping_says_what_a_file_does() -> None:
    assert throttle_of({"throttle": {"default_timeout": "7s"}}).default_timeout == Timeout(7)


def test_a_json_file_has_the_same_sections(tmp_path: Path) -> None:
    document = {"throttle": {"default_timeout": 7}, "tools": {"export": {"rate_limit": None}}}
    settings = Settings.of(None, file_of(tmp_path, json.dumps(document), "limits.json"))
    assert settings.throttle == Throttle(default_timeout=7)
    assert settings.overrides.tool("export").rate_limits == ()


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"\xef\xbb\xbf[throttle]\ndefault_timeout = 7\n")
    assert throttle_of(path).default_timeout == Timeout(7)


def test_the_environment_names_another_file_than_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_code = file_of(tmp_path, "[throttle]\ndefault_timeout = 1\ndefault_rate_limit = '1/hour'", "code.toml")
    of_operator = file_of(tmp_path, "[throttle]\ndefault_timeout = 2", "operator.toml")
    monkeypatch.setenv("FRONTMCP_CONFIG", str(of_operator))
    assert throttle_of(of_code) == Throttle(default_timeout=2)
    monkeypatch.setenv("FRONTMCP_CONFIG", " ")
    assert throttle_of(of_code).default_timeout == Timeout(1)


def test_the_file_of_the_command_line_wins_and_the_one_beside_the_module_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_of(tmp_path, "[throttle]\ndefault_timeout = 1")
    named = file_of(tmp_path, "[throttle]\ndefault_timeout = 2", "named.toml")
    with for_target(tmp_path):
        assert throttle_of(None).default_timeout == Timeout(1)
        assert throttle_of({"throttle": {"default_timeout": 3}}).default_timeout == Timeout(3)
        monkeypatch.setenv("FRONTMCP_CONFIG", str(file_of(tmp_path, "throttle = false", "other.toml")))
        assert not throttle_of(None).enabled
    with for_target(tmp_path, named):
        assert throttle_of({"throttle": {"default_timeout": 3}}).default_timeout == Timeout(2)
    monkeypatch.delenv("FRONTMCP_CONFIG")
    assert Settings.of().throttle is None


def test_an_empty_mapping_takes_no_file_from_beside_the_module(tmp_path: Path) -> None:
    file_of(tmp_path, "[throttle]\ndefault_timeout = 1")
    with for_target(tmp_path):
        assert Settings.of(None, {}).throttle is None


@pytest.mark.parametrize("named_by", ["config", "FRONTMCP_CONFIG", "--config"])
def test_a_missing_file_leaves_the_code_alone_with_a_warning_that_names_it(
    named_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "missing.toml"
    if named_by == "FRONTMCP_CONFIG":
        monkeypatch.setenv("FRONTMCP_CONFIG", str(missing))
    with for_target(None, missing if named_by == "--config" else None):
        assert Settings.of(None, missing if named_by == "config" else None).throttle is None
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert str(missing) in record.getMessage()
    assert named_by in record.getMessage()


def test_no_file_beside_the_module_is_not_worth_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with for_target(tmp_path):
        assert Settings.of().throttle is None
    assert not caplog.records


# ----------------------------------------------------------------------------------------- what is not a file


@pytest.mark.parametrize("config", ["", " "])
def test_a_blank_path_is_refused(config: str) -> None:
    with pytest.raises(ConfigurationError, match=r"FrontMCP\.config: .* give text that is not blank"):
        Settings.of(None, config)


@pytest.mark.parametrize("path", ["a\0b", "/dev/null/x"])
def test_what_is_no_path_of_a_file_is_refused_in_one_sentence(path: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"the file cannot be read: (embedded null byte|Not a directory)"
    ):
        Settings.of(None, path)


def test_a_directory_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read: Is a directory") as refused:
        Settings.of(None, tmp_path)
    assert str(refused.value).startswith(f"{tmp_path}: ")


def test_what_is_not_utf_8_is_refused_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_bytes(b"[throttle]\nkey_prefix = '\xfc'\n")
    with pytest.raises(ConfigurationError, match=r"frontmcp\.toml: the file is not UTF-8 \(byte 26\)"):
        Settings.of(None, path)


def test_a_mistake_in_toml_is_named_with_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"frontmcp\.toml: not TOML: .*line 2"):
        Settings.of(None, file_of(tmp_path, "[throttle]\ndefault_timeout = thirty\n"))


@pytest.mark.parametrize("text", ["[throttle", f"a = {'[' * 100_000}", f"a = {'9' * 5000}", "a = 1\na = 2"])
def test_text_that_is_no_toml_is_refused_with_the_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"frontmcp\.toml: not TOML: "):
        Settings.of(None, file_of(tmp_path, text))


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "{'throttle': {}}"])
def test_a_mistake_in_json_is_named_with_the_file(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"limits\.json: not JSON: "):
        Settings.of(None, file_of(tmp_path, text, "limits.json"))


def test_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"limits\.json: \[1\] is not allowed; give a table"):
        Settings.of(None, file_of(tmp_path, "[1]", "limits.json"))


@pytest.mark.parametrize("config", [1, True, ["frontmcp.toml"], b"frontmcp.toml"])
def test_another_kind_of_config_is_refused(config: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=r"FrontMCP\.config: .* give the path of a file, or a mapping"
    ):
        Settings.of(None, config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[throtle]", "there is no section 'throtle'; did you mean 'throttle'?"),
        ("enabled = false", "there is no section 'enabled'; valid options: throttle, concurrency, tools"),
        ("throttle = 3", "[throttle]: 3 is not allowed; give a table"),
        (
            "[throttle]\ndefault_timout = 3",
            "[throttle]: there is no field 'default_timout'; did you mean 'default_",
        ),
        (
            "[throttle]\ndefault_timeout = -1",
            "[throttle]: Throttle.default_timeout: Timeout.execute: -1 is not",
        ),
        (
            "[throttle]\ndefault_timeout = { executes = 1 }",
            "Timeout has no field 'executes'; did you mean 'execute'?",
        ),
        (
            "[throttle]\ndefault_rate_limit = ['x']",
            "[throttle]: Throttle.default_rate_limit[0]: 'x' is not allowed",
        ),
        (
            "[throttle]\nadmission = { max_active = 9 }",
            "[throttle]: there is no field 'admission'; give the section [con",
        ),
        (
            "[throttle]\nenabled = 'yes'",
            "[throttle]: Throttle.enabled: 'yes' is not allowed; give True or False",
        ),
        (
            "[throttle]\nmode = 'watch'",
            "[throttle]: Throttle.mode: 'watch' is not allowed; give 'enforce' or 'observe'",
        ),
        (
            "[throttle]\ndefault_concurrency = { key = 'x' }",
            "[throttle]: Throttle.default_concurrency: the key 'x' is",
        ),
        ("[throttle.ip_filter]\nallow = ['10.0.0.1/8']", "IPFilter.allow[0]: '10.0.0.1/8' is not allowed"),
        ("concurrency = 48", "[concurrency]: 48 is not allowed; give a table"),
        (
            "[concurrency]\nmax_activ = 9",
            "[concurrency]: there is no field 'max_activ'; did you mean 'max_active'?",
        ),
        ("[concurrency]\nmax_active = true", "[concurrency]: Admission.max_active: True is not allowed"),
        (
            "[concurrency]\nmax_active = 1",
            "[concurrency]: Admission.max_active: 1 is not allowed; give an integer from 2",
        ),
        (
            "[concurrency]\nmax_active = 'off'\nreserved = -1",
            "[concurrency]: Admission.reserved: -1 is not allowed",
        ),
        ("[concurrency]\nmax_queued = 'off'", "[concurrency]: Admission.max_queued: 'off' is not allowed"),
        ("[concurrency]\nqueue_timeout = 0", "[concurrency]: Admission.queue_timeout: 0 is not allowed"),
        ("[concurrency]\nkeys = 3", "[concurrency.keys]: 3 is not allowed; give a table"),
        (
            "[concurrency.keys]\nshell = -1",
            "[concurrency.keys]: shell: -1 is not allowed; give an integer from 0",
        ),
        ("[concurrency.keys]\nshell = 2.5", "[concurrency.keys]: shell: 2.5 is not allowed"),
        ("[concurrency.keys]\nshell = false", "[concurrency.keys]: shell: False is not allowed"),
        ("[concurrency.keys]\n' ' = 1", "[concurrency.keys]: the name of a key: ' ' is not allowed"),
        ("tools = 1", "[tools]: 1 is not allowed; give a table"),
        ("[tools]\nexport = 1", "[tools.export]: 1 is not allowed; give a table"),
        ("[tools]\n'' = {}", "[tools]: the name of a tool: '' is not allowed"),
        (
            "[tools.export]\nrate_limits = 1",
            "[tools.export]: there is no field 'rate_limits'; did you mean 'rate_limit'?",
        ),
        ("[tools.export]\nrate_limit = 5", "[tools.export]: rate_limit: 5 is not allowed; give text such as"),
        ("[tools.export]\nrate_limit = true", "[tools.export]: rate_limit: True is not allowed"),
        ("[tools.export]\nrate_limit = false", "[tools.export]: rate_limit: False is not allowed"),
        (
            "[tools.export]\nrate_limit = []",
            "[tools.export]: rate_limit: [] is not allowed; give at least one limit",
        ),
        ("[tools.export]\nrate_limit = { max_requests = 0 }", "RateLimit.max_requests: 0 is not allowed"),
        ("[tools.export]\nconcurrency = 'on'", "[tools.export]: concurrency: 'on' is not allowed"),
        (
            "[tools.export]\nconcurrency = -1",
            "[tools.export]: concurrency: Concurrency.max_concurrent: -1 is not",
        ),
        ("[tools.export]\ntimeout = nan", "[tools.export]: timeout: Timeout.execute: nan is not allowed"),
        ("[tools.export]\ntimeout = '30'", "[tools.export]: timeout: Timeout.execute: '30' needs a unit"),
        ("[tools.export]\nenabled = 0", "[tools.export]: enabled: 0 is not allowed; give True or False"),
        (
            "[tools.export]\npriority = 'high'",
            "[tools.export]: priority: 'high' is not allowed; give 'normal' or",
        ),
        (
            "[tools.export]\non_cancel = 'stop'",
            "[tools.export]: on_cancel: 'stop' is not allowed; give 'cancel' or",
        ),
        ("[tools.export]\ndescribe_limits = 'off'", "[tools.export]: describe_limits: 'off' is not allowed"),
        ("[tools.'a.b']\ntimeout = -1", '[tools."a.b"]: timeout: Timeout.execute: -1 is not allowed'),
    ],
)
def test_a_mistake_is_named_with_file_section_and_field(text: str, message: str, tmp_path: Path) -> None:
    path = file_of(tmp_path, text)
    with pytest.raises(ConfigurationError) as refused:
        FrontMCP("desk", tools=[export], config=path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)


def test_mistakes_in_a_mapping_are_named_with_the_option() -> None:
    with pytest.raises(ConfigurationError, match=r"^config: \[tools\.export\]: timeout: "):
        Settings.of(None, {"tools": {"export": {"timeout": -1}}})


@pytest.mark.parametrize(
    "document", [{1: {}}, {"tools": {1: {}}}, {"throttle": {1: 2}}, {"tools": {"x": {1: 2}}}]
)
def test_names_that_are_no_text_are_refused(document: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^config: .*\b1\b"):
        Settings.of(None, document)


# ----------------------------------------------------------------------------------------------- the throttle


def test_every_field_of_the_throttle_may_be_given(tmp_path: Path) -> None:
    path = file_of(
        tmp_path,
        """
        [throttle]
        enabled = true
        mode = "observe"
        global_rate_limit = "100/minute; 1000/day"
        global_concurrency = 20
        default_rate_limit = [{ max_requests = 5, window = "1h", partition_by = "user_id" }, "9/day"]
        storage = "redis://localhost/0"
        storage_timeout = "300ms"
        lease = 20
        fallback = "memory"
        key_prefix = "desk"
        max_keys = 1000

        [throttle.default_concurrency]
        max_concurrent = 3
        queue_timeout = "off"

        [throttle.default_timeout]
        execute = "30s"
        cancel_after = 1

        [throttle.ip_filter]
        allow = ["10.0.0.0/8"]
        default = "deny"
        """,
    )
    assert throttle_of(path) == Throttle(
        mode="observe",
        global_rate_limit="100/minute; 1000/day",
        global_concurrency=20,
        default_rate_limit=[RateLimit(5, "1h", "user_id"), "9/day"],
        default_concurrency=Concurrency(3, queue_timeout=None),
        default_timeout=Timeout(30, cancel_after=1),
        ip_filter=IPFilter(allow=["10.0.0.0/8"], default="deny"),
        storage="redis://localhost/0",
        storage_timeout=0.3,
        lease=20,
        fallback="memory",
        key_prefix="desk",
        max_keys=1000,
    )


def test_a_field_of_the_file_replaces_that_of_the_code_whole_and_no_other() -> None:
    code = Throttle(default_rate_limit=RateLimit(5, "1h", "user_id"), default_timeout=9, max_keys=7)
    merged = throttle_of({"throttle": {"default_rate_limit": {"max_requests": 6}}}, code)
    assert merged == Throttle(default_rate_limit=RateLimit(6), default_timeout=9, max_keys=7)


@pytest.mark.parametrize("off", [0, 0.0, "off", None])
@pytest.mark.parametrize(
    "field",
    [
        "global_rate_limit",
        "global_concurrency",
        "default_rate_limit",
        "default_concurrency",
        "default_timeout",
        "ip_filter",
        "storage",
        "fallback",
    ],
)
def test_every_kind_of_limit_of_the_throttle_can_be_lifted(field: str, off: object) -> None:
    code = Throttle(
        global_rate_limit="1/hour",
        global_concurrency=1,
        default_rate_limit="1/hour",
        default_concurrency=1,
        default_timeout=1,
        ip_filter=IPFilter(default="deny"),
        storage="redis://localhost",
        fallback="memory",
    )
    lifted = throttle_of({"throttle": {field: off}}, code)
    assert not getattr(lifted, field)
    assert [name for name in Throttle.__slots__ if getattr(lifted, name) != getattr(code, name)] == [field]


@pytest.mark.parametrize("off", [0, "off", False])
def test_the_whole_throttle_can_be_turned_off_and_on(off: object) -> None:
    assert throttle_of({"throttle": off}, {"default_timeout": 3}) == Throttle(
        enabled=False, default_timeout=3
    )
    assert throttle_of({"throttle": True}, False) == Throttle()


def test_the_file_turns_on_what_the_code_has_turned_off() -> None:
    assert throttle_of({"throttle": {"enabled": True}}, False).enabled
    assert not throttle_of({"throttle": {"default_timeout": 3}}, False).enabled


def test_the_environment_turns_off_what_the_file_turns_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONTMCP_THROTTLE", "off")
    settings = Settings.of(None, {"throttle": {"enabled": True, "default_timeout": 3}})
    assert settings.throttle == Throttle(enabled=False, default_timeout=3)
    assert settings.origins["enabled"] == Origin("environment")


def test_fields_of_admission_replace_those_of_the_code_one_by_one(tmp_path: Path) -> None:
    code = Throttle(admission=Admission(100, 10, 7, 5))
    merged = throttle_of(file_of(tmp_path, "[concurrency]\nmax_active = 50\nqueue_timeout = '2s'"), code)
    assert merged.admission == Admission(50, 10, 7, 2)


def test_a_number_that_only_fits_those_of_the_code_is_taken() -> None:
    merged = throttle_of({"concurrency": {"reserved": 60}}, Throttle(admission=Admission(max_active=100)))
    assert merged.admission == Admission(max_active=100, reserved=60)
    merged = throttle_of({"concurrency": {"max_active": 4}}, Throttle(admission=Admission(9, reserved=2)))
    assert merged.admission == Admission(max_active=4, reserved=2)


def test_admission_is_turned_on_again_by_a_number() -> None:
    merged = throttle_of({"concurrency": {"max_queued": 3}}, Throttle(admission=None))
    assert merged.admission == Admission(max_queued=3)


@pytest.mark.parametrize("section", [0, "off", None, {"max_active": 0}, {"max_active": "off", "reserved": 3}])
def test_admission_can_be_lifted(section: object) -> None:
    assert throttle_of({"concurrency": section}).admission is None


def test_keys_alone_leave_admission_as_it_is() -> None:
    assert Settings.of(None, {"concurrency": {"keys": {"shell": 3}}}).throttle is None


def test_numbers_that_contradict_those_of_the_code_are_named_with_the_section(tmp_path: Path) -> None:
    path = file_of(tmp_path, "[concurrency]\nmax_active = 4")
    with pytest.raises(ConfigurationError, match=r"\[concurrency\]: Admission\.reserved: 8 .* from 0 to 3"):
        Settings.of(None, path)


def test_a_wait_without_an_end_is_found_when_the_file_lifts_admission(tmp_path: Path) -> None:
    path = file_of(tmp_path, "concurrency = 'off'")
    code = Throttle(default_concurrency=Concurrency(1, queue_timeout=None))
    with pytest.raises(ConfigurationError, match=r"frontmcp\.toml: .*queue_timeout None is not allowed"):
        Settings.of(code, path)
    shell = tool(concurrency=Concurrency(1, queue_timeout=None))(export)
    with pytest.raises(ConfigurationError, match=r'tool "export": concurrency: queue_timeout None'):
        FrontMCP("desk", tools=[shell], config=path)


async def test_limits_of_the_throttle_are_enforced_and_told(tmp_path: Path) -> None:
    path = file_of(tmp_path, "[throttle]\ndefault_rate_limit = '1/hour'")
    server = FrontMCP("desk", tools=[export], config=path)
    assert (await listed(server))["export"].description == "Export. Limits: at most 1 call per hour."
    assert not (await call(server, "export")).is_error
    assert "Rate limit exceeded" in text_of(await call(server, "export"))


# ------------------------------------------------------------------------------------------------------ tools


async def test_what_the_file_says_of_a_tool_is_enforced_and_told(tmp_path: Path) -> None:
    limited = tool(rate_limit="1/hour", concurrency=1, timeout=3)(export)
    path = file_of(tmp_path, "[tools.export]\nrate_limit = '2/hour'\nconcurrency = 0\ntimeout = 'off'")
    server = FrontMCP("desk", tools=[limited], config=path)
    told = (await listed(server))["export"]
    assert told.description == "Export. Limits: at most 2 calls per hour."
    [limit] = (told.meta or {})["frontmcp/limits"]["rateLimits"]
    assert limit["maxRequests"] == 2
    assert [(await call(server, "export")).is_error for _ in range(3)] == [False, False, True]


async def test_the_tool_itself_stays_as_it_was_for_other_servers() -> None:
    limited = tool(rate_limit="1/hour")(export)
    FrontMCP("operated", tools=[limited], config={"tools": {"export": {"rate_limit": "off"}}})
    assert "1 call per hour" in str((await listed(FrontMCP("desk", tools=[limited])))["export"].description)


@pytest.mark.parametrize("off", [0, "off", None])
@pytest.mark.parametrize("kind", ["rate_limit", "concurrency", "timeout"])
async def test_every_kind_of_limit_of_a_tool_can_be_lifted_and_its_default_with_it(
    kind: str, off: object
) -> None:
    limited = tool(rate_limit="1/hour", concurrency=1, timeout=3)(export)
    throttle = Throttle(default_rate_limit="5/hour", default_concurrency=5, default_timeout=50)
    server = FrontMCP("desk", tools=[limited], throttle=throttle, config={"tools": {"export": {kind: off}}})
    found = in_force(server, "export")
    told = {"rate_limit": "1 call per hour", "concurrency": "one at a time", "timeout": "3 seconds"}
    description = str((await listed(server))["export"].description)
    assert not getattr(found, kind).value
    assert [name for name, words in told.items() if words not in description] == [kind]


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("rate_limit = '2/hour; 9/day'", (RateLimit(2, "1h"), RateLimit(9, "1d"))),
        ("rate_limit = { max_requests = 2, window = '1h' }", (RateLimit(2, "1h"),)),
        ("rate_limit = ['2/hour', { max_requests = 9 }]", (RateLimit(2, "1h"), RateLimit(9))),
        ("concurrency = 3", (Concurrency(3),)),
        ("concurrency = { queue_timeout = '5s' }", (Concurrency(1, queue_timeout=5),)),
        ("concurrency = { queue_timeout = 0, max_queued = 0 }", (Concurrency(1, max_queued=0),)),
        ("concurrency = { max_queued = 'off' }", (Concurrency(1),)),
        ("concurrency = [1, { key = 'shell' }]", (Concurrency(1), Concurrency(1, key="shell"))),
        ("timeout = 3", Timeout(3)),
        ("timeout = '250ms'", Timeout(0.25)),
        ("timeout = { execute = 3, cancel_after = 0 }", Timeout(3, cancel_after=0)),
        ("timeout = { execute = 3, cancel_after = 'off' }", Timeout(3)),
    ],
)
def test_a_limit_of_a_tool_has_every_form_that_its_option_has(
    text: str, limits: object, tmp_path: Path
) -> None:
    server = FrontMCP("desk", tools=[export], config=file_of(tmp_path, f"[tools.export]\n{text}"))
    kind = text.partition(" ")[0]
    ruling = getattr(in_force(server, "export"), kind)
    assert (ruling.value, ruling.origin) == (limits, Origin("file"))


async def test_describing_is_as_the_file_says() -> None:
    limited = tool(rate_limit="1/hour", describe_limits=False)(export)
    config = {"tools": {"export": {"describe_limits": True}, "merge": {"describe_limits": False}}}
    server = FrontMCP("desk", tools=[limited, tool(rate_limit="1/hour")(merge)], config=config)
    seen = await listed(server)
    assert "1 call per hour" in str(seen["export"].description)
    assert seen["merge"].description == "Merge."
    assert seen["merge"].meta is None


def test_priority_and_cancelling_are_as_the_file_says() -> None:
    config = {"tools": {"export": {"priority": "control", "on_cancel": "cancel"}}}
    server = FrontMCP("desk", tools=[export], throttle=Throttle(default_timeout=3), config=config)
    plan = server.mcp.entries["export"].plan
    assert (plan.control, plan.cancels, plan.timeout_s) == (True, True, None)
    assert server.mcp.entries["export"].is_inline
    found = in_force(server, "export")
    assert (found.priority.value, found.on_cancel.value) == ("control", "cancel")


def test_a_reading_tool_is_only_told_when_the_file_says_so() -> None:
    config = {"tools": {"export": {"on_cancel": "abort"}}}
    server = FrontMCP("desk", tools=[tool(read_only=True)(export)], config=config)
    entry = server.mcp.entries["export"]
    assert (entry.plan.cancels, entry.is_inline) == (False, False)


async def test_tools_that_come_later_have_their_overrides(tmp_path: Path) -> None:
    path = file_of(
        tmp_path, "".join(f"[tools.{name}]\nrate_limit = '1/hour'\n" for name in ("a", "b", "c", "d"))
    )
    server = FrontMCP("desk", config=path, mcp_options={"tools": [SdkTool.from_function(export, name="d")]})
    server.tool(name="a")(export)
    server.mcp.add_tool(export, name="b")
    server.mcp.add_tool(threaded, name="c")
    seen = await listed(server)
    assert all("1 call per hour" in str(seen[name].description) for name in "abcd")
    for name in "abcd":
        assert [(await call(server, name)).is_error for _ in range(2)] == [False, True]


# -------------------------------------------------------------------------------------------- enabled = false


async def test_a_disabled_tool_is_neither_listed_nor_known() -> None:
    @tool
    async def outer(ctx: ToolContext) -> str:
        return text_of(await ctx.call_tool("export", {}))

    off = {"enabled": False}
    config = {"tools": {"export": off, "merge": off, "sdk": off, "ready": off}}
    server = FrontMCP(
        "desk",
        apps=[App("tickets", tools=[export])],
        tools=[outer],
        config=config,
        mcp_options={"tools": [SdkTool.from_function(export, name="ready")]},
    )
    server.tool(merge)
    server.mcp.add_tool(export, name="sdk")
    assert list(await listed(server)) == ["outer"]
    for name in config["tools"]:
        assert text_of(await call(server, name)) == f"Unknown tool: {name}"
    assert text_of(await call(server, "outer")) == "Unknown tool: export"
    assert server.guard.statistics().unknown == 5
    assert not in_force(server, "export").enabled.value
    assert list(server.guard.plans) == ["outer"]


async def test_a_tool_that_is_enabled_by_name_is_served() -> None:
    server = FrontMCP("desk", tools=[export], config={"tools": {"export": {"enabled": True}}})
    assert list(await listed(server)) == ["export"]


def test_a_disabled_tool_takes_part_in_the_agreement_on_keys() -> None:
    one = tool(concurrency=Concurrency(1, key="shell"))(export)
    two = tool(concurrency=Concurrency(2, key="shell"))(merge)
    for disabled in ("export", "merge"):
        with pytest.raises(ConfigurationError, match=r'key "shell": tools "export", "merge" disagree'):
            FrontMCP("desk", tools=[one, two], config={"tools": {disabled: {"enabled": False}}})


def test_a_disabled_tool_keeps_its_name() -> None:
    config = {"tools": {"export": {"enabled": False}}}
    with pytest.raises(
        ConfigurationError, match='two tools are called "export": one of app "a" and one of app'
    ):
        FrontMCP("desk", apps=[App("a", tools=[export]), App("b", tools=[export])], config=config)


# ------------------------------------------------------------------------------------------------------- keys


def shell(number: int, **options: Any) -> Concurrency:
    return Concurrency(number, key="shell", **options)


def test_the_number_of_a_key_holds_for_every_tool_that_names_it() -> None:
    tools: list[Any] = [
        tool(concurrency=[shell(2, queue_timeout=None, partition_by="user_id"), Concurrency(7)])(export),
        tool(concurrency=shell(2, queue_timeout=5, max_queued=3, partition_by="user_id"))(merge),
    ]
    server = FrontMCP("desk", tools=tools, config={"concurrency": {"keys": {"shell": 8}}})
    first, own = in_force(server, "export").concurrency.value
    [second] = in_force(server, "merge").concurrency.value
    assert (first.max_concurrent, first.partition_by, first.queue_timeout) == (8, "user_id", 30)
    assert second == shell(8, queue_timeout=5, max_queued=3, partition_by="user_id")
    assert own == Concurrency(7)
    assert in_force(server, "export").keys_from_file == ("shell",)


def test_the_number_of_a_key_heals_a_disagreement_about_it() -> None:
    tools: list[Any] = [tool(concurrency=shell(1))(export), tool(concurrency=shell(2))(merge)]
    with pytest.raises(ConfigurationError, match="disagree"):
        FrontMCP("desk", tools=tools)
    server = FrontMCP("desk", tools=tools, config={"concurrency": {"keys": {"shell": 3}}})
    numbers = [in_force(server, name).concurrency.value[0].max_concurrent for name in ("export", "merge")]
    assert numbers == [3, 3]


@pytest.mark.parametrize("off", [0, "off", None])
async def test_the_limit_of_a_key_can_be_lifted(off: object) -> None:
    tools: list[Any] = [tool(concurrency=shell(1))(export), tool(concurrency=shell(2))(merge)]
    server = FrontMCP("desk", tools=tools, config={"concurrency": {"keys": {"shell": off}}})
    assert [each.description for each in (await listed(server)).values()] == ["Export.", "Merge."]
    assert server.mcp.entries["export"].plan.slots == ()
    assert str(in_force(server, "export").concurrency.origin) == "key (file)"


def test_the_number_of_a_key_holds_for_the_tool_whose_name_it_is() -> None:
    """A key equal to a tool's name joins that tool's limit, so one number has to hold for both."""
    joining = tool(concurrency=Concurrency(2, key="export"))(merge)
    config = {"concurrency": {"keys": {"export": 3}}}
    own = tool(concurrency=[2, 9])(export)
    server: FrontMCP
    throttle: Throttle | None
    first: Any
    for throttle, first in ((None, own), (Throttle(default_concurrency=2), export)):
        for tools in ([first, joining], [joining, first]):
            server = FrontMCP("desk", tools=tools, throttle=throttle, config=config)
            for name in ("export", "merge"):
                assert in_force(server, name).concurrency.value[0].max_concurrent == 3
    assert in_force(server, "export").keys_from_file == ("export",)
    server = FrontMCP("desk", tools=[own, joining], config=config)
    assert in_force(server, "export").concurrency.value == (Concurrency(3), Concurrency(9))


def test_lifting_a_key_lifts_the_limit_of_the_tool_whose_name_it_is() -> None:
    tools: list[Any] = [tool(concurrency=2)(export), tool(concurrency=Concurrency(2, key="export"))(merge)]
    server = FrontMCP("desk", tools=tools, config={"concurrency": {"keys": {"export": 0}}})
    server.mcp.check_config()
    found = in_force(server, "export")
    assert (found.concurrency.value, str(found.concurrency.origin)) == ((), "key (file)")
    assert server.mcp.entries["merge"].plan.slots == ()


def test_a_key_that_a_tool_names_in_the_file_has_the_number_of_the_file() -> None:
    config = {
        "concurrency": {"keys": {"shell": 4}},
        "tools": {"export": {"concurrency": {"key": "shell"}}},
    }
    server = FrontMCP("desk", tools=[export, tool(concurrency=shell(9))(merge)], config=config)
    server.mcp.check_config()
    assert in_force(server, "export").concurrency.value == (shell(4),)


# ------------------------------------------------------------------------ names that the server does not have


def test_a_tool_that_is_not_there_is_an_error_once_the_server_is_served(tmp_path: Path) -> None:
    path = file_of(tmp_path, "[tools.exprt]\ntimeout = 3")
    server = FrontMCP("desk", tools=[export, merge], config=path)
    for serve in (server.connect, server.http_app, server.run, lambda: server.run("http", port=0)):
        with pytest.raises(ConfigurationError) as refused:
            serve()
        assert str(refused.value) == (
            f"{path}: [tools.exprt]: the server has no tool 'exprt'; did you mean 'export'?"
        )
    server.mcp.add_tool(export, name="exprt")
    server.http_app()


def test_a_tool_that_was_removed_is_no_mistake_of_the_file() -> None:
    server = FrontMCP("desk", tools=[export], config={"tools": {"export": {"timeout": 3}}})
    server.mcp.remove_tool("export")
    server.connect()
    assert not server.mcp.in_force


def test_a_server_without_tools_says_so() -> None:
    server = FrontMCP("desk", config={"tools": {"export": {"timeout": 3}}})
    with pytest.raises(ConfigurationError, match="no tool 'export'; it has none"):
        server.connect()


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("shel", "no tool names the key 'shel'; did you mean 'shell'?"),
        (
            "merge",
            "no tool names the key 'merge'; to limit the tool of that name, give [tools.merge] concurrency",
        ),
    ],
)
def test_a_key_that_nobody_names_is_an_error_once_the_server_is_served(key: str, message: str) -> None:
    tools: list[Any] = [tool(concurrency=shell(1))(export), tool(concurrency=2)(merge)]
    server = FrontMCP("desk", tools=tools, config={"concurrency": {"keys": {key: 3}}})
    with pytest.raises(ConfigurationError) as refused:
        server.connect()
    assert str(refused.value) == f"config: [concurrency.keys]: {message}"


def test_all_unknown_names_are_told_at_once() -> None:
    config = {"concurrency": {"keys": {"shell": 1}}, "tools": {"b": {}, "c": {"enabled": False}}}
    server = FrontMCP("desk", tools=[export], config=config)
    with pytest.raises(ConfigurationError) as refused:
        server.connect()
    assert all(f"'{name}'" in str(refused.value) for name in ("b", "c", "shell"))
    assert "no tool names any" in str(refused.value)


# ------------------------------------------------------------------------------------------------ `def` tools


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"timeout": {"execute": 3, "cancel_after": 1}},
            'timeout.cancel_after: 1.0 is not allowed on a "def"',
        ),
        ({"on_cancel": "cancel"}, "on_cancel: 'cancel' is not allowed on a \"def\" tool"),
    ],
)
@pytest.mark.parametrize("add", ["tools", "server.tool", "server.mcp"])
def test_a_thread_cannot_be_cancelled_by_the_file_either(
    said: Mapping[str, object], message: str, add: str
) -> None:
    config = {"tools": {"threaded": said}}
    empty = FrontMCP("desk", config=config)
    ways: dict[str, Callable[[], object]] = {
        "tools": lambda: FrontMCP("desk", tools=[threaded], config=config),
        "server.tool": lambda: empty.tool(threaded),
        "server.mcp": lambda: empty.mcp.add_tool(threaded),
    }
    with pytest.raises(ConfigurationError) as refused:
        ways[add]()
    assert f"config: [tools.threaded]: {message}" in str(refused.value)


def test_a_default_that_cancels_is_refused_with_the_def_tool_it_would_hold_for() -> None:
    throttle = Throttle(default_timeout=Timeout(3, cancel_after=1))
    with pytest.raises(ConfigurationError) as refused:
        FrontMCP("desk", tools=[export, threaded], throttle=throttle)
    assert 'tool "threaded": Throttle.default_timeout.cancel_after: 1.0 is not allowed' in str(refused.value)
    assert "give the tool a timeout of its own" in str(refused.value)


def test_a_default_that_cannot_hold_is_found_while_limits_are_off() -> None:
    throttle = Throttle(enabled=False, default_timeout=Timeout(3, cancel_after=1))
    with pytest.raises(ConfigurationError, match=r"default_timeout\.cancel_after"):
        FrontMCP("desk", tools=[threaded], throttle=throttle)


def test_a_default_of_the_file_that_cancels_is_named_as_such(tmp_path: Path) -> None:
    path = file_of(tmp_path, "[throttle]\ndefault_timeout = { execute = 3, cancel_after = 1 }")
    with pytest.raises(ConfigurationError) as refused:
        FrontMCP("desk", tools=[threaded], config=path)
    assert f'tool "threaded": {path}: [throttle]: default_timeout.cancel_after: 1.0' in str(refused.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"timeout": 5}, {}), ({"timeout": None}, {}), ({"priority": "control"}, {}), ({}, {"timeout": 0})],
)
def test_a_default_that_cancels_is_no_matter_for_a_def_tool_with_a_timeout_of_its_own(
    options: dict[str, Any], said: dict[str, Any]
) -> None:
    throttle = Throttle(default_timeout=Timeout(3, cancel_after=1))
    made = tool(**options)(threaded)
    server = FrontMCP("desk", tools=[made], throttle=throttle, config={"tools": {"threaded": said}})
    assert server.mcp.entries["threaded"].plan.cancel_after_s is None


# -------------------------------------------------------------------------------------- FrontMCP's own object

THEIRS: dict[str, Any] = {
    "enabled": True,
    "keyPrefix": "mcp:guard:",
    "global": {"maxRequests": 1000, "windowMs": 60_000, "partitionBy": "ip"},
    "globalConcurrency": {"maxConcurrent": 20, "queueTimeoutMs": 2500},
    "defaultRateLimit": {"maxRequests": 2, "windowMs": 3_600_000, "partitionBy": "userId"},
    "defaultConcurrency": {"maxConcurrent": 10},
    "defaultTimeout": {"executeMs": 30_000},
    "ipFilter": {
        "allowList": ["10.0.0.0/8", "2001:db8::/32"],
        "denyList": ["192.0.2.1"],
        "defaultAction": "deny",
        "trustProxy": False,
        "trustedProxyDepth": 2,
    },
}
OURS = Throttle(
    key_prefix="mcp:guard",
    global_rate_limit=RateLimit(1000, 60, "ip"),
    global_concurrency=Concurrency(20, queue_timeout=2.5),
    default_rate_limit=RateLimit(2, "1h", "user_id"),
    default_concurrency=10,
    default_timeout=30,
    ip_filter=IPFilter(allow=["10.0.0.0/8", "2001:db8::/32"], deny=["192.0.2.1"], default="deny"),
)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("way", ["json file", "mapping", "throttle"])
def test_a_throttle_of_frontmcp_loads_unchanged(way: str, wrapped: bool, tmp_path: Path) -> None:
    document = {"throttle": THEIRS} if wrapped else THEIRS
    before = json.dumps(document)
    if way == "throttle":
        found = Settings.of(THEIRS).throttle
    elif way == "mapping":
        found = Settings.of(None, document).throttle
    else:
        found = Settings.of(None, file_of(tmp_path, before, "throttle.json")).throttle
    assert found == OURS
    assert json.dumps(document) == before


async def test_limits_of_frontmcp_are_enforced(tmp_path: Path) -> None:
    path = file_of(tmp_path, '{"enabled": true, "defaultRateLimit": {"maxRequests": 2}}', "throttle.json")
    server = FrontMCP("desk", tools=[export], config=path)
    assert [(await call(server, "export")).is_error for _ in range(3)] == [False, False, True]


def test_frontmcps_throttle_turned_off_is_off() -> None:
    assert throttle_of({"enabled": False}) == Throttle(enabled=False)


def test_both_vocabularies_may_stand_in_one_object() -> None:
    made = throttle_of(None, {"defaultTimeout": {"executeMs": 500.0}, "mode": "observe", "max_keys": 9})
    assert made == Throttle(default_timeout=0.5, mode="observe", max_keys=9)


@pytest.mark.parametrize(
    ("storage", "uri"),
    [
        ({"type": "memory", "memory": {"enableSweeper": False}}, None),
        ({"type": "redis", "redis": {"url": "rediss://u:p@store:6380/1"}}, "rediss://u:p@store:6380/1"),
        ({"redis": {"config": {"host": "store"}}}, "redis://store:6379/0"),
        (
            {"type": "redis", "redis": {"config": {"host": "::1", "port": 7, "password": "a/b", "db": 3}}},
            "redis://:a%2Fb@[::1]:7/3",
        ),
        ({"provider": "redis", "host": "store", "port": 6380, "tls": True}, "rediss://store:6380/0"),
        ({"provider": "redis", "host": "store", "password": None}, "redis://store:6379/0"),
    ],
)
def test_frontmcps_storage_becomes_a_uri(storage: dict[str, Any], uri: str | None) -> None:
    made = Throttle(**translated({"storage": {**storage, "fallback": "memory"}}))  # type: ignore[arg-type]
    assert (made.storage, made.fallback, made.key_prefix) == (uri, "memory", "frontmcp")


def test_all_prefixes_of_frontmcps_storage_become_one() -> None:
    storage = {"type": "redis", "prefix": "prod:", "redis": {"url": "redis://store", "keyPrefix": "desk:"}}
    assert translated({"storage": storage, "keyPrefix": "mcp:guard:"})["key_prefix"] == "desk:prod:mcp:guard"
    assert translated({"storage": storage})["key_prefix"] == "desk:prod"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"defualtTimeout": {}}, "'defualtTimeout'"),
        ({"defaultTimeout": {"executeMs": 0}}, "Timeout.execute: 0.0 is not allowed"),
        (
            {"defaultTimeout": {"executeMs": 1.5}},
            "defaultTimeout: executeMs: 1.5 is not allowed; give whole milli",
        ),
        ({"defaultTimeout": {"executeMs": True}}, "executeMs: True is not allowed"),
        ({"defaultTimeout": {"executeMs": "30000"}}, "executeMs: '30000' is not allowed"),
        ({"defaultTimeout": {"executeMs": 10**400}}, "executeMs: "),
        ({"defaultTimeout": {"executeMs": float("nan")}}, "executeMs: nan is not allowed"),
        (
            {"defaultTimeout": {"executeMs": 1, "execute": 1}},
            "'executeMs' and 'execute' are two names for one field",
        ),
        (
            {"defaultTimeout": {}, "default_timeout": {}},
            "'defaultTimeout' and 'default_timeout' are two names",
        ),
        ({"global": {"maxRequests": 0}}, "RateLimit.max_requests: 0 is not allowed"),
        ({"global": {"maxRequests": 1, "windowMs": 50}}, "RateLimit.window: 0.05 is not allowed"),
        (
            {"global": {"maxRequests": 1, "partitionBy": "user"}},
            "'user' is not allowed; give 'global', 'ip',",
        ),
        ({"globalConcurrency": {"queueTimeoutMs": -1}}, "Concurrency.queue_timeout: -0.001 is not allowed"),
        (
            {"ipFilter": {"trustProxy": "yes"}},
            "ipFilter: trustProxy: 'yes' is not allowed; give True or False",
        ),
        ({"ipFilter": {"trustedProxyDepth": 0}}, "ipFilter: trustedProxyDepth: 0 is not allowed"),
        ({"ipFilter": {"denyList": ["nowhere"]}}, "IPFilter.deny[0]: 'nowhere' is not allowed"),
        ({"ipFilter": {"trustProxy": True}}, "ipFilter.trustProxy: True does not say whom to trust"),
        ({"storage": {}}, "storage: type: 'auto' is not allowed; give 'memory' or 'redis'"),
        ({"storage": {"type": "vercel-kv"}}, "storage: type: 'vercel-kv' is not allowed"),
        ({"storage": {"type": "memory", "redis": {}}}, "storage: there is no field 'redis' for 'memory'"),
        (
            {"storage": {"type": "memory", "memory": {"maxEntries": 9}}},
            "storage: memory.maxEntries drops live counts",
        ),
        (
            {"storage": {"type": "redis", "redis": {"url": "redis://x", "config": {"host": "y"}}}},
            "the url says where",
        ),
        ({"storage": {"type": "redis", "redis": {"client": 1}}}, "storage: there is no field 'client'"),
        ({"storage": {"type": "redis", "redis": {"config": {"port": 0}}}}, "storage: port: 0 is not allowed"),
    ],
)
def test_what_frontmcp_has_and_we_have_not_is_refused(given: dict[str, Any], message: str) -> None:
    for place, arguments in (("FrontMCP.throttle", (given,)), ("config", (None, {"throttle": given}))):
        with pytest.raises(ConfigurationError) as refused:
            Settings.of(*arguments)
        assert message in str(refused.value)
        assert place in str(refused.value)


def test_frontmcps_trust_in_a_proxy_holds_with_the_networks_that_the_server_trusts() -> None:
    given = {"ipFilter": {"defaultAction": "deny", "trustProxy": True}}
    for arguments in ((given,), (None, {"throttle": given})):
        made = Settings.of(*arguments, trusts_proxies=True).throttle
        assert made == Throttle(ip_filter=IPFilter(default="deny"))
    FrontMCP("desk", throttle=given, trusted_proxies=["127.0.0.1"])


# ---------------------------------------------------------------------------------------- where it comes from


@pytest.mark.parametrize(
    ("layer", "via", "text"),
    [
        ("code", "own", "code"),
        ("file", "own", "file"),
        ("environment", "own", "environment"),
        ("built-in", "own", "built-in"),
        ("code", "default", "default"),
        ("file", "default", "default (file)"),
        ("code", "global", "global"),
        ("file", "global", "global (file)"),
        ("file", "key", "key (file)"),
        ("code", "off", "off"),
        ("environment", "off", "off (environment)"),
    ],
)
def test_an_origin_reads_as_a_word_or_two(layer: Any, via: Any, text: str) -> None:
    assert str(Origin(layer, via)) == text


def origins(found: ToolInForce) -> dict[str, str]:
    kinds = ("rate_limit", "concurrency", "timeout", "global_rate_limit", "global_concurrency")
    return {kind: str(getattr(found, kind).origin) for kind in kinds}


def test_every_limit_says_where_it_comes_from() -> None:
    tools: list[Any] = [
        tool(rate_limit="1/hour", concurrency=shell(1), timeout=None)(export),
        tool(priority="control")(merge),
        threaded,
    ]
    throttle = Throttle(default_rate_limit="9/hour", default_timeout=9, global_rate_limit="99/hour")
    config = {
        "throttle": {"default_timeout": 8, "global_concurrency": 5, "default_concurrency": "off"},
        "concurrency": {"max_active": 90, "keys": {"shell": 2}},
        "tools": {"export": {"rate_limit": "2/hour"}, "merge": {"describe_limits": False}},
    }
    server = FrontMCP("desk", tools=tools, throttle=throttle, config=config)
    assert origins(in_force(server, "export")) == {
        "rate_limit": "file",
        "concurrency": "key (file)",
        "timeout": "code",
        "global_rate_limit": "global",
        "global_concurrency": "global (file)",
    }
    assert set(origins(in_force(server, "merge")).values()) == {"built-in"}
    assert origins(in_force(server, "threaded")) == {
        "rate_limit": "default",
        "concurrency": "default (file)",
        "timeout": "default (file)",
        "global_rate_limit": "global",
        "global_concurrency": "global (file)",
    }
    control = in_force(server, "merge")
    assert (str(control.priority.origin), str(control.describe_limits.origin)) == ("code", "file")
    found = server.mcp.config.origins
    assert {name: str(found[name]) for name in ("default_timeout", "admission.max_active", "lease")} == {
        "default_timeout": "file",
        "admission.max_active": "file",
        "lease": "built-in",
    }
    assert str(found["admission.reserved"]) == "built-in"


def test_limits_that_are_off_say_who_turned_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRONTMCP_THROTTLE", "off")
    tools: list[Any] = [tool(rate_limit="1/hour", timeout=3)(export), merge]
    throttle = Throttle(default_timeout=9, global_rate_limit="9/hour")
    server = FrontMCP("desk", tools=tools, throttle=throttle)
    found = in_force(server, "export")
    assert (found.rate_limit.value, str(found.rate_limit.origin)) == ((), "off (environment)")
    assert (found.timeout.value, str(found.timeout.origin)) == (Timeout(3), "code")
    assert str(in_force(server, "merge").timeout.origin) == "off (environment)"
    assert str(found.global_rate_limit.origin) == "off (environment)"


def test_limits_that_are_only_observed_are_told_to_the_operator() -> None:
    limited = tool(rate_limit="1/hour")(export)
    server = FrontMCP("desk", tools=[limited], config={"throttle": {"mode": "observe"}})
    assert in_force(server, "export").rate_limit.value == (RateLimit(1, "1h"),)


@pytest.mark.parametrize("describes", [True, False])
def test_describing_says_where_it_comes_from(describes: bool) -> None:
    tools: list[Any] = [tool(describe_limits=True)(export), merge]
    server = FrontMCP("desk", tools=tools, describe_limits=describes)
    by_tool = {name: in_force(server, name).describe_limits for name in ("export", "merge")}
    assert str(by_tool["export"].origin) == "code"
    assert by_tool["merge"].value is describes
    assert str(by_tool["merge"].origin) == ("built-in" if describes else "default")


def test_a_partition_function_stays_with_a_key_whose_number_changes() -> None:
    tools: list[Any] = [tool(concurrency=shell(1, partition_by=by_user))(each) for each in (export, merge)]
    server = FrontMCP("desk", tools=tools, config={"concurrency": {"keys": {"shell": 5}}})
    assert in_force(server, "merge").concurrency.value == (shell(5, partition_by=by_user),)


def test_a_file_can_be_read_without_a_server(tmp_path: Path) -> None:
    overrides = Overrides.load(
        file_of(tmp_path, "[tools.export]\nenabled = false\n[concurrency.keys]\nshell = 2")
    )
    assert overrides.tool("export").enabled is False
    assert overrides.keys == {"shell": 2}
    assert overrides.source == str(tmp_path / FILE_NAME)


def test_a_section_that_json_says_nothing_about_changes_nothing() -> None:
    assert Settings.of(None, {"throttle": None}).throttle is None


def test_an_error_that_code_and_file_make_together_names_the_file(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text('concurrency = "off"\n')
    server = FrontMCP("together", config=file)
    with pytest.raises(ConfigurationError, match=r"queue_timeout None .*limits\.toml"):

        @server.tool(concurrency=Concurrency(1, queue_timeout=None))
        async def slow() -> None: ...


def test_a_switch_that_is_not_understood_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FRONTMCP_THROTTLE", "false")
    assert FrontMCP("switched").guard.throttle is None
    assert "FRONTMCP_THROTTLE: 'false' says nothing" in caplog.text
