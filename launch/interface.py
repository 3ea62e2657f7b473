"""The address of rank 0 that every other rank reaches, found by trying, not by resolving names.

A host's own name often resolves to loopback or to nothing, and a host may have interfaces that others don't reach
(containers, management). So rank 0 listens on all its addresses, the others try each of them, and the first that all
reached is taken. A random token proves that it was rank 0 that answered.
"""

import contextlib
import fcntl
import json
import secrets
import selectors
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

from dist_infer.errors import DistInferError

TRY_S = 2.0

_SIOCGIFADDR = 0x8915
_TOKEN_BYTES = 16


class Gather(Protocol):
    """What is needed of the control plane."""

    rank: int

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes on every rank."""


def own_addresses() -> list[str]:
    """IPv4 addresses of this host's interfaces except loopback, in the kernel's order."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                reply = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(reply[20:24]))
    return [address for address in found if not address.startswith("127.")]


def find_address(control: Gather, candidates: Sequence[str], *, try_s: float = TRY_S) -> str:
    """One of rank 0's candidates that all ranks reach.

    Ranks: collective over the world; the candidates of rank 0 count, `own_addresses()` as a rule.
    Errors: DistInferError on every rank where there is none.
    """
    with contextlib.ExitStack() as open_now:
        offer = open_now.enter_context(_listening(candidates)) if control.rank == 0 else {}
        offer = json.loads(control.gather(json.dumps(offer).encode())[0])
        reached = [_answers(address, port, offer["token"], try_s) for address, port in offer["endpoints"]]
        tables = [json.loads(data) for data in control.gather(json.dumps([socket.gethostname(), reached]).encode())]
    addresses = [address for address, _ in offer["endpoints"]]
    for idx, address in enumerate(addresses):
        if all(ok[idx] for _, ok in tables):
            return str(address)
    lost = sorted({f"rank {rank} (host {host})" for rank, (host, ok) in enumerate(tables) if not any(ok)})
    raise DistInferError(
        f"no address of rank 0's host is reached by all ranks; tried {addresses or 'none: only loopback is up'}"
        + (f", not reached at all by {', '.join(lost)}" if lost else "")
        + "; open TCP between the hosts, or start all ranks on one host"
    )


@contextlib.contextmanager
def _listening(candidates: Sequence[str]) -> Iterator[dict[str, object]]:
    """Listen on a free port of every candidate and answer each connection with the token."""
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    with contextlib.ExitStack() as sockets, selectors.DefaultSelector() as selector:
        endpoints = []
        for address in candidates:
            listener = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):  # an address that went away
                listener.bind((address, 0))
                listener.listen(1024)
                listener.setblocking(False)
                selector.register(listener, selectors.EVENT_READ)
                endpoints.append(listener.getsockname())
        stop = threading.Event()
        server = threading.Thread(target=_serve, args=(selector, token.encode(), stop), daemon=True)
        server.start()
        try:
            yield {"token": token, "endpoints": endpoints}
        finally:
            stop.set()
            server.join()


def _serve(selector: selectors.BaseSelector, token: bytes, stop: threading.Event) -> None:
    while not stop.is_set():
        if not selector.get_map():
            return
        for key, _ in selector.select(0.05):
            with contextlib.suppress(OSError):
                connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                with connection:
                    connection.sendall(token)


def _answers(address: str, port: int, token: str, try_s: float) -> bool:
    try:
        with socket.create_connection((address, port), timeout=try_s) as connection:
            heard = b""
            while len(heard) < len(token) and (part := connection.recv(len(token) - len(heard))):
                heard += part
            return heard.decode(errors="replace") == token
    except OSError:
        return False
