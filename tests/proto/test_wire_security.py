"""Who may connect, and what a worker refuses to do without a secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from transport_ends import copies, ping, send_up

from dspark_proto import ErrorCode, LocalProtocolError
from dspark_proto.transports import (
    ClientTransport,
    CurveFiles,
    Security,
    ServerTransport,
    TlsFiles,
    TransportError,
    open_client,
    open_server,
)
from dspark_proto.transports.curve import write_curve_keys
from dspark_proto.transports.endpoint import Address, is_local, parse_address, scheme_of
from dspark_proto.transports.security import check_listen, read_private, read_secret
from dspark_proto.transports.zmq import ZmqServer
from tests.link_keys import Keys, make_keys

SECRET = b"0123456789abcdef"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def psk(tmp_path: Path) -> Security:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return Security(psk_file=path)


# Addresses


@pytest.mark.parametrize(
    ("endpoint", "local"),
    [
        ("tcp://127.0.0.1:5555", True),
        ("tcp://localhost:5555", True),
        ("plain+tcp://[::1]:5555", True),
        ("ucx://127.0.0.2:5555", True),
        ("ipc:///run/dspark.sock", True),
        ("inproc://x", True),
        ("tcp://*:5555", False),
        ("tcp://0.0.0.0:5555", False),
        ("plain+tcp://192.168.1.2:5555", False),
        ("tls+tcp://worker.invalid:5555", False),
        ("ucx://[fe80::1]:5555", False),
        ("tcp://:5555", False),
    ],
)
def test_only_loopback_is_local(endpoint: str, local: bool) -> None:
    assert is_local(endpoint) is local
    if not local:
        with pytest.raises(LocalProtocolError, match="other machines") as refusal:
            open_server(endpoint)
        assert refusal.value.code is ErrorCode.AUTH_UNSUPPORTED


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("plain+tcp://10.0.0.7:7777", Address("plain+tcp", "10.0.0.7", 7777)),
        ("tls+tcp://worker.example:0", Address("tls+tcp", "worker.example", 0)),
        ("ucx://[::1]:9", Address("ucx", "::1", 9)),
    ],
)
def test_addresses_are_read_and_written(text: str, address: Address) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["plain+tcp://host", "plain+tcp://:1", "plain+tcp://h:99999", "ucx://h:1/x", "tcp://h:y"]
)
def test_a_wrong_address_says_what_to_give(text: str) -> None:
    with pytest.raises(TransportError, match=r"give .*://host:port"):
        parse_address(text)


@pytest.mark.parametrize("text", ["nowhere", "http://127.0.0.1:1", "tcp:127.0.0.1:1", "TCP://127.0.0.1:1"])
def test_an_unknown_scheme_names_the_known_ones(text: str) -> None:
    for open_one in (open_client, open_server, scheme_of):
        with pytest.raises(TransportError, match="plain\\+tcp://"):
            open_one(text)


@pytest.mark.parametrize("scheme", ["tcp", "plain+tcp"])
def test_an_address_that_is_taken_is_one_clear_error(scheme: str) -> None:
    server = open_server(f"{scheme}://127.0.0.1:0")
    with pytest.raises(TransportError, match="in use"):
        open_server(server.endpoint)
    server.close()


def test_a_name_that_does_not_resolve_is_one_clear_error() -> None:
    with pytest.raises(TransportError, match=r"worker\.invalid"):
        open_client("plain+tcp://worker.invalid:1")


# Listening where others can connect


@pytest.mark.parametrize("scheme", ["tcp", "plain+tcp", "ucx"])
def test_other_machines_need_a_secret(scheme: str, psk: Security) -> None:
    endpoint = f"{scheme}://0.0.0.0:0"
    with pytest.raises(LocalProtocolError, match="secret file"):
        check_listen(endpoint, Security())
    check_listen(endpoint, psk)


def test_a_protection_counts_only_where_it_works(keys: Keys) -> None:
    curve = keys.curve_of("worker", "allowed")
    check_listen("tcp://0.0.0.0:0", curve)
    with pytest.raises(LocalProtocolError, match="secret file, or use tls"):
        check_listen("plain+tcp://0.0.0.0:0", curve)
    tls = Security(tls=TlsFiles(Path("ca"), Path("certificate"), Path("key")))
    check_listen("tls+tcp://0.0.0.0:0", tls)
    with pytest.raises(LocalProtocolError, match="CURVE keys or a secret file"):
        check_listen("tcp://0.0.0.0:0", tls)


@pytest.mark.parametrize("scheme", ["tcp", "plain+tcp"])
def test_with_a_secret_another_interface_is_bound(scheme: str, psk: Security) -> None:
    server = open_server(f"{scheme}://0.0.0.0:0", psk)
    assert server.endpoint.startswith(f"{scheme}://0.0.0.0:")
    server.close()


@pytest.mark.parametrize(
    ("endpoint", "security", "words"),
    [
        ("plain+tcp://127.0.0.1:0", Security(curve=CurveFiles(Path("a"), Path("b"))), "CURVE keys are for tcp://"),
        ("ipc:///tmp/x", Security(curve=CurveFiles(Path("a"), Path("b"))), "CURVE keys are for tcp://"),
        ("tcp://127.0.0.1:0", Security(tls=TlsFiles(Path("a"), Path("b"), Path("c"))), "are for tls\\+tcp://"),
        ("plain+tcp://127.0.0.1:0", Security(tls=TlsFiles(Path("a"), Path("b"), Path("c"))), "are for tls\\+tcp://"),
        ("tls+tcp://127.0.0.1:0", Security(), "give the TLS certificates"),
    ],
)
def test_keys_of_another_transport_are_refused_not_ignored(endpoint: str, security: Security, words: str) -> None:
    for open_one in (open_client, open_server):
        with pytest.raises(TransportError, match=words):
            open_one(endpoint, security)


# Files


def test_a_secret_comes_from_a_private_file(psk: Security) -> None:
    assert psk.psk() == SECRET
    assert Security().psk() is None
    assert psk.psk_file is not None
    psk.psk_file.write_bytes(SECRET + b"\n")
    assert psk.psk() == SECRET


def test_the_secret_becomes_proofs_bound_to_the_scheme(psk: Security) -> None:
    assert Security().authentication("tcp://h:1") is None
    made = psk.authentication("plain+tcp://h:1")
    assert made is not None
    assert (made.secret, made.binding) == (SECRET, b"plain+tcp")
    assert len({made.nonce() for _ in range(20)}) == 20
    assert SECRET.decode() not in repr(made)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610, 0o644, 0o777])
def test_a_file_that_others_may_touch_is_refused(psk: Security, mode: int) -> None:
    assert psk.psk_file is not None
    psk.psk_file.chmod(mode)
    with pytest.raises(TransportError, match=f"mode {mode:o}\\): chmod 600"):
        psk.psk()


@pytest.mark.parametrize("content", [b"", b"\n", b"x" * 15, b" " * 20, b"x" * 4097])
def test_an_empty_short_or_endless_secret_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(TransportError, match="16 to 4096"):
        read_secret(path)


def test_what_is_no_private_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="No such file"):
        read_private(tmp_path / "missing")
    with pytest.raises(TransportError, match="directory"):
        read_private(tmp_path)
    with pytest.raises(TransportError, match="not a regular file"):
        read_private(Path("/dev/null"))
    large = tmp_path / "large"
    large.write_bytes(bytes(2**16 + 1))
    large.chmod(0o600)
    with pytest.raises(TransportError, match="larger"):
        read_private(large)


def test_new_curve_keys_are_private_and_never_overwritten(tmp_path: Path) -> None:
    public = write_curve_keys(tmp_path / "worker")
    assert public == tmp_path / "worker.pub"
    assert stat.S_IMODE((tmp_path / "worker").stat().st_mode) == 0o600
    before = (tmp_path / "worker").read_bytes()
    with pytest.raises(TransportError, match="File exists"):
        write_curve_keys(tmp_path / "worker")
    assert (tmp_path / "worker").read_bytes() == before


# Strangers


def refused(server: ServerTransport, client: ClientTransport, turns: int = 60) -> bool:
    """Whether nothing that the client sends arrives, although both ends turn."""
    for _ in range(turns):
        client.send([ping(1)], 5)
        client.poll(0)
        if copies(server.poll(5)):
            return False
    return True


def test_curve_admits_the_keys_of_the_list_and_no_others(keys: Keys) -> None:
    server = ZmqServer("tcp://127.0.0.1:0", keys.curve_of("worker", "allowed"))
    stranger = open_client(server.endpoint, keys.curve_of("stranger", "worker.pub"))
    assert refused(server, stranger)
    assert server._gate is not None
    assert server._gate.refused > 0
    known = open_client(server.endpoint, keys.curve_of("spark", "worker.pub"))
    assert send_up(server, known, ping(2))[0][1] == ping(2)
    for client in (stranger, known):
        client.close()
    server.close()


def test_curve_client_refuses_a_worker_with_another_key(keys: Keys) -> None:
    server = ZmqServer("tcp://127.0.0.1:0", keys.curve_of("stranger", "allowed"))
    client = open_client(server.endpoint, keys.curve_of("spark", "worker.pub"))
    assert refused(server, client)
    client.close()
    server.close()


def test_curve_worker_refuses_a_client_without_keys_and_the_reverse(keys: Keys) -> None:
    secured = ZmqServer("tcp://127.0.0.1:0", keys.curve_of("worker", "allowed"))
    bare = open_client(secured.endpoint)
    assert refused(secured, bare, 20)
    open_ = ZmqServer("tcp://127.0.0.1:0")
    strict = open_client(open_.endpoint, keys.curve_of("spark", "worker.pub"))
    assert refused(open_, strict, 20)
    for end in (bare, strict, secured, open_):
        end.close()


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"", "holds no key"), (b"# none\n", "holds no key"), (b"short", "no CURVE key"), (b"~" * 40, "no CURVE key")],
)
def test_curve_lists_that_cannot_be_used(keys: Keys, tmp_path: Path, content: bytes, words: str) -> None:
    listed = tmp_path / "allowed"
    listed.write_bytes(content)
    security = Security(curve=CurveFiles(keys.curve / "worker", listed))
    with pytest.raises(TransportError, match=words):
        ZmqServer("tcp://127.0.0.1:0", security)


def test_a_curve_client_knows_exactly_one_worker(keys: Keys, tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.write_bytes((keys.curve / "worker.pub").read_bytes() + (keys.curve / "spark.pub").read_bytes())
    with pytest.raises(TransportError, match="holds 2 keys"):
        open_client("tcp://127.0.0.1:1", Security(curve=CurveFiles(keys.curve / "spark", both)))


def test_curve_and_tls_keys_must_be_private(keys: Keys, tmp_path: Path) -> None:
    copied = tmp_path / "key"
    copied.write_bytes((keys.curve / "worker").read_bytes())
    copied.chmod(0o644)
    with pytest.raises(TransportError, match="chmod 600"):
        ZmqServer("tcp://127.0.0.1:0", Security(curve=CurveFiles(copied, keys.curve / "allowed")))
    files = keys.tls_of("worker").tls
    assert files is not None
    with pytest.raises(TransportError, match="chmod 600"):
        open_server("tls+tcp://127.0.0.1:0", Security(tls=TlsFiles(files.ca, files.certificate, copied)))


@pytest.mark.parametrize(("name", "authority"), [("stranger", "ca"), ("spark", "other"), ("stranger", "other")])
def test_tls_strangers_get_nowhere(keys: Keys, name: str, authority: str) -> None:
    """A certificate of another CA, or a client that trusts another CA."""
    server = open_server("tls+tcp://127.0.0.1:0", keys.tls_of("worker"))
    client = open_client(server.endpoint, keys.tls_of(name, authority))
    assert refused(server, client, 30)
    client.close()
    server.close()


def test_tls_client_checks_whose_certificate_it_is(keys: Keys) -> None:
    """The CA's signature is not enough: the certificate must name the host that was asked for."""
    server = open_server("tls+tcp://127.0.0.1:0", keys.tls_of("elsewhere"))
    client = open_client(server.endpoint, keys.tls_of("spark"))
    assert refused(server, client, 30)
    client.close()
    server.close()


def test_tls_files_that_cannot_be_used_are_named(keys: Keys) -> None:
    files = keys.tls_of("worker").tls
    assert files is not None
    for changed, words in (
        (TlsFiles(Path("/nonexistent"), files.certificate, files.key), "/nonexistent"),
        (TlsFiles(files.key, files.certificate, files.key), "no CA certificate"),
        (TlsFiles(files.ca, files.ca, files.key), "no certificate with its key"),
        (TlsFiles(files.ca, files.certificate, Path("/nonexistent")), "/nonexistent"),
    ):
        with pytest.raises(TransportError, match=words):
            open_server("tls+tcp://127.0.0.1:0", Security(tls=changed))
