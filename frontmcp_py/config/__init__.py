"""The operator's file: limits that are changed without touching code, and where each one in force comes from.

`Settings.of` reads what the code says, then the file, then the environment; the later wins, whole value per
kind. For the way of a value:

* `file`: `Overrides` is a file by itself, `[throttle]`, `[concurrency]` and `[tools.NAME]`, checked before it
  meets any code. `frontmcp_json` reads FrontMCP's `throttle` object.
* `settings`: `Settings` is what is in force for a server, and what the file says about its tools.
* `in_force`: `ToolInForce` is what is in force for one tool, each part with its `Origin`; `frontmcp list`
  prints it.
"""

from .file import FILE_NAME, ConfigOption, Overrides, ToolOverride, for_target
from .frontmcp_json import is_bare_throttle, translated
from .in_force import Layer, Origin, Ruling, ToolInForce, Via
from .settings import Settings

__all__ = [
    "FILE_NAME",
    "ConfigOption",
    "Layer",
    "Origin",
    "Overrides",
    "Ruling",
    "Settings",
    "ToolInForce",
    "ToolOverride",
    "Via",
    "for_target",
    "is_bare_throttle",
    "translated",
]
