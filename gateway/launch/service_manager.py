"""Tells the service manager that has started us, systemd say, how we are. It names a socket in the environment for that."""

from __future__ import annotations

import logging
import os
import socket

logger = logging.getLogger(__name__)

SOCKET_VARIABLE = "NOTIFY_SOCKET"


def tell_service_manager(state: str) -> None:
    """Does nothing where nobody wants to know."""
    address = os.environ.get(SOCKET_VARIABLE)
    if not address:
        return
    if address.startswith("@"):  # a name without a file
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.sendto(state.encode(), address)
    except OSError as error:
        logger.warning("cannot tell the service manager at %s=%s: %s", SOCKET_VARIABLE, address, error)
