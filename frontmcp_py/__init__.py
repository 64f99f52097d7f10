"""MCP servers that survive their users.

A tool says, next to its code, how often it may run, how many at once and for how long; the server enforces
it, tells the model about it, and stays responsive when it is flooded. How a call flows, and where to read on:

    @tool (tool) ─► App (app) ─► FrontMCP (server) ─► wire ─► Guard (guard/__init__: the questions, in order)
                                     │                          │
                              the SDK's MCPServer               ├ partition   who shares a count?
                       (schemas, transports, clients)           ├ rates       called too often?
                                                                ├ slots       is there a slot, and a place?
                                                                │   └ scheduler   whose turn is it?
                                                                ├ shared      what do other instances say?
                                                                └ deadline    how long may it run?

Over HTTP, `http.door` asks a question before all of these: may this address call? `http.gate` lets requests
in one after the other, `http.endpoints` tells how the server is; `http.serve`, `stdio` and `shutdown` run it,
and drain it when it is told to stop. `policy` holds every limit as a value and every constant, `config` what
an operator's file says about them, `errors` every refusal, `storage` the counts and slots, `context`,
`signal` and `process` what a tool is given, `cli` the command `frontmcp`, `testing` what tests need.

The other side of the wire is `host`: it runs the calls that a model wrote, in the order it wrote them. It
shares the scheduler with the guard and needs no server of this package.
"""

from mcp.server.mcpserver.exceptions import ToolError

from .app import App
from .call import Call, Caller
from .context import ToolContext
from .errors import (
    Cancelled,
    ConcurrencyLimit,
    ConfigurationError,
    ExecutionTimeout,
    GuardError,
    GuardStorageUnavailable,
    InternalError,
    IpBlocked,
    IpNotAllowed,
    LeaseLost,
    OutputLimit,
    Overloaded,
    PartitionError,
    QueueTimeout,
    RateLimitExceeded,
)
from .guard import Guard
from .policy import Admission, Concurrency, IPFilter, Policy, RateLimit, Throttle, Timeout
from .server import FrontMCP
from .signal import AbortSignal
from .tool import Tool, tool

__all__ = [
    "AbortSignal",
    "Admission",
    "App",
    "Call",
    "Caller",
    "Cancelled",
    "Concurrency",
    "ConcurrencyLimit",
    "ConfigurationError",
    "ExecutionTimeout",
    "FrontMCP",
    "Guard",
    "GuardError",
    "GuardStorageUnavailable",
    "IPFilter",
    "InternalError",
    "IpBlocked",
    "IpNotAllowed",
    "LeaseLost",
    "OutputLimit",
    "Overloaded",
    "PartitionError",
    "Policy",
    "QueueTimeout",
    "RateLimit",
    "RateLimitExceeded",
    "Throttle",
    "Timeout",
    "Tool",
    "ToolContext",
    "ToolError",
    "tool",
]
