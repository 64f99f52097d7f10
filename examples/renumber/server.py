"""A server that keeps design documents as files, `005-retries.md` and so on, and asks an API about them.

python examples/renumber/server.py                                        stdio, in a temporary folder
RENUMBER_FOLDER=drafts python examples/renumber/server.py                 in this folder, which is kept
RENUMBER_GITHUB=http://127.0.0.1:8080 python examples/renumber/server.py  asks this API, not one of its own

Its tools are written as most are: they look, wait for something, and act upon what they have seen. Nothing
here keeps two of them apart, and no limit stands in this file: that is up to the host, which knows the order
in which a model wrote its calls.
"""

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Self

import httpx2
from pydantic import Field

from frontmcp_py import FrontMCP, ToolError

PACE = 0.04  # seconds that pass between what a tool sees and what it does
ANSWER = 0.06  # seconds that the API takes to answer
AT_ONCE = 4  # requests that it answers at once; it refuses others

DOCUMENTS = ("005-retries.md", "006-caching.md", "007-search.md", "008-exports.md")

Number = Annotated[str, Field(description="The number of a document, like 008", pattern=r"^\d{3}$")]
Slug = Annotated[
    str, Field(description="The rest of its name, like rate-limits", pattern=r"^[a-z][a-z0-9-]*$")
]


# -- what the tools work on: a folder, and an API ----------------------------------------------------------


def fill(folder: Path) -> None:
    """Put four documents into a folder, which is made."""
    folder.mkdir(parents=True)
    for name in DOCUMENTS:
        write(folder, name)


def write(folder: Path, name: str) -> None:
    """Write a document that is not there yet."""
    with (folder / name).open("x", encoding="utf-8") as file:
        file.write(f"# {name[4:].removesuffix('.md').replace('-', ' ').capitalize()}\n")


def documents(folder: Path) -> list[str]:
    """The names of all documents, in order."""
    return sorted(each.name for each in folder.glob("[0-9][0-9][0-9]-*.md"))


def numbered(names: list[str], number: str) -> str:
    """The one document that has a number.

    Raises:
        ToolError: None has it, or several have.
    """
    found = [name for name in names if name.startswith(f"{number}-")]
    if len(found) != 1:
        raise ToolError(
            f"{number} is {len(found)} documents: {', '.join(found)}" if found else f"There is no {number}"
        )
    return found[0]


def inside(folder: Path, path: str) -> Path:
    """A file of this folder, and of no other.

    Raises:
        ToolError: It is somewhere else, or no file.
    """
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()) or not file.is_file():
        raise ToolError(f"There is no file {path}")
    return file


class GitHub:
    """Stands in for an API on the net: it answers four requests at once, and others with 429.

    Attributes:
        url: Where it is.
        most: The most requests that it has ever had at once.
        refused: How many it has refused.
    """

    url: str

    def __init__(self) -> None:
        self.most = 0
        self.refused = 0
        self._now = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            status, body = await self._serve(request.split()[1].decode())
            head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close"
            writer.write(f"{head}\r\n\r\n{body}".encode())
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # whoever asked has gone
        finally:
            writer.close()

    async def _serve(self, path: str) -> tuple[str, str]:
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            if self._now > AT_ONCE:
                self.refused += 1
                return "429 Too Many Requests", f"{self._now} requests at once, at most {AT_ONCE} are allowed"
            await asyncio.sleep(ANSWER)
            return "200 OK", f"nothing open in {path}"
        finally:
            self._now -= 1  # before the answer is sent: whoever has it may ask again


# -- the server --------------------------------------------------------------------------------------------


def rfd_server(folder: Path | None = None, github: str | None = None) -> FrontMCP:
    """The server.

    Args:
        folder: Where the documents are; four are put there if it does not exist. `None`: a folder that ends
            with the server.
        github: The address of the API. `None`: one that ends with the server, too.
    """
    place = Place(folder, github)
    quiet = {"log_level": "WARNING"}  # what fails here is meant to
    server = FrontMCP("rfd", version="1.0.0", lifespan=place.opened, mcp_options=quiet)

    @server.tool(read_only=True)
    def rfd_list() -> list[str]:
        """List all documents."""
        return documents(place.folder)

    @server.tool(read_only=True)
    def rfd_show(id: Number) -> str:
        """Read a document."""
        return (place.folder / numbered(documents(place.folder), id)).read_text(encoding="utf-8")

    @server.tool(destructive=False)
    async def rfd_draft(slug: Slug) -> str:
        """Begin a document, under the next number."""
        names = documents(place.folder)
        await asyncio.sleep(PACE)
        number = 1 + max((int(name[:3]) for name in names), default=0)
        write(place.folder, f"{number:03}-{slug}.md")  # fails if it is there: but slugs differ
        return f"{slug} is {number:03}"

    @server.tool(destructive=True)
    async def rfd_renumber(id: Number, new: Number) -> str:
        """Give a document another number, which has to be free."""
        names = documents(place.folder)
        await asyncio.sleep(PACE)
        if any(name.startswith(f"{new}-") for name in names):
            raise ToolError(f"{new} is taken")
        name = numbered(names, id)
        (place.folder / name).rename(place.folder / f"{new}{name[3:]}")
        return f"{id} is {new} now"

    @server.tool(destructive=True)
    async def fs_delete_file(path: str) -> str:
        """Delete a file."""
        file = inside(place.folder, path)
        await asyncio.sleep(PACE)
        file.unlink()
        return f"{path} is deleted"

    @server.tool(read_only=True, open_world=True)
    async def github_issues(label: str) -> str:
        """List the open issues with a label."""
        return await place.ask(f"/repos/initech/rfds/issues/{label}")

    @server.tool(read_only=True, open_world=True)
    async def github_pulls(label: str) -> str:
        """List the open pull requests with a label."""
        return await place.ask(f"/repos/initech/rfds/pulls/{label}")

    return server


class Place:
    """The folder and the API, while the server lives."""

    folder: Path

    def __init__(self, folder: Path | None, github: str | None) -> None:
        self._given = folder
        self._github = github

    @asynccontextmanager
    async def opened(self, _: object) -> AsyncIterator[dict[str, Any]]:
        async with AsyncExitStack() as stack:
            if self._given is None:
                temporary = stack.enter_context(tempfile.TemporaryDirectory())
                self.folder = Path(temporary, "drafts")
            else:
                self.folder = self._given
            if not self.folder.exists():
                fill(self.folder)
            url = self._github or (await stack.enter_async_context(GitHub())).url
            # trust_env=False: what goes to this machine needs no proxy.
            self._http = await stack.enter_async_context(httpx2.AsyncClient(base_url=url, trust_env=False))
            yield {}

    async def ask(self, path: str) -> str:
        """What the API says.

        Raises:
            ToolError: It refuses.
        """
        answer = await self._http.get(path)
        if answer.is_error:
            raise ToolError(f"{answer.status_code}: {answer.text}")
        return answer.text


server = rfd_server(
    Path(where) if (where := os.environ.get("RENUMBER_FOLDER")) else None,
    os.environ.get("RENUMBER_GITHUB"),
)


if __name__ == "__main__":
    server.run()
