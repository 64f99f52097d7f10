"""`python -m frontmcp_py.cli` is the `frontmcp` command."""

from frontmcp_py.cli import main

main()
