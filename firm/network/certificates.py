"""Checks a kit's certificates before any other connection with them is attempted."""

import socket
import ssl
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key
from cryptography.x509.oid import NameOID

from firm.base.sanitize import printable

_PATIENCE = 1.0
"""Seconds to wait for a rejection: in TLS 1.3, a server that accepts a certificate stays silent."""

_ENDED = "the server rejects this kit's certificate (it ends the connection)"


SITES = "sites"
"""Folder of a kit with the certificates of all sites."""


def share_certificates(kits: Mapping[str, Path], sites: Iterable[str]) -> None:
    """Copies the certificates of the sites to all kits, so that sites know each other's keys.

    Args:
        kits: Folders of the kits by party.
        sites: Names of the sites.
    """
    for kit in kits.values():
        (kit / SITES).mkdir()
        for site in sites:
            content = (kits[site] / "startup/client.crt").read_bytes()
            (kit / SITES / f"{site}.crt").write_bytes(content)


def signing_key(kit: Path) -> RSAPrivateKey:
    """Returns the private key of a site's certificate, which never leaves its kit."""
    key = load_pem_private_key((kit / "startup/client.key").read_bytes(), password=None)
    if not isinstance(key, RSAPrivateKey):
        raise ValueError(f"the key is of type {type(key).__name__}, not RSA")
    return key


def public_key(kit: Path, site: str) -> RSAPublicKey:
    """Returns the public key in a kit's copy of a site's certificate.

    Raises:
        ValueError: The certificate is not the site's, or not of this federation's authority.
        OSError: It is missing.
    """
    certificate = x509.load_pem_x509_certificate((kit / SITES / f"{site}.crt").read_bytes())
    authority = x509.load_pem_x509_certificate((kit / "startup/rootCA.pem").read_bytes())
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if [name.value for name in names] != [site]:
        raise ValueError("it is the certificate of another party")
    try:
        certificate.verify_directly_issued_by(authority)
    except InvalidSignature as error:
        raise ValueError("it is not of this federation's authority") from error
    key = certificate.public_key()
    if not isinstance(key, RSAPublicKey):
        raise ValueError(f"its key is of type {type(key).__name__}, not RSA")
    return key


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
