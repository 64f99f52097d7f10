"""Runs an HTTP app with uvicorn, on an address that is known to be free."""

from __future__ import annotations

import errno
import logging
import math
import socket

import uvicorn
from starlette.types import ASGIApp

from frontmcp_py.errors import ConfigurationError

# What is said about serving is said in one voice.
logger: logging.Logger = logging.getLogger("uvicorn.error")


def serve(app: ASGIApp, *, host: str, port: int, grace: float, log_level: str = "info") -> None:
    """Serve until the process is told to stop.

    No header about the client's address is believed: it is the socket's.

    Args:
        app: What is served.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        grace: Seconds that open requests get when the process is told to stop.
        log_level: uvicorn's.

    Raises:
        ConfigurationError: The address cannot be listened on.
    """
    with listen(host, port) as listener:
        config = uvicorn.Config(
            app,
            log_level=log_level,
            proxy_headers=False,
            timeout_graceful_shutdown=math.ceil(grace),
        )
        # uvicorn says where it listens only when the socket is its own, and nobody knows what 0 stands for.
        logger.info("Listening on %s port %d", *listener.getsockname()[:2])
        uvicorn.Server(config).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address.

    Raises:
        ConfigurationError: The address cannot be listened on; the message says why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, OverflowError, UnicodeError) as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(
                f"port {port} on {host} is in use; stop what listens there, or give another port "
                "(0: any free one)"
            ) from None
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    listener.setblocking(False)
    return listener
