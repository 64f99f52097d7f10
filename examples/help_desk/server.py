"""A help desk whose tools say how often they may run, how many at once, and for how long.

python examples/help_desk/server.py                          over stdio, for the client that starts it
python examples/help_desk/server.py --http 8000              over HTTP, for everybody
python examples/help_desk/server.py --http 8000 --sign-in    over HTTP, for users with a token
python examples/help_desk/server.py --no-limits              for a test run on your own machine
"""

import argparse
import asyncio
import time
from dataclasses import dataclass, field
from typing import Annotated

from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from pydantic import AnyHttpUrl, Field

from frontmcp_py import App, Concurrency, FrontMCP, RateLimit, Throttle, ToolContext

# -- what stands in for the outside world: a slow database, a slow CRM -------------------------------------

TICKETS = {
    "T-1": ("Cannot log in", "open"),
    "T-2": ("Invoice total is wrong", "closed"),
    "T-3": ("Export never finishes", "open"),
}
CUSTOMERS = {"C-1": "Initech", "C-7": "Hooli", "C-8": "Umbrella", "C-9": "Globex"}


@dataclass
class Merge:
    """One merge of customers; times are seconds since the epoch."""

    source: str
    target: str
    began: float
    ended: float | None = None


@dataclass
class Export:
    """One export of the archive; times are seconds since the epoch."""

    tool: str
    began: float
    ended: float | None = None
    pages_read: int = 0
    stopped_by: str | None = None


@dataclass
class Records:
    """What was done to the database, for merge_log and export_stats."""

    merges: list[Merge] = field(default_factory=list)
    most_merges_at_once: int = 0
    exports: list[Export] = field(default_factory=list)


records = Records()


def tickets_as_csv() -> str:
    rows = [f"{number},{title},{status}" for number, (title, status) in TICKETS.items()]
    return "\n".join(["id,title,status", *rows])


async def move_tickets(source: str, target: str, seconds: float) -> str:
    merge = Merge(source, target, began=time.time())
    records.merges.append(merge)
    running = sum(each.ended is None for each in records.merges)
    records.most_merges_at_once = max(records.most_merges_at_once, running)
    await asyncio.sleep(seconds)
    merge.ended = time.time()
    return f"{source} is merged into {target}"


async def read_page(export: Export, page: int) -> str:
    await asyncio.sleep(0.1)
    export.pages_read += 1
    return f"T-{page},Ticket {page},closed"


async def ask_crm(customer: str) -> dict[str, str]:
    await asyncio.sleep(2.0 if customer == "C-9" else 0.05)
    return {"id": customer, "name": CUSTOMERS.get(customer, "unknown"), "plan": "business"}


# -- the tools ---------------------------------------------------------------------------------------------

app = App("help-desk")

Customer = Annotated[str, Field(description="A customer's id, like C-7")]


@app.tool(rate_limit=RateLimit(2, window="1h", partition_by="user_id"), read_only=True)
def export_tickets() -> dict[str, str]:
    """Export every support ticket as CSV. Reads the whole ticket database."""
    return {"csv": tickets_as_csv()}


@app.tool(read_only=True)
def list_tickets() -> dict[str, str]:
    """List the titles of all tickets."""
    return {number: title for number, (title, _) in TICKETS.items()}


@app.tool(concurrency=1, destructive=True)
async def merge_customers(source: Customer, target: Customer) -> str:
    """Merge one customer record into another, moving all its tickets. If busy, try again in a minute."""
    return await move_tickets(source, target, seconds=0.4)


# The key is a tool's name: this tool shares the one slot of `merge_customers`, but waits for its turn.
@app.tool(concurrency=Concurrency(1, key="merge_customers", queue_timeout=1), destructive=True)
async def merge_customers_in_turn(source: Customer, target: Customer) -> str:
    """Merge one customer record into another, as soon as no other merge is running."""
    return await move_tickets(source, target, seconds=0.4)


# Do not copy this one: its timeout is shorter than its work. The caller is told that the merge has failed
# while it goes on. A tool that changes things gets no timeout, or one that its work can never reach.
@app.tool(concurrency=Concurrency(1, key="merge_customers"), timeout=0.2, destructive=True)
async def merge_customers_hastily(source: Customer, target: Customer) -> str:
    """Merge one customer record into another, without the patience to see it through."""
    return await move_tickets(source, target, seconds=0.8)


@dataclass
class MergeLog:
    merges: list[Merge]
    most_at_once: int


@app.tool(read_only=True)
def merge_log() -> MergeLog:
    """List the merges so far, and how many of them ever ran at once."""
    return MergeLog(records.merges, records.most_merges_at_once)


@app.tool(timeout=0.5, read_only=True, open_world=True)
async def lookup_customer(customer: Customer) -> dict[str, str]:
    """Look up a customer in the CRM."""
    return await ask_crm(customer)


@app.tool(timeout=0.35, read_only=True)
async def export_archive(ctx: ToolContext) -> dict[str, str]:
    """Export the archived tickets as CSV, ten pages of them."""
    export = Export("export_archive", began=time.time())
    records.exports.append(export)
    rows = []
    try:
        for page in range(10):
            ctx.signal.throw_if_aborted()  # stop between pages once the call has timed out
            rows.append(await read_page(export, page))
    except Exception:
        export.stopped_by = str(ctx.signal.reason)
        raise
    finally:
        export.ended = time.time()
    return {"csv": "\n".join(["id,title,status", *rows])}


@app.tool(timeout=0.35, read_only=True)
async def export_archive_regardless() -> dict[str, str]:
    """Export the archived tickets as CSV, and read on when nobody waits for them any more."""
    export = Export("export_archive_regardless", began=time.time())
    records.exports.append(export)
    rows = [await read_page(export, page) for page in range(10)]
    export.ended = time.time()
    return {"csv": "\n".join(["id,title,status", *rows])}


@app.tool(read_only=True)
def export_stats() -> list[Export]:
    """List the exports of the archive so far: how many pages they read, and why they stopped."""
    return records.exports


# -- the server --------------------------------------------------------------------------------------------

# For every tool that says nothing itself, each kind for itself: merge_customers keeps its own concurrency.
DEFAULTS = Throttle(
    default_rate_limit=RateLimit(60, window=60, partition_by="ip"),
    default_concurrency=5,
    default_timeout=30,
)

ISSUER = "https://sign-in.example"
USERS = {"token-of-ada": "ada", "token-of-grace": "grace"}


class SignIn:
    """Stands in for a check of the tokens that ISSUER gives out: it knows two users."""

    async def verify_token(self, token: str) -> AccessToken | None:
        user = USERS.get(token)
        if user is None:
            return None
        return AccessToken(
            token=token, client_id="help-desk-web", scopes=[], subject=user, claims={"iss": ISSUER}
        )


def help_desk(*, throttle: Throttle | bool = DEFAULTS, sign_in: bool = False) -> FrontMCP:
    """The help desk.

    Args:
        throttle: The limits of the whole server; `False` ignores limits, for local testing only.
        sign_in: Let in users with a token only. Otherwise every caller is anonymous.
    """
    return FrontMCP(
        "help-desk",
        version="1.0.0",
        apps=[app],
        throttle=throttle,
        # A server on the net also gives its own address here, so that clients find out where to sign in.
        auth=AuthSettings(issuer_url=AnyHttpUrl(ISSUER), resource_server_url=None) if sign_in else None,
        token_verifier=SignIn() if sign_in else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the help desk, over stdio unless told otherwise.")
    parser.add_argument("--http", metavar="PORT", type=int, help="serve over HTTP, on this port of 127.0.0.1")
    parser.add_argument("--sign-in", action="store_true", help="let in users with a token only")
    parser.add_argument("--no-limits", action="store_true", help="ignore all limits, for local testing only")
    options = parser.parse_args()
    server = help_desk(throttle=False if options.no_limits else DEFAULTS, sign_in=options.sign_in)
    if options.http is None:
        server.run()
    else:
        server.run("http", port=options.http)


if __name__ == "__main__":
    main()
