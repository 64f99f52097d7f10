"""What every reader of a file needs: TOML, tables, names of fields, and messages about them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import cast

from frontmcp_py.errors import ConfigurationError
from frontmcp_py.policy import nearest, not_allowed


def parse_toml(text: str, place: str) -> Mapping[str, object]:
    """The document that a TOML text is.

    Args:
        text: What stands in the file.
        place: Which file that is, for the error.

    Raises:
        ConfigurationError: It is not TOML; the message has the line.
    """
    # Who reads no file does not pay for its parser.
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{place}: not TOML: {error}") from None


def as_table(content: object, place: str) -> Mapping[str, object]:
    """A table, or the error that names the place where one should be."""
    if not isinstance(content, Mapping):
        raise not_allowed(place, content, "a table")
    return cast("Mapping[str, object]", content)


def check_names(given: Iterable[object], valid: Iterable[str]) -> None:
    """Refuse fields that do not exist, naming the nearest one that does."""
    valid = tuple(valid)
    for name in given:
        if name not in valid:
            raise ConfigurationError(f"there is no field {name!r}; {nearest(str(name), valid)}")


def quoted(name: str) -> str:
    """A name as a TOML header has it."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
