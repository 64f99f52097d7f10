"""Markdown pages as a reader uses them: Python blocks run, in order, and other blocks hold what they say."""

import ast
import asyncio
import contextlib
import doctest
import inspect
import io
import json
import re
import shlex
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"(?P<indent>[ \t]*)(?P<ticks>`{3,}|~{3,}) *(?P<language>[\w+.-]*) *(?P<info>[^`]*)")
_FENCE_IN_TEXT = re.compile(r"\s*(>|[-*+]\s|\d+\.\s)\s*(```|~~~)")
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")

# Of what may follow ```python, only what changes its looks: there is no way to say "do not run this".
_LOOKS = re.compile(r'((title|hl_lines|linenums)="[^"]*" *)*')
_OTHER_NAMES = {
    **dict.fromkeys(["py", "python3", "pycon", "Python"], "python"),
    **dict.fromkeys(["sh", "shell", "console", "zsh", "shell-session"], "bash"),
}
_PLACES = ("scripts/", "examples/", "benchmarks/", "tests/", "docs/", "frontmcp_py/", ".ci/")


class PageError(Exception):
    """A page breaks a rule for its blocks; the message begins with file and line."""


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `line` is where its first line of code stands in the page, counted from 1."""

    page: Path
    line: int
    language: str
    info: str
    code: str

    def wrong(self, what: str) -> PageError:
        return PageError(f"{_relative(self.page)}:{self.line}: {what}")


def pages() -> list[Path]:
    """Every page that is tested: README.md, CONTRIBUTING.md, the documentation, examples and benchmarks."""
    found = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    ]
    return sorted(page for page in found if page.exists())


def blocks(page: Path) -> Iterator[Block]:
    """Take a page apart. Blocks inside an HTML comment count: they are set-up that a reader does not see."""
    fence: re.Match[str] | None = None
    begin = 0
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        if fence is None:
            fence, begin = _FENCE.fullmatch(line), number
            if fence is None and _FENCE_IN_TEXT.match(line):
                raise PageError(f"{_relative(page)}:{number}: a block's fence stands on a line of its own")
        elif line.strip().startswith(fence["ticks"]) and not line.strip().strip(fence["ticks"][0]):
            code = textwrap.dedent("\n".join(lines[begin : number - 1])) + "\n"
            yield Block(page, begin + 1, fence["language"], fence["info"].strip(), code)
            fence = None
    if fence is not None:
        raise PageError(f"{_relative(page)}:{begin}: this block is never closed")


def run(page: Path) -> None:
    """Run the page's Python blocks in order, in one namespace, and compare what they print.

    A block may await at its top level; all such blocks of a page share one event loop. It stands still while
    a plain block runs, which may therefore call `asyncio.run`. A ```text block with title="Output" is
    compared with what was printed since the last one (`...` stands for anything).

    Raises:
        PageError: A block must not be marked as it is, or printed something else.
        Exception: Whatever a block raises, with the page's own lines in the traceback.
    """
    printed = io.StringIO()
    with _module_for(page) as namespace, asyncio.Runner() as runner:
        for block in blocks(page):
            if block.language == "python":
                if not _LOOKS.fullmatch(block.info):
                    raise block.wrong(f"every Python block is run; {block.info!r} cannot be said of one")
                with contextlib.redirect_stdout(printed):
                    _execute(block, namespace, runner)
            elif block.language == "text" and 'title="Output"' in block.info:
                _compare(block, printed.getvalue())
                printed.seek(0)
                printed.truncate()


def check(page: Path) -> None:
    """Check what is not run: the languages' names, TOML and JSON, and the files that commands and links name.

    Raises:
        PageError: One of them is wrong.
    """
    for block in blocks(page):
        if right := _OTHER_NAMES.get(block.language):
            raise block.wrong(f"write ```{right} instead of ```{block.language}")
        if block.info.startswith("{"):
            raise block.wrong("name the language in the word after the fence, not in braces")
        if block.language == "bash":
            _check_commands(block)
        elif block.language in {"toml", "json"}:
            try:
                (tomllib.loads if block.language == "toml" else json.loads)(block.code)
            except ValueError as error:
                raise block.wrong(f"not {block.language.upper()}: {error}") from error
    prose = page.read_text(encoding="utf-8")
    for block in blocks(page):
        prose = prose.replace(block.code, "")
    for link in _LINK.findall(prose):
        if not (page.parent / link).exists():
            raise PageError(f"{_relative(page)}: the link to {link} leads nowhere")


def _execute(block: Block, namespace: dict[str, object], runner: asyncio.Runner) -> None:
    # The empty lines in front make line numbers those of the page, in tracebacks and for inspect.getsource.
    source = "\n" * (block.line - 1) + block.code
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, str(block.page), "exec", flags=flags, dont_inherit=True)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(eval(code, namespace))
    else:
        exec(code, namespace)


def _compare(block: Block, printed: str) -> None:
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not checker.check_output(block.code, printed, flags):
        example = doctest.Example(source="", want=block.code)
        raise block.wrong("printed something else\n" + checker.output_difference(example, printed, flags))


def _check_commands(block: Block) -> None:
    for offset, line in enumerate(block.code.splitlines()):
        for word in shlex.split(line, comments=True):
            place = word.removeprefix("./").partition("::")[0]
            if place.startswith(_PLACES) and not any(ROOT.glob(place)):
                raise PageError(f"{_relative(block.page)}:{block.line + offset}: there is no {place}")


@contextlib.contextmanager
def _module_for(page: Path) -> Iterator[dict[str, object]]:
    # A real module in sys.modules, since dataclasses and pydantic look up the names of annotations there. A
    # page of an example sees the files beside it, as a script in that folder would.
    module = ModuleType("page_" + re.sub(r"\W", "_", _relative(page)))
    path = [str(page.parent)] if "examples" in page.parts else []
    sys.modules[module.__name__] = module
    sys.path[:0] = path
    try:
        yield vars(module)
    finally:
        del sys.modules[module.__name__]
        for entry in path:
            sys.path.remove(entry)


def _relative(page: Path) -> str:
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
