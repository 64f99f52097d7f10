"""What a host is told about its tools: what it becomes, and what is said about what cannot be."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mcp_types import Tool

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.host import Host, HostConfig, HostConfigOption, ToolCall, ToolConfig

OF_A_DESIGN = """
[conversation.tools.fs_delete_file]
concurrency = 1
fan_out = { on_error = "stop" }

[conversation.tools.rfd_draft]
concurrency = { key = "rfd" }

[conversation.tools.rfd_renumber]
concurrency = { key = "rfd" }

[conversation.tools.github_issues]
concurrency = { key = "github", limit = 4 }

[conversation.tools.github_pulls]
concurrency = { key = "github", limit = 4 }
"""


def tool(**fields: object) -> ToolConfig:
    """What holds for a tool with this table."""
    return HostConfig.of({"t": fields}).tool("t")


def said_of(config: object) -> str:
    """What is said about a configuration that cannot be."""
    with pytest.raises(ConfigurationError) as caught:
        HostConfig.of(config)  # type: ignore[arg-type]
    return str(caught.value)


# ------------------------------------------------------------------------------------------- what it becomes


@pytest.mark.parametrize(
    ("fields", "key", "limit"),
    [
        ({}, None, 0),
        ({"concurrency": 0}, None, 0),
        ({"concurrency": 1}, "t", 1),
        ({"concurrency": 7}, "t", 7),
        ({"concurrency": 10**6}, "t", 10**6),
        ({"concurrency": {"key": "k", "limit": 4}}, "k", 4),
        ({"concurrency": {"key": "k"}}, "k", 1),
        ({"concurrency": {"key": "k", "limit": 0}}, "k", 0),
    ],
)
def test_concurrency_becomes_a_key_and_a_limit(
    fields: Mapping[str, object], key: str | None, limit: int
) -> None:
    """A number limits the tool under its own name, a table under its key; nothing and 0 limit nothing."""
    config = tool(**fields)
    assert (config.key, config.limit) == (key, limit)


@pytest.mark.parametrize(
    ("fan_out", "is_on", "stops"),
    [
        (True, True, False),
        (False, False, False),
        ({}, True, False),
        ({"enabled": True}, True, False),
        ({"enabled": False}, False, False),
        ({"on_error": "continue"}, True, False),
        ({"on_error": "stop"}, True, True),
        ({"enabled": True, "on_error": "stop"}, True, True),
    ],
)
def test_fan_out_is_a_switch_or_a_table(fan_out: object, is_on: bool, stops: bool) -> None:
    """A table turns it on unless it says otherwise, and only `on_error = "stop"` stops."""
    config = tool(concurrency=1, fan_out=fan_out)
    assert (config.fan_out, config.stops) == (is_on, stops)


def test_a_tool_that_is_not_named_is_enabled_unlimited_and_not_fanned_out() -> None:
    """Whoever says nothing of a tool gets what a host without a configuration does."""
    assert HostConfig.of(None).tool("any") == ToolConfig(True, None, 0, False, False)
    assert HostConfig.of({"other": {"concurrency": 1}}).tool("any") == ToolConfig()


def test_a_star_decides_for_tools_that_do_not_say_it() -> None:
    """`enabled` of the table `*` holds for named and unnamed tools, unless they say it themselves."""
    config = HostConfig.of({"*": {"enabled": False}, "a": {"enabled": True}, "b": {"concurrency": 1}})
    assert [config.tool(name).enabled for name in ("a", "b", "unnamed")] == [True, False, False]
    assert "*" not in config.tools


def test_the_text_of_a_design_is_read_as_it_stands() -> None:
    """Tables under `conversation.tools` become one entry per tool."""
    config = HostConfig.of(OF_A_DESIGN)
    assert dict(config.tools) == {
        "fs_delete_file": ToolConfig(key="fs_delete_file", limit=1, fan_out=True, stops=True),
        "rfd_draft": ToolConfig(key="rfd", limit=1),
        "rfd_renumber": ToolConfig(key="rfd", limit=1),
        "github_issues": ToolConfig(key="github", limit=4),
        "github_pulls": ToolConfig(key="github", limit=4),
    }


def test_what_was_read_cannot_be_changed() -> None:
    """Neither the table of tools nor what was handed in has a hold on it any more."""
    given: dict[str, Any] = {"t": {"concurrency": {"key": "k", "limit": 2}}}
    config = HostConfig.of(given)
    given["t"]["concurrency"]["limit"] = 9
    given["u"] = {}
    assert dict(config.tools) == {"t": ToolConfig(key="k", limit=2)}
    with pytest.raises(TypeError):
        config.tools["u"] = ToolConfig()  # type: ignore[index]


def test_a_configuration_that_was_read_is_taken_as_it_is() -> None:
    """Several hosts may share one."""
    config = HostConfig.of({"t": {"concurrency": 1}})
    assert HostConfig.of(config) is config
    assert Host(config).config is config


# --------------------------------------------------------------------------------------- where it comes from


@pytest.mark.parametrize("text", ["", "  ", "\n", "[t]\n", "t = { concurrency = 1 }", "t.concurrency = 1"])
def test_text_is_told_from_a_path_by_a_line_break_or_an_equals_sign(text: str) -> None:
    """TOML has one or the other; blank text names no tool."""
    assert set(HostConfig.of(text).tools) == ({"t"} if text.strip() else set())


def test_a_file_may_be_given_as_text_or_as_a_path(tmp_path: Path) -> None:
    """Also one whose name has an `=`, as a path, and one that begins with a byte order mark."""
    file = tmp_path / "tools=1.toml"
    file.write_bytes(b"\xef\xbb\xbf[t]\nconcurrency = 3\n")
    plain = tmp_path / "tools.toml"
    plain.write_text("[t]\nconcurrency = 3\n")
    for given in (file, plain, str(plain)):
        assert HostConfig.of(given).tool("t").limit == 3


def test_a_path_may_be_any_that_the_system_knows(tmp_path: Path) -> None:
    """An object whose `__fspath__` is bytes is a path, too."""

    class InBytes(os.PathLike[Any]):
        def __fspath__(self) -> bytes:
            return os.fsencode(tmp_path / "tools.toml")

    (tmp_path / "tools.toml").write_text("[t]\nconcurrency = 3\n")
    assert HostConfig.of(InBytes()).tool("t").limit == 3


@pytest.mark.parametrize("placed", [{"conversation": {"tools": {}}}, {"conversation": {"tools": {"*": {}}}}])
def test_a_place_for_tools_may_be_empty(placed: Mapping[str, object]) -> None:
    """No tool is named, and that is all."""
    assert not HostConfig.of(placed).tools


def test_a_tool_may_be_named_like_the_place_of_tools() -> None:
    """`conversation` is a tool if it has a tool's fields, and may stand in its namesake."""
    config = HostConfig.of(
        {"conversation": {"concurrency": 2}, "t": {"concurrency": {"key": "conversation", "limit": 2}}}
    )
    assert config.tool("conversation") == ToolConfig(key="conversation", limit=2)
    nested = HostConfig.of("[conversation.tools.conversation]\nconcurrency = 2")
    assert nested.tool("conversation") == ToolConfig(key="conversation", limit=2)
    assert set(HostConfig.of({"conversation": {}}).tools) == {"conversation"}
    assert set(HostConfig.of({"tools": {"concurrency": 1}}).tools) == {"tools"}


# ---------------------------------------------------------------------------------------------------- layers


def layered(*layers: object) -> ToolConfig:
    """What holds for a tool when these tables are laid over another."""
    return HostConfig.of([{"t": layer} for layer in layers]).tool("t")


@pytest.mark.parametrize(
    ("layers", "key", "limit"),
    [
        ([{"concurrency": {"key": "k", "limit": 4}}, {"concurrency": 0}], None, 0),
        ([{"concurrency": {"key": "k", "limit": 4}}, {"concurrency": {"limit": 2}}], "k", 2),
        ([{"concurrency": {"key": "k", "limit": 4}}, {"concurrency": {"limit": 0}}], "k", 0),
        ([{"concurrency": {"key": "k", "limit": 4}}, {"concurrency": {"key": "other"}}], "other", 4),
        ([{"concurrency": {"limit": 4}}, {"concurrency": {"key": "k"}}], "k", 4),
        ([{"concurrency": {"key": "k"}}, {"concurrency": 2}], "t", 2),
        ([{"concurrency": 2}, {"concurrency": {"key": "k"}}], "k", 1),
        ([{"concurrency": 2}, {"enabled": True}], "t", 2),
        ([{"concurrency": 2}, {}], "t", 2),
        ([{"concurrency": {"key": "k"}}, {"concurrency": 0}, {"concurrency": {"key": "k"}}], "k", 1),
    ],
)
def test_a_later_layer_overrides_key_by_key(layers: list[object], key: str | None, limit: int) -> None:
    """Tables are laid over tables, everything else replaces what was there, and 0 lifts a limit."""
    config = layered(*layers)
    assert (config.key, config.limit) == (key, limit)


def test_a_later_layer_overrides_every_field_alone() -> None:
    """What it does not name stays, also inside `fan_out`."""
    shipped = {"enabled": False, "concurrency": 1, "fan_out": {"on_error": "stop"}}
    assert layered(shipped, {"enabled": True}) == ToolConfig(True, "t", 1, True, True)
    assert layered(shipped, {"fan_out": False}) == ToolConfig(False, "t", 1, False, True)
    assert layered(shipped, {"fan_out": {"on_error": "continue"}}) == ToolConfig(False, "t", 1, True, False)


def test_layers_may_be_of_every_kind_and_at_either_place(tmp_path: Path) -> None:
    """Text, a path and a mapping are laid over each other; where their tables stand makes no difference."""
    file = tmp_path / "tools.toml"
    file.write_text("[t]\nenabled = false\n['*']\nenabled = false")
    config = HostConfig.of((OF_A_DESIGN, file, {"conversation": {"tools": {"t": {"concurrency": 5}}}}))
    assert config.tool("t") == ToolConfig(False, "t", 5)
    assert config.tool("rfd_draft") == ToolConfig(False, "rfd", 1)
    assert HostConfig.of([]).tools == {}


def test_layers_do_not_change_what_they_were_made_from() -> None:
    """A shipped mapping is the same after something was laid over it."""
    shipped: dict[str, Any] = {
        "t": {"concurrency": {"key": "k", "limit": 4}, "fan_out": {"on_error": "stop"}}
    }
    mine: dict[str, Any] = {"t": {"concurrency": {"limit": 1}, "fan_out": {"on_error": "continue"}}}
    HostConfig.of([shipped, mine])
    assert shipped == {"t": {"concurrency": {"key": "k", "limit": 4}, "fan_out": {"on_error": "stop"}}}
    assert HostConfig.of(shipped).tool("t") == ToolConfig(key="k", limit=4, fan_out=True, stops=True)


def test_a_layer_alone_may_be_incomplete_and_all_together_may_not() -> None:
    """A limit without a key needs a key from below; a disagreement may be settled above."""
    assert "no key" in said_of([{"t": {"concurrency": 3}}, {"t": {"concurrency": {"limit": 2}}}])
    apart = {"a": {"concurrency": {"key": "k", "limit": 1}}, "b": {"concurrency": {"key": "k", "limit": 2}}}
    assert "different limits" in said_of(apart)
    HostConfig.of([apart, {"b": {"concurrency": {"limit": 1}}}])
    HostConfig.of([apart, {"b": {"concurrency": 0}}])


def test_a_layer_that_lifts_a_limit_is_told_what_else_it_has_to_lift() -> None:
    """`on_error = "stop"` of a lower layer does not go away by itself, and the message says how it does."""
    shipped = {"t": {"concurrency": 1, "fan_out": {"on_error": "stop"}}}
    assert 'on_error = "continue"' in said_of([shipped, {"t": {"concurrency": 0}}])
    lifted = HostConfig.of([shipped, {"t": {"concurrency": 0, "fan_out": {"on_error": "continue"}}}])
    assert lifted.tool("t") == ToolConfig(fan_out=True)


# ----------------------------------------------------------------------------------------- one limit per key


def test_tools_that_disagree_about_a_key_are_named_with_their_limits() -> None:
    """Everybody involved is, whether enabled or not, and nobody else."""
    said = said_of(
        {
            "draft": {"concurrency": {"key": "rfd"}},
            "promote": {"concurrency": {"key": "rfd"}, "enabled": False},
            "renumber": {"concurrency": {"key": "rfd", "limit": 3}, "enabled": False},
            "bystander": {"concurrency": 2},
        }
    )
    assert "'rfd'" in said
    assert "1 by 'draft', 'promote'" in said
    assert "3 by 'renumber'" in said
    assert "bystander" not in said


def test_disabled_tools_alone_may_not_disagree() -> None:
    """Enabling one never turns a valid configuration into an invalid one."""
    apart = {
        name: {"enabled": False, "concurrency": {"key": "k", "limit": limit}}
        for name, limit in [("a", 1), ("b", 2)]
    }
    assert "'a'" in said_of(apart)
    assert "'b'" in said_of(apart)
    assert "'a'" in said_of({**apart, "*": {"enabled": False}})


def test_keys_and_names_of_tools_are_one_namespace() -> None:
    """A key that is a tool's name joins the limit of that tool, and has to agree with it."""
    joined = HostConfig.of(
        {"delete": {"concurrency": 2}, "move": {"concurrency": {"key": "delete", "limit": 2}}}
    )
    assert joined.tool("move").key == joined.tool("delete").key == "delete"
    said = said_of({"delete": {"concurrency": 2}, "move": {"concurrency": {"key": "delete"}}})
    assert "2 by 'delete'" in said
    assert "1 by 'move'" in said
    # A tool without a limit uses no key, be it named or not.
    HostConfig.of({"delete": {"concurrency": 0}, "move": {"concurrency": {"key": "delete", "limit": 3}}})


def test_a_key_without_a_limit_has_to_agree_too() -> None:
    """0 is a limit like any other where tools share a key."""
    HostConfig.of({name: {"concurrency": {"key": "k", "limit": 0}} for name in "ab"})
    said = said_of({"a": {"concurrency": {"key": "k", "limit": 0}}, "b": {"concurrency": {"key": "k"}}})
    assert "0 by 'a'" in said
    assert "1 by 'b'" in said


@pytest.mark.parametrize("concurrency", [None, 0, {"key": "k", "limit": 0}])
@pytest.mark.parametrize("enabled", [True, False])
def test_stopping_needs_a_limit(concurrency: object, enabled: bool) -> None:
    """Without one every operation starts at once, so there is nothing to stop. The tool is named."""
    fields: dict[str, object] = {"enabled": enabled, "fan_out": {"on_error": "stop"}}
    if concurrency is not None:
        fields["concurrency"] = concurrency
    said = said_of({"delete": fields})
    assert said.startswith("tool 'delete': fan_out.on_error")
    assert "concurrency = 1" in said


# ------------------------------------------------------------------------------------- what is said about it


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"concurrency": -1}, ("concurrency: -1", "from 0 to 1000000")),
        ({"concurrency": 10**6 + 1}, ("concurrency: 1000001", "from 0 to 1000000")),
        ({"concurrency": True}, ("concurrency: True", "an integer from 0", "key")),
        ({"concurrency": 2.0}, ("concurrency: 2.0", "an integer from 0")),
        ({"concurrency": "rfd"}, ("concurrency: 'rfd'", "key = ")),
        ({"concurrency": [1]}, ("concurrency: [1]",)),
        ({"concurrency": None}, ("concurrency: None",)),
        ({"concurrency": {}}, ("concurrency", "no key")),
        ({"concurrency": {"limit": 4}}, ("concurrency", "'limit': 4", "no key")),
        ({"concurrency": {"key": ""}}, ("concurrency.key: ''", "not blank")),
        ({"concurrency": {"key": " \t"}}, ("concurrency.key:", "not blank")),
        ({"concurrency": {"key": 7}}, ("concurrency.key: 7", "text")),
        ({"concurrency": {"key": None}}, ("concurrency.key: None",)),
        ({"concurrency": {"key": "k", "limit": -1}}, ("concurrency.limit: -1", "from 0 to 1000000")),
        ({"concurrency": {"key": "k", "limit": 1.0}}, ("concurrency.limit: 1.0", "an integer")),
        ({"concurrency": {"key": "k", "limit": True}}, ("concurrency.limit: True", "an integer")),
        ({"concurrency": {"key": "k", "limti": 1}}, ("concurrency", "'limti'", "did you mean 'limit'")),
        ({"concurrency": {"key": "k", "delay": 1}}, ("concurrency", "'delay'", "key, limit")),
        ({"concurency": 1}, ("'concurency'", "did you mean 'concurrency'")),
        ({"fanout": True}, ("'fanout'", "did you mean 'fan_out'")),
        ({"concurency": {"key": "k"}}, ("'concurency'", "did you mean 'concurrency'")),
        ({7: {}}, ("no field 7",)),
        ({"on_error": "stop"}, ("'on_error'", "enabled, concurrency, fan_out")),
        ({1: 1}, ("no field 1",)),
        ({"enabled": 1}, ("enabled: 1", "True or False")),
        ({"enabled": "yes"}, ("enabled: 'yes'", "True or False")),
        ({"fan_out": 1}, ("fan_out: 1", "true, false")),
        ({"fan_out": "stop"}, ("fan_out: 'stop'", 'on_error = "stop"')),
        ({"fan_out": {"on_error": "halt"}}, ("fan_out.on_error: 'halt'", "'continue'", "'stop'")),
        ({"fan_out": {"on_error": None}}, ("fan_out.on_error: None",)),
        ({"fan_out": {"enabled": 1}}, ("fan_out.enabled: 1", "True or False")),
        ({"fan_out": {"onerror": "stop"}}, ("fan_out", "'onerror'", "did you mean 'on_error'")),
        ({"fan_out": {"concurrency": 1}}, ("fan_out.concurrency", "give the tool a concurrency")),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_what_is_wrong_is_named_with_its_tool_and_what_is_allowed(
    fields: dict[object, object], words: tuple[str, ...], enabled: bool
) -> None:
    """Also of a tool that is not enabled."""
    said = said_of({"good": {}, "draft": {"enabled": enabled, **fields}})
    assert said.startswith("tool 'draft': ")
    for word in words:
        assert word in said


@pytest.mark.parametrize("own", ["concurrency", "fan_out"])
def test_a_star_may_not_limit_nor_fan_out(own: str) -> None:
    """That depends on what a tool does, so it is no default."""
    said = said_of({"*": {own: 0 if own == "concurrency" else False}})
    assert said.startswith(f"tool '*': {own} is not allowed")
    assert "did you mean 'enabled'" in said_of({"*": {"enable": True}})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (5, ("config: 5", "TOML text", "path", "mapping", "list")),
        (b"t = {}", ("config: b't = {}'",)),
        (bytearray(b"t"), ("config: ",)),
        ({"t": {}}.keys(), ("config: ",)),
        ([5], ("config[0]: ", "5", "TOML text")),
        ([None], ("config[0]: ", "None")),
        ([[{}]], ("config[0]: ", "[{}]")),
        ([{}, {"t": {"concurrency": -1}}], ("config[1]: tool 't': concurrency: -1",)),
        ([{}, "[t"], ("config[1]: ",)),
        ({"t": 1}, ("tool 't': a tool: 1", "a table")),
        ({"t": [{}]}, ("tool 't'", "a table")),
        ({"t": None}, ("tool 't'", "a table")),
        ({"": {}}, ("the name of a tool: ''", "not blank")),
        ({7: {}}, ("the name of a tool: 7", "text")),
        ({"conversation": {"tools": [1]}}, ("conversation.tools: [1]", "a table")),
        ({"conversation": {"tools": {"t": 1}}}, ("tool 't'", "a table")),
        ({"conversation": {"tool": {}}}, ("conversation: there is no field 'tool'", "did you mean 'tools'")),
        ({"conversation": {"concurency": 1}}, ("conversation", "did you mean 'concurrency'")),
        ({"conversation": {"concurency": 1}, "t": {}}, ("conversation", "did you mean 'concurrency'")),
        (
            {"conversation": {"tools": {}, "enabled": True}},
            ("conversation: there is no field 'enabled'", "tools"),
        ),
        (
            {"conversation": {"tools": {}}, "t": {}, "u": {}},
            ("'t', 'u'", "conversation.tools", "not in both"),
        ),
        ({"conversation": 5}, ("tool 'conversation'", "a table")),
        (
            {"tools": {"t": {"concurrency": 1}}},
            ("tool 'tools'", "no field 't'", "conversation.tools or at the top"),
        ),
    ],
)
def test_what_is_no_configuration_is_refused_with_its_place(config: object, words: tuple[str, ...]) -> None:
    """The layer, the tool or the table is named."""
    said = said_of(config)
    for word in words:
        assert word in said


def test_bad_toml_is_refused_with_its_line(tmp_path: Path) -> None:
    """Of text and of a file, whose path is named once."""
    assert "line 2" in said_of("[t]\nconcurrency = \n")
    assert "not TOML" in said_of("[t]\nconcurrency = \n")
    assert "not TOML" in said_of("[t]\nenabled = true\nenabled = false")
    assert "not TOML" in said_of("t = " + "[" * 100_000)
    file = tmp_path / "tools.toml"
    file.write_text("[t]\n\nconcurrency 1\n")
    assert said_of(file).startswith(f"{file}: not TOML: ")
    assert "line 3" in said_of(file)
    assert said_of(file).count(str(file)) == 1


def test_what_is_wrong_in_a_file_is_named_with_its_path(tmp_path: Path) -> None:
    """In a list of layers with its place there, too."""
    file = tmp_path / "tools.toml"
    file.write_text("[t]\nconcurrency = -1\n")
    assert said_of(file).startswith(f"{file}: tool 't': concurrency: -1")
    assert said_of([{}, file]).startswith(f"config[1]: {file}: tool 't'")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """Missing, a folder, not UTF-8, or no path at all. Text that was meant as TOML gets a hint."""
    missing = tmp_path / "missing.toml"
    assert said_of(missing).startswith(f"{missing}: cannot be read: No such file")
    assert "line break" not in said_of(missing)
    assert "line break or an =" in said_of(str(missing))
    assert "line break or an =" in said_of("[t]")
    assert f"{tmp_path}: cannot be read: Is a directory" in said_of(tmp_path)
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"[t]\n# caf\xe9\n")
    assert said_of(latin).startswith(f"{latin}: not UTF-8: ")
    assert "byte 9" in said_of(latin)
    assert "cannot be read" in said_of("tools\0.toml")
    assert "cannot be read" in said_of("x" * 5000)


def test_a_host_refuses_what_its_configuration_refuses() -> None:
    """Before anything can be run with it."""
    for config in ({"t": {"concurrency": -1}}, "[t"):
        with pytest.raises(ConfigurationError):
            Host(config)


def test_every_form_that_is_promised_is_accepted_by_a_host(tmp_path: Path) -> None:
    """The types say so, and so does running them."""
    file = tmp_path / "tools.toml"
    file.write_text("[t]\nconcurrency = 1\n")
    forms: list[HostConfigOption] = [
        "[t]\nconcurrency = 1",
        str(file),
        file,
        {"t": {"concurrency": 1}},
        ["[t]\nconcurrency = 1"],
        (file, {}),
        HostConfig({"t": ToolConfig(key="t", limit=1)}),
    ]
    for form in forms:
        assert Host(form).config.tool("t") == ToolConfig(key="t", limit=1)


def test_configured_tools_that_do_not_exist_are_named_with_one_of_a_similar_name() -> None:
    """The limit of a name that is misspelt protects nothing."""
    config = HostConfig.of({"delette": {"concurrency": 1}, "move": {"fan_out": True}, "*": {}})
    assert config.strangers(["delete", "move", "other"]) == {
        "delette": "the configuration names a tool 'delette', and there is none; did you mean 'delete'?"
    }
    assert config.strangers(["delette", "move"]) == {}
    assert list(config.strangers([])) == ["delette", "move"]


def test_a_host_warns_once_of_a_tool_that_is_not_among_those_it_advertises(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Host({"delette": {"concurrency": 1}, "gone": {"enabled": False}, "move": {"concurrency": 1}})
    tools = [Tool(name=name, input_schema={"type": "object"}) for name in ("delete", "move", "gone")]
    for _ in range(2):
        assert [tool.name for tool in host.advertise(iter(tools))] == ["delete", "move"]
    assert [(record.name, record.levelname) for record in caplog.records] == [("frontmcp_py.host", "WARNING")]
    assert "'delette'" in caplog.text
    assert "'delete'" in caplog.text
    # Another one is another warning.
    host.advertise(tools[:1])
    assert [record.message.split("'")[1] for record in caplog.records] == ["delette", "gone", "move"]


async def test_a_disabled_tool_is_refused_and_named_to_the_model() -> None:
    """Whether it says so itself or a star does; it is not called."""
    called: list[str] = []

    async def call(name: str, arguments: Mapping[str, object]) -> str:
        called.append(name)
        return "done"

    host = Host({"*": {"enabled": False}, "a": {"enabled": True}, "b": {"concurrency": 1}}, call)
    results = await host.run([ToolCall(str(n), name) for n, name in enumerate(("a", "b", "c"))])
    assert [result.status for result in results] == ["ok", "error", "error"]
    assert "b: this tool is disabled" in results[1].text
    assert called == ["a"]


def test_a_misspelt_field_that_holds_a_table_is_only_told_its_name() -> None:
    """Nothing about where tables stand: this one stands where it ought to."""
    with pytest.raises(ConfigurationError) as caught:
        HostConfig.of({"renumber": {"concurency": {"key": "drafts"}}})
    assert str(caught.value) == (
        "tool 'renumber': there is no field 'concurency'; did you mean 'concurrency'?"
    )
