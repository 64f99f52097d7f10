"""TARGET: which server a command is about, as `module:object` or `path.py:object`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from frontmcp_py.cli.output import Failure, one_line
from frontmcp_py.errors import ConfigurationError
from frontmcp_py.server import FrontMCP

HELP = "The server: module:object or path.py:object; the object may be left out if there is one server only."


@dataclass(frozen=True, slots=True)
class Target:
    """A server's place.

    Attributes:
        text: As it was given.
        module: The module's name, if it is named so.
        path: The file, if it is named so.
        name: The object in it, dotted; `None` for the only server there is.
    """

    text: str
    module: str | None
    path: Path | None
    name: str | None

    @classmethod
    def of(cls, text: str) -> Target:
        """Read a TARGET.

        Raises:
            Failure: It is neither form.
        """
        if "://" in text:
            raise Failure(f"{text!r} is an address; give a server as module:object or path.py:object")
        place, colon, name = text.rpartition(":")
        if not colon:
            place, name = text, ""
        elif not _is_dotted(name):
            raise Failure(f"{text!r}: {name!r} is no name of an object; give module:object or path.py:object")
        if place.endswith(".py") or "/" in place or os.sep in place:
            return cls(text, None, Path(place).expanduser(), name or None)
        if not _is_dotted(place):
            raise Failure(f"{text!r} is no server; give module:object or path.py:object")
        return cls(text, place, None, name or None)

    @property
    def folder(self) -> Path:
        """What is importable beside it: the file's folder, for a module the current one."""
        return self.path.absolute().parent if self.path is not None else Path.cwd()

    @property
    def absolute(self) -> str:
        """The same TARGET for a process that runs in another folder, as far as that is possible."""
        if self.path is None:
            return self.text
        return f"{self.path.absolute()}:{self.name}" if self.name else str(self.path.absolute())


def load(target: Target) -> FrontMCP:
    """Import the server.

    What the module prints while it is imported goes to stderr, since stdout may be the protocol's.

    Raises:
        ConfigurationError: Its limits are not as they have to be.
        Failure: There is no such module or object, or importing it fails; the message is one sentence, the
            cause is what was raised.
    """
    if (folder := str(target.folder)) not in sys.path:
        sys.path.insert(0, folder)
    with stdout_to_stderr():
        module = _import(target)
    return _find(module, target)


def _import(target: Target) -> ModuleType:
    if target.path is not None and not target.path.is_file():
        raise Failure(f"there is no file {target.path}")
    try:
        if target.path is not None:
            return _import_file(target.path)
        return importlib.import_module(str(target.module))
    except ConfigurationError:
        raise
    except ModuleNotFoundError as error:
        if target.module is not None and error.name and f"{target.module}.".startswith(f"{error.name}."):
            raise Failure(
                f"there is no module {error.name!r} in {target.folder} or on Python's path"
            ) from error
        raise Failure(_why(target, error)) from error
    except SystemExit as error:
        raise Failure(
            f"importing {target.text} ended the process; what it does when it is run belongs under "
            'if __name__ == "__main__":'
        ) from error
    except Exception as error:
        raise Failure(_why(target, error)) from error


def _import_file(path: Path) -> ModuleType:
    # A name that another module has (say, of the standard library) must stay that module's.
    name = path.stem if path.stem not in sys.modules else f"frontmcp_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise Failure(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _why(target: Target, error: Exception) -> str:
    """What an import failed on, and the line of it that is nearest to the cause."""
    place = ""
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}, line {error.lineno})"
        said = error.msg
    else:
        said = str(error)
        frames = [
            each for each in traceback.extract_tb(error.__traceback__) if not _is_machinery(each.filename)
        ]
        if frames:
            place = f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return one_line(f"{target.text} cannot be imported: {type(error).__name__}: {said}{place}")


def _is_machinery(filename: str) -> bool:
    return filename == __file__ or filename.startswith("<") or filename == importlib.__file__


def _find(module: ModuleType, target: Target) -> FrontMCP:
    if target.name is None:
        return _only_server(module, target)
    found: object = module
    for part in target.name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise Failure(f"{target.text}: there is no {target.name!r} in it{_servers(module)}") from None
    if not isinstance(found, FrontMCP):
        kind = type(found).__name__
        raise Failure(f"{target.text}: {target.name!r} is of type {kind}, not FrontMCP{_servers(module)}")
    return found


def _only_server(module: ModuleType, target: Target) -> FrontMCP:
    servers = {id(each): each for each in vars(module).values() if isinstance(each, FrontMCP)}
    if len(servers) == 1:
        return next(iter(servers.values()))
    if servers:
        raise Failure(f"{target.text}: there is more than one server in it{_servers(module)}")
    raise Failure(f"{target.text}: there is no FrontMCP server in it")


def _servers(module: ModuleType) -> str:
    names = [name for name, each in vars(module).items() if isinstance(each, FrontMCP)]
    return f"; its servers: {', '.join(names)}" if names else ""


def _is_dotted(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


@contextlib.contextmanager
def stdout_to_stderr() -> Generator[None]:
    """Also what child processes write: descriptor 1 stands for 2 meanwhile."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
