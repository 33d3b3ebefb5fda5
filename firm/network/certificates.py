"""Checks a kit's certificates before any other connection with them is attempted."""

import socket
import ssl
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509

from firm.federation.outside import printable

_PATIENCE = 1.0
"""Seconds to wait for a rejection: in TLS 1.3, a server that accepts a certificate stays silent."""

_ENDED = "the server rejects this kit's certificate (it ends the connection)"


def expiry(kit: Path, *, now: datetime | None = None) -> str | None:
    """Describes the first certificate of a kit that is not valid now; None if all are valid."""
    now = now or datetime.now(UTC)
    for path in sorted([*(kit / "startup").glob("*.crt"), kit / "startup/rootCA.pem"]):
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if not first <= now <= last:
            return (
                f"{path} is valid from {first:%Y-%m-%d} to {last:%Y-%m-%d}, and today is {now:%F}"
            )
    return None


def refusal(kit: Path, host: str, port: int) -> str | None:
    """Describes why a server and another party's kit reject each other; None if they do not.

    Raises:
        OSError: The server cannot be reached.
    """
    problem = _refusal(kit, host, port)
    # A server that is shutting down also ends connections, so a second attempt must fail as well.
    return _refusal(kit, host, port) if problem == _ENDED else problem


def _refusal(kit: Path, host: str, port: int) -> str | None:
    startup = kit / "startup"
    context = ssl.create_default_context(cafile=startup / "rootCA.pem")
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    with socket.create_connection((host, port), timeout=5) as connection:
        try:
            with context.wrap_socket(connection, server_hostname=host) as secured:
                secured.settimeout(_PATIENCE)
                with suppress(TimeoutError):
                    if not secured.recv(1):
                        return _ENDED
        except ssl.SSLCertVerificationError as error:
            problem = printable(error.verify_message)
            return f"the server's certificate does not belong to this kit ({problem})"
        except ssl.SSLError as error:
            problem = printable(error.reason or error).lower().replace("_", " ")
            if "alert" in problem:
                return f"the server rejects this kit's certificate ({problem})"
            return f"the server does not speak TLS ({problem})"
    return None
