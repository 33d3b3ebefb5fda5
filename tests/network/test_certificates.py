import re
import shutil
import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("nvflare", reason="the extra `network` is not installed")

from firm.network import certificates, kits


@pytest.fixture(scope="module")
def federations(tmp_path_factory):
    """The kits of two federations on this machine."""
    return [
        kits.provision(
            tmp_path_factory.mktemp(name), name=name, host="localhost", port=8123, sites=["bank"]
        )
        for name in ("ours", "theirs")
    ]


@pytest.fixture(scope="module")
def server(federations):
    """The port of a server of the first federation, which asks for certificates."""
    startup = federations[0]["server"] / "startup"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=startup / "rootCA.pem")
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    listener = socket.create_server(("localhost", 0))

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                with context.wrap_socket(connection, server_side=True) as secured:
                    secured.recv(1)
            except OSError:
                connection.close()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


@pytest.mark.parametrize("party", ["bank", "admin"])
def test_a_kit_of_the_federation_is_accepted(federations, server, party):
    assert certificates.refusal(federations[0][party], "localhost", server) is None


def test_a_server_of_another_federation_is_none(federations, server):
    reason = certificates.refusal(federations[1]["bank"], "localhost", server)
    assert reason is not None
    assert reason.startswith("the server's certificate does not belong to this kit")


def test_a_certificate_of_another_authority_is_not_taken(federations, server, tmp_path):
    kit = shutil.copytree(federations[1]["bank"], tmp_path / "bank")
    shutil.copy(federations[0]["bank"] / "startup/rootCA.pem", kit / "startup/rootCA.pem")
    reason = certificates.refusal(kit, "localhost", server)
    assert reason is not None
    assert reason.startswith("the server rejects this kit's certificate")


@pytest.mark.parametrize("num_ended", [1, 2])
def test_a_server_that_ends_the_connection_twice_does_not_take_a_certificate(
    federations, num_ended
):
    startup = federations[0]["server"] / "startup"
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    with socket.create_server(("localhost", 0)) as listener:

        def answer():
            for number in range(2):
                connection, _ = listener.accept()
                with context.wrap_socket(connection, server_side=True) as secured:
                    if number >= num_ended:
                        secured.recv(1)  # it goes on

        threading.Thread(target=answer, daemon=True).start()
        reason = certificates.refusal(
            federations[0]["bank"], "localhost", listener.getsockname()[1]
        )
    if num_ended == 1:
        assert reason is None
    else:
        assert reason == "the server rejects this kit's certificate (it ends the connection)"


def test_a_server_under_another_name_is_none(federations, server):
    reason = certificates.refusal(federations[0]["bank"], "127.0.0.1", server)
    assert reason is not None
    assert "mismatch" in reason.lower()


def test_a_server_that_speaks_in_plain_text_is_told(federations):
    with socket.create_server(("localhost", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            with connection:
                connection.recv(2000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = listener.getsockname()[1]
        reason = certificates.refusal(federations[0]["bank"], "localhost", port)
        thread.join()
    assert reason is not None
    assert reason.startswith("the server does not speak TLS")


def test_certificates_end(federations):
    kit = federations[0]["bank"]
    assert certificates.expiry(kit) is None
    late = datetime.now(UTC) + timedelta(days=400)
    told = certificates.expiry(kit, now=late)
    assert told is not None
    assert re.search(rf"client\.crt is valid from \S+ to \S+, and today is {late:%Y-%m-%d}", told)
    early = datetime.now(UTC) - timedelta(days=9)
    assert certificates.expiry(kit, now=early) is not None
