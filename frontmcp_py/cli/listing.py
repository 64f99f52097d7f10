"""`frontmcp list`: which limits are in force, and where each comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer
from rich.table import Table

from frontmcp_py.cli import target as targets
from frontmcp_py.cli.configured import CONFIG_HELP, load
from frontmcp_py.cli.output import Failure, one_line, say_json, stdout
from frontmcp_py.config import Origin, Settings, ToolInForce
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import Admission, Concurrency, PartitionBy, RateLimit, Timeout
from frontmcp_py.server import FrontMCP

_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def list_tools(
    target: Annotated[str, typer.Argument(metavar="TARGET", help=targets.HELP, show_default=False)],
    config: Annotated[Path | None, typer.Option(metavar="FILE", help=CONFIG_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tools as JSON.")] = False,
) -> None:
    """Show a server's tools with the limits in force, and where each limit comes from."""
    place = targets.Target.of(target)
    try:
        server = load(place, config)
        server.mcp.check_config()
    except ConfigurationError as error:
        raise Failure(str(error)) from error
    tools = server.mcp.in_force.values()
    if as_json:
        admission = _admission(server)
        say_json(
            {
                "service": server.name,
                "config": server.mcp.config.overrides.source or None,
                "admission": _plain(admission),
                "storage": None if server.guard.storage is None else server.guard.storage.where,
                "tools": [_data(tool) for tool in tools],
            }
        )
        return
    console = stdout()
    console.print(_table(tools), soft_wrap=False)
    for line in _footnotes(server, tools):
        console.print(line, markup=False)


def _table(tools: Iterable[ToolInForce]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("tool", "rate limit", "at once", "timeout", "priority"):
        table.add_column(column)
    for tool in tools:
        name = tool.name if tool.enabled.value else f"{tool.name} (off, {tool.enabled.origin})"
        table.add_row(
            one_line(name),
            _cell([_rate(each) for each in tool.rate_limit.value], tool.rate_limit.origin),
            _cell(
                [_slot(each) for each in tool.concurrency.value if each.max_concurrent],
                tool.concurrency.origin,
            ),
            _cell(_timeout(tool.timeout.value), tool.timeout.origin),
            _cell([tool.priority.value], tool.priority.origin),
        )
    return table


def _cell(limits: list[str], origin: Origin) -> str:
    """The limits and who said so; where nobody has said anything, a dash."""
    shown = "; ".join(limits)
    if not shown:
        return "-" if origin.layer == "built-in" else f"- [{origin}]".replace("[", r"\[")
    return shown if origin.layer == "built-in" else rf"{shown} \[{origin}]"


def _rate(rate: RateLimit) -> str:
    strategy = "" if rate.strategy == "fixed-window" else f", {rate.strategy}"
    window = _seconds(rate.window_ms / 1000).removeprefix("1 ")
    return f"{rate.max_requests} per {window}{_by(rate.partition_by)}{strategy}"


def _slot(slot: Concurrency) -> str:
    key = "" if slot.key is None else f", key {one_line(slot.key)}"
    wait = f", waits {_seconds(slot.queue_timeout)}" if slot.queue_timeout else ""
    return f"{slot.max_concurrent}{key}{_by(slot.partition_by)}{wait}"


def _timeout(timeout: Timeout | None) -> list[str]:
    if timeout is None:
        return []
    cancels = (
        "" if timeout.cancel_after is None else f", cancelled after {_seconds(timeout.cancel_after)} more"
    )
    return [f"{_seconds(timeout.execute)}{cancels}"]


def _by(partition_by: PartitionBy) -> str:
    if partition_by == "global":
        return ""
    return f" by {partition_by if isinstance(partition_by, str) else 'function'}"


def _seconds(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.12g} s"


def _footnotes(server: FrontMCP, tools: Iterable[ToolInForce]) -> list[str]:
    """What holds for all tools together."""
    lines: list[str] = []
    settings = server.mcp.config
    first = next((tool for tool in tools if tool.priority.value != "control"), None)
    if first is not None:
        rates = [_rate(each) for each in first.global_rate_limit.value]
        slots = [_slot(each) for each in first.global_concurrency.value if each.max_concurrent]
        if rates:
            lines.append(f"all tools together: {'; '.join(rates)} [{first.global_rate_limit.origin}]")
        if slots:
            lines.append(
                f"all tools together, at once: {'; '.join(slots)} [{first.global_concurrency.origin}]"
            )
    admission = _admission(server)
    if admission is not None:
        lines.append(
            f"admission: {admission.max_active} at once, {admission.reserved} of these for control calls; "
            f"{admission.max_queued} wait, {_seconds(admission.queue_timeout)} at most"
            f"{_from(settings, 'admission')}"
        )
    elif server.guard.throttle is not None and not server.guard.throttle.enabled:
        lines.append(f"the throttle is off{_from(settings, 'enabled')}: no limits but tools' own timeouts")
    else:
        lines.append(f"admission: off{_from(settings, 'admission')}")
    storage = server.guard.storage
    if storage is not None:
        without = "each instance counts alone" if server.guard.counts_alone else "calls are refused"
        what = (
            "shared in" if storage.shares_slots else "slots stay in this process, rate limits are shared in"
        )
        lines.append(f"{what} {storage.where}{_from(settings, 'storage')}; while it is away, {without}")
    if server.guard.throttle is not None and server.guard.throttle.mode == "observe":
        lines.append(f"nothing is refused: the limits are only observed{_from(settings, 'mode')}")
    return ["", *lines]


def _from(settings: Settings, field: str) -> str:
    origin = settings.origins[field]
    return "" if origin.layer == "built-in" else f" [{origin}]"


def _admission(server: FrontMCP) -> Admission | None:
    throttle = server.guard.throttle
    if throttle is None:
        return Admission()
    return throttle.admission if throttle.enabled else None


def _data(tool: ToolInForce) -> dict[str, Any]:
    rulings = ("enabled", "rate_limit", "concurrency", "timeout", "global_rate_limit", "global_concurrency")
    told = {
        name: {"value": _plain(getattr(tool, name).value), "from": str(getattr(tool, name).origin)}
        for name in (*rulings, "priority", "on_cancel", "describe_limits")
    }
    return {"name": tool.name, "owner": tool.owner, **told}


def _plain(value: Any) -> Any:
    """A limit as JSON has it; a partition function is told by its name."""
    if isinstance(value, tuple):
        return [_plain(each) for each in cast("tuple[object, ...]", value)]
    if isinstance(value, RateLimit | Concurrency | Timeout | Admission):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value) if each.init}
    return getattr(value, "__qualname__", repr(value)) if callable(value) else value
