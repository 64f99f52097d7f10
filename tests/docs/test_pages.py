"""Every snippet of every page runs, and every page names things that exist."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, PageError, check, pages, run

FLOODS = ROOT / "docs" / "canary.md"

every_page = pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page == FLOODS else page for page in pages()],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_the_python_blocks_of_a_page_run_in_order(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run(page)


@every_page
def test_the_other_blocks_and_the_links_of_a_page_are_right(page: Path) -> None:
    check(page)


def write(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return page


def test_blocks_share_a_namespace_and_may_await(tmp_path: Path) -> None:
    run(
        write(
            tmp_path,
            """
<!--
```python
import asyncio
```
-->
```python title="greet.py"
async def greet() -> None:
    await asyncio.sleep(0)
    print("hello")

if __name__ == "__main__":
    raise SystemExit
```
- in a list:

    ```python
    await greet()
    ```

```python
asyncio.run(greet())
```
```text title="Output"
hello
...
```
""",
        )
    )


def test_a_block_that_fails_names_its_line_in_the_page(tmp_path: Path) -> None:
    page = write(tmp_path, "# A page\n\n```python\nx = 1\nx / 0\n```\n")
    with pytest.raises(ZeroDivisionError) as caught:
        run(page)
    assert caught.traceback[-1].path == page
    assert caught.traceback[-1].lineno + 1 == 5


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python no-run\nx\n```\n", r"page\.md:2: every Python block is run; 'no-run'"),
        ('```python\nprint(1)\n```\n```text title="Output"\n2\n```\n', r"page\.md:5: printed something else"),
        ("```python\nx = 1\n", r"page\.md:1: this block is never closed"),
        ("> ```python\n> x\n> ```\n", r"page\.md:1: a block's fence stands on a line of its own"),
    ],
)
def test_a_page_cannot_show_code_that_is_not_run(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(PageError, match=complaint):
        run(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```py\nx\n```\n", "write ```python"),
        ("```{.python}\nx\n```\n", "not in braces"),
        ("```console\n$ ls\n```\n", "write ```bash"),
        ("```bash\ncd x\nscripts/nothing --all\n```\n", r"page\.md:3: there is no scripts/nothing"),
        ("```toml\na = \n```\n", "not TOML"),
        ('```json\n{"a": 1,}\n```\n', "not JSON"),
        ("[more](nowhere.md#there)\n", "the link to nowhere.md leads nowhere"),
    ],
)
def test_a_page_cannot_name_what_is_not_there(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(PageError, match=complaint):
        check(write(tmp_path, text))


def test_commands_that_name_real_files_are_fine(tmp_path: Path) -> None:
    check(
        write(tmp_path, "```bash\nscripts/test --slow tests/docs/test_pages.py::test_x  # all of it\n```\n")
    )
