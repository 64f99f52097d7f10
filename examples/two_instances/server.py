"""One instance of a help desk that runs in several, and shares its limits with the others by a store.

python examples/two_instances/server.py --port 8001 --name a                      counts alone
python examples/two_instances/server.py --port 8001 --name a --store redis://...  counts with the others

Every merge is noted in a file that all instances write, by which one can see that no two of them overlapped.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Annotated

from pydantic import Field

from frontmcp_py import Concurrency, FrontMCP, Throttle, ToolContext

# How many tickets each customer has. To move one takes a twentieth of a second: C-9 keeps a merge busy.
TICKETS = {"C-2": 30, "C-3": 10, "C-4": 10, "C-5": 10, "C-6": 10, "C-9": 600}

Customer = Annotated[str, Field(description="A customer's id, like C-2")]


def help_desk(name: str, journal: Path, throttle: Throttle) -> FrontMCP:
    """An instance.

    Args:
        name: What this one is called in the journal and in its answers.
        journal: Where all instances note their merges.
        throttle: With `storage`, all instances on one store enforce each limit once.
    """
    server = FrontMCP("help-desk", version="1.0.0", throttle=throttle)

    def note(customer: str, what: str) -> None:
        entry = {"at": time.time(), "instance": name, "customer": customer, "what": what}
        with journal.open("a", encoding="utf-8") as file:  # one short line: two writers do not mix theirs
            file.write(json.dumps(entry) + "\n")

    @server.tool(rate_limit="2/hour", read_only=True)
    async def export_customers() -> str:
        """Export all customers as CSV. Reads the whole database."""
        return "\n".join(["id,tickets", *(f"{customer},{count}" for customer, count in TICKETS.items())])

    @server.tool(concurrency=Concurrency(1, queue_timeout=20), destructive=True)
    async def merge_customers(ctx: ToolContext, source: Customer, target: Customer) -> str:
        """Merge one customer record into another, moving all its tickets."""
        note(source, "began")
        for _ in range(TICKETS.get(source, 0)):
            # Between two tickets is the place to stop. Whoever was frozen for longer than its lease has lost
            # its slot, and another instance may be merging by now: the signal says so.
            ctx.signal.throw_if_aborted()
            await asyncio.sleep(0.05)
        note(source, "ended")
        return f"{source} is merged into {target}, by instance {name}"

    return server


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve one instance of the help desk over HTTP.")
    parser.add_argument("--port", type=int, required=True, help="where to listen on 127.0.0.1")
    parser.add_argument("--name", required=True, help="what this instance is called")
    parser.add_argument("--journal", type=Path, default=Path("merges.jsonl"), help="where merges are noted")
    parser.add_argument("--store", help="what the instances share, like redis://127.0.0.1:6379/0")
    parser.add_argument("--prefix", default="two-instances", help="what this deployment's keys begin with")
    options = parser.parse_args()
    throttle = Throttle(
        storage=options.store,
        key_prefix=options.prefix,
        lease=2,  # the slots of an instance that is killed are free again after so many seconds
        storage_timeout=1,  # a store that takes longer to answer counts as one that is away
        fallback="memory",  # and while it is, this instance counts alone
    )
    help_desk(options.name, options.journal, throttle).run("http", port=options.port)


if __name__ == "__main__":
    main()
