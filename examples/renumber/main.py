"""A model writes several calls in one response, and they build on each other: what becomes of them, and why.

python examples/renumber/main.py                   exits with 1 if a promise was broken
python examples/renumber/main.py --stdio           the server is a process of its own
python examples/renumber/main.py --folder stories  and the documents are kept, to be looked at
"""

import argparse
import asyncio
import io
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from textwrap import indent
from typing import NoReturn

from mcp.client import Client
from mcp.client.stdio import StdioServerParameters

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where `examples` is, for a script

from examples.renumber.server import AT_ONCE, DOCUMENTS, GitHub, documents, fill, rfd_server
from frontmcp_py.clock import Clock, SystemClock
from frontmcp_py.host import Host, Operation, State, Timeline, ToolCall, ToolResult

HERE = Path(__file__).resolve().parent
LIMITS = HERE / "limits.toml"
WIDTH = 100  # columns


# -- a batch, and what is seen of it -----------------------------------------------------------------------


def batch(name: str) -> list[ToolCall]:
    """The calls of a message that a model wrote."""
    message = json.loads((HERE / "batches" / f"{name}.json").read_text(encoding="utf-8"))
    return ToolCall.from_anthropic(message)


@dataclass
class Seen:
    """What became of a batch.

    Attributes:
        results: The results of its calls, in the written order.
        picture: Who waited and who ran, as text.
        began: The calls and operations that ran, in the order in which they began.
        most: The most of them that ever ran at once.
        took: Seconds from the start to the last result.
    """

    results: list[ToolResult]
    picture: str
    began: list[str]
    most: int
    took: float

    @property
    def failed(self) -> list[str]:
        """The ids of the calls that did not succeed."""
        return [each.id for each in self.results if each.is_error]


async def ran(calls: Sequence[ToolCall], limits: Path | None, client: Client, clock: Clock) -> Seen:
    """Run a batch, as a program does that executes what a model asks for."""
    timeline = Timeline(clock)
    now: set[str] = set()
    began: list[str] = []
    most = 0

    def watch(call: ToolCall, state: State) -> None:
        nonlocal most
        timeline(call, state)
        if "ops" in call.arguments and not isinstance(call, Operation):
            return  # its operations tell what there is to tell
        if state == "running":
            now.add(call.id)
            began.append(call.id)
        elif state == "completed":
            now.discard(call.id)
        most = max(most, len(now))

    host = Host(limits, client, on_state=watch)
    host.advertise((await client.list_tools()).tools)  # what a model would be told of
    start = clock.monotonic_ns()
    results = await host.run(calls)
    took = (clock.monotonic_ns() - start) / 1e9
    return Seen(results, timeline.render(WIDTH - 2), began, most, took)


@asynccontextmanager
async def serving(folder: Path, github: GitHub, stdio: bool) -> AsyncIterator[Client]:
    """A client of a server that works in this folder: in this process, or one of its own."""
    if not stdio:
        async with rfd_server(folder, github.url).connect() as client:
            yield client
        return
    # Settings of the surroundings would change what is shown.
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("FRONTMCP_")}
    where = {"RENUMBER_FOLDER": str(folder), "RENUMBER_GITHUB": github.url}
    process = StdioServerParameters(
        command=sys.executable, args=[str(HERE / "server.py")], env=surroundings | where
    )
    async with Client(process) as client:
        yield client


# -- the stories -------------------------------------------------------------------------------------------


class Story:
    """Where and how the stories are told, and what they promise.

    Args:
        folder: Where each story has a folder of its own.
        stdio: Whether the server is a process of its own.
        clock: What time it is.
    """

    def __init__(self, folder: Path, stdio: bool, clock: Clock) -> None:
        self._folder = folder
        self._stdio = stdio
        self.clock = clock
        self.promises: list[tuple[str, bool]] = []

    def folder(self, name: str) -> Path:
        """A folder with the four documents."""
        made = self._folder / name
        fill(made)
        return made

    async def run(self, name: str, limits: Path | None, folder: Path) -> tuple[Seen, GitHub]:
        """Run a batch on a server that has just started, and an API that nobody has asked anything."""
        async with GitHub() as api, serving(folder, api, self._stdio) as client:
            return await ran(batch(name), limits, client, self.clock), api

    def promise(self, what: str, kept: bool) -> None:
        """Something that has to hold, whatever the machine is doing."""
        self.promises.append((what, kept))

    def end(self) -> int:
        """Print a line for each promise.

        Returns:
            The exit status.
        """
        broken = sum(not kept for _, kept in self.promises)
        for what, kept in self.promises:
            print(f"  {'✓' if kept else '✗ BROKEN:'} {what}")
        if broken:
            print(f"\n{broken} of {len(self.promises)} promises were broken.")
        else:
            print(f"\nAll {len(self.promises)} promises were kept.")
        return 1 if broken else 0


async def without_limits(story: Story) -> Seen:
    title("1  Seven calls in one response, and the host starts them all at once")
    folder = story.folder("without-limits")
    seen, _ = await story.run("chain", None, folder)
    show(seen)
    show_documents(folder)
    story.promise(
        "without limits, 005 does not become 008, which was not free yet",
        seen.failed == ["005-to-008"] and text(seen, "005-to-008").endswith(": 008 is taken"),
    )
    drafts = {text(seen, slug) for slug in ("quotas", "backups", "webhooks")}
    story.promise(
        "and three drafts begin under one number, which an older document has got, too",
        drafts == {"quotas is 009", "backups is 009", "webhooks is 009"} and len(under(folder, "009")) == 4,
    )
    return seen


async def with_limits(story: Story, before: Seen) -> None:
    title('2  The same response, and the host knows that these tools share a state: key = "rfd"')
    folder = story.folder("with-limits")
    seen, _ = await story.run("chain", LIMITS, folder)
    show(seen)
    show_documents(folder)
    print(f"  It took {seen.took:.2f} s instead of {before.took:.2f} s: that is what the limit costs.\n")
    story.promise("with the key, all seven calls succeed", not seen.failed and len(seen.results) == 7)
    story.promise(
        "they ran one at a time, in the written order",
        seen.most == 1 and seen.began == [each.id for each in batch("chain")],
    )
    story.promise(
        "every document has a number of its own",
        [name[:3] for name in documents(folder)] == [f"{number:03}" for number in range(8, 15)],
    )


async def github(story: Story) -> None:
    title("3  Ten questions to an API that answers four at once: without a limit, and with limit = 4")
    folder = story.folder("api")
    seen, api = await story.run("github", None, folder)
    print(f"  without: {counted(api)}; one of the answers:")
    refused = next((each for each in seen.results if each.is_error), None)
    print(f"  {refused.text if refused else 'none was refused'}\n")
    story.promise(
        "without a limit, the API refuses some of ten questions with 429",
        len(seen.failed) == api.refused > 0 and all(": 429: " in text(seen, each) for each in seen.failed),
    )
    seen, api = await story.run("github", LIMITS, folder)
    print(f"  with:    {counted(api)}\n")
    print(indent(seen.picture, "  "), end="\n\n")
    story.promise(
        f"with it, it never has more than {AT_ONCE} at once, from both tools together, and answers all",
        api.most == seen.most == AT_ONCE and not seen.failed and not api.refused,
    )


async def deleting(story: Story) -> None:
    title('4  Five files to delete, four of them in one call: concurrency = 1, on_error = "stop"')
    folder = story.folder("deleted")
    seen, _ = await story.run("delete", LIMITS, folder)
    show(seen)
    show_documents(folder)
    frames = [line for line in text(seen, "four").splitlines() if line.startswith("[")]
    story.promise(
        "in one call, the operations after one that fails are not run, and it says so",
        frames
        == [
            "[1/4] ok",
            "[2/4] error",
            "[3/4] not run (stopped after operation 2 failed)",
            "[4/4] not run (stopped after operation 2 failed)",
        ],
    )
    story.promise(
        "a call of its own runs after it, all the same",
        seen.began == ["four#0", "four#1", "one"]
        and seen.most == 1
        and text(seen, "one").endswith("deleted"),
    )
    story.promise(
        "the files of the operations that were not run are there",
        documents(folder) == ["006-caching.md", "007-search.md"],
    )


def text(seen: Seen, call: str) -> str:
    """What the model is told of a call."""
    return next(each.text for each in seen.results if each.id == call)


def under(folder: Path, number: str) -> list[str]:
    """The documents that have a number."""
    return [name for name in documents(folder) if name.startswith(number)]


# -- what is printed ---------------------------------------------------------------------------------------


def title(line: str) -> None:
    print(f"{line}\n")


def show(seen: Seen) -> None:
    """The time line, and what the model is told of each call."""
    print(indent(seen.picture, "  "), end="\n\n")
    names = max(len(each.name) for each in seen.results)
    ids = max(len(each.id) for each in seen.results)
    for each in seen.results:
        first, *others = each.text.splitlines()
        print(f"  {each.name:<{names}}  {each.id:<{ids}}  {each.status:<5}  {first}")
        for line in others:
            print(f"  {'':<{names + ids + 9}}  {line}")
    print()


def show_documents(folder: Path) -> None:
    """The folder; of a number that several documents have, how many these are."""
    print(f"  {folder.name}/")
    for _, sharing in groupby(documents(folder), key=lambda name: name[:3]):
        for place, name in enumerate(names := list(sharing)):
            note = f"  ← {len(names)} documents under one number" if len(names) > 1 and place == 0 else ""
            print(f"    {name:<16}{note}".rstrip())
    print()


def counted(api: GitHub) -> str:
    return f"{api.refused} of 10 requests were refused, at most {api.most} were there at once"


# -- all of it ---------------------------------------------------------------------------------------------


async def tell(folder: Path, *, stdio: bool = False, clock: Clock | None = None) -> int:
    """Tell all stories.

    Args:
        folder: Where their documents are.
        stdio: Whether the server is a process of its own.
        clock: What time it is.

    Returns:
        The exit status: 0, or 1 if a promise was broken.
    """
    story = Story(folder, stdio, clock or SystemClock())
    print(f"Four documents in each story: {', '.join(DOCUMENTS)}\n")
    before = await without_limits(story)
    await with_limits(story, before)
    await github(story)
    await deleting(story)
    return story.end()


class OneSentence(argparse.ArgumentParser):
    """Says what is wrong with its arguments, and no more."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"renumber: {message}\n")


def main() -> int:
    parser = OneSentence(description="What becomes of calls that build on each other.", allow_abbrev=False)
    parser.add_argument("--stdio", action="store_true", help="start the server as a process")
    parser.add_argument("--folder", type=Path, help="a folder to be made, which is kept")
    options = parser.parse_args()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # where a terminal has no such characters
    with ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            if options.folder:
                folder.mkdir(parents=True)
        except OSError as problem:
            parser.error(f"{folder}: {problem.strerror}; give a folder that is not there yet")
        try:
            return asyncio.run(tell(folder, stdio=options.stdio))
        except KeyboardInterrupt:
            return 130
        except BrokenPipeError:  # whoever reads this has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


if __name__ == "__main__":
    sys.exit(main())
