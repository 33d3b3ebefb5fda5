"""Checks that a request comes from this machine and not from another site's page in a browser."""

import ipaddress
import socket
from urllib.parse import urlsplit


def foreign(host: str, origin: str | None) -> str | None:
    """Returns why a request is not from this machine, or None if it is.

    A foreign page could point its domain name at this machine and then read the responses (DNS
    rebinding), so requests must name this machine as their host.

    Args:
        host: The request's header Host.
        origin: Its header Origin; None without one.
    """
    if not is_local(_host_of(f"//{host}") or ""):
        return "The request is for another host; use the address that this server printed."
    if origin is not None and not is_local(_host_of(origin) or ""):
        return "The request comes from another page."
    return None


def is_local(host: str) -> bool:
    """Returns whether a host is this machine, so that a server bound to it answers no other."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, api_key: str | None) -> None:
    """Raises `ValueError` if other machines could reach a host without a key."""
    if api_key is None and not is_local(host):
        raise ValueError(
            f"host {host} can be reached from other machines, which needs a key: pass "
            "--api_key_file, or --host 127.0.0.1."
        )


def family_of(host: str) -> socket.AddressFamily:
    """Returns the address family of a host to bind."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _host_of(url: str) -> str | None:
    try:
        return urlsplit(url).hostname if "@" not in url else None
    except ValueError:
        return None
