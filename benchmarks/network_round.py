"""What a round costs over the network when the clients do nothing: seconds, bytes, memory.

    python benchmarks/network_round.py
    python benchmarks/network_round.py --megabytes 2 --num_sites 4

A server and its sites on this machine, by mutual TLS, each site with a process of its own. Every
message carries a payload of the given size, there and back; in a round of two phases the payload
goes out in both and comes back in the second.
"""

import json
import os
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.loopback import run_job
from firm.federation.serialization import pack, unpack
from firm.network import link
from firm.network.controller import FlareChannel, SitesController
from firm.network.daemons import search_path
from firm.run import print_table, run_cli

ROOT = Path(__file__).parent.parent
CONTROLLER = "benchmarks.network_round.Rounds"
LIMITS = {"one phase": 1.5, "two phases": 2.5}
"""Seconds that a round may cost."""


@dataclass(frozen=True)
class Config:
    num_sites: int = 1
    """Sites; all share this machine, so each adds its own work to a round."""
    megabytes: float = 18.0
    """Size of the payload, MB; 18 is the adapter of the paper's TinyLlama run."""
    num_rounds: int = 10
    """Rounds of each kind; the first of a job is not counted."""

    def __post_init__(self) -> None:
        if self.num_sites < 1 or self.num_rounds < 2 or not self.megabytes > 0:
            raise ValueError(
                "num_sites, num_rounds and megabytes must be at least 1, 2 and more than 0, got "
                f"{self.num_sites}, {self.num_rounds} and {self.megabytes:g}."
            )


class Rounds(SitesController):
    """Asks the sites for nothing, round after round, and writes down what that took."""

    def __init__(self, out: str, sites: list[str], megabytes: float, num_rounds: int) -> None:
        super().__init__()
        self._out, self._sites = Path(out), sites
        self._size, self._num_rounds = round(megabytes * 1e6 / 4), num_rounds

    def work(self, channel: FlareChannel) -> None:
        payload = torch.zeros(self._size)
        rows = []
        for number in range(self._num_rounds):
            for kind in LIMITS:
                start = time.perf_counter()
                if kind == "two phases":
                    self._ask(channel, {"payload": payload, "returns": False})
                answers = self._ask(channel, {"payload": payload, "returns": True})
                rows.append(
                    {
                        "kind": kind,
                        "round": number,
                        "seconds": time.perf_counter() - start,
                        "sites": {
                            site: {key: value for key, value in answer.items() if key != "payload"}
                            for site, answer in answers.items()
                        },
                    }
                )
        self._out.write_text(json.dumps(rows), encoding="utf-8")

    def _ask(self, channel: FlareChannel, message: dict[str, Any]) -> dict[str, Any]:
        packed = pack(message)
        answers = channel.ask(dict.fromkeys(self._sites, packed), timeout=120)
        return {site: unpack(answer) for site, answer in answers.items()}  # type: ignore[arg-type]


def main(cfg: Config) -> None:
    sites = [f"site_{index}" for index in range(cfg.num_sites)]
    rows, _ = _run(cfg, sites, cfg.num_rounds)
    counted, wire_bytes = _run(cfg, sites, 3, count_bytes=True)
    _print_rounds(cfg, rows)
    _print_bytes(cfg, counted, wire_bytes)
    _print_processes(sites, rows)


def _run(
    cfg: Config, sites: list[str], num_rounds: int, *, count_bytes: bool = False
) -> tuple[list[dict[str, Any]], int]:
    """Returns a job's rounds and the bytes it sent, whose count takes time and so its own job."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        relays: list[Relay] = []

        def reroute(port: int) -> int:
            relays.append(Relay(port))
            return relays[0].port

        rows = run_job(
            folder / "kits",
            out=folder / "rows.json",
            name="benchmark",
            controller=CONTROLLER,
            arguments={
                "out": str(folder / "rows.json"),
                "sites": sites,
                "megabytes": cfg.megabytes,
                "num_rounds": num_rounds,
            },
            sites=sites,
            site_command=lambda _, profile: [sys.executable, __file__, "--site", str(profile)],
            environment=search_path(ROOT),
            heartbeat_timeout=20.0,
            reroute=reroute if count_bytes else None,
        )
        return rows, sum(relay.num_bytes for relay in relays)


def _print_rounds(cfg: Config, rows: list[dict[str, Any]]) -> None:
    table = []
    for kind, limit in LIMITS.items():
        own = [row["seconds"] for row in rows if row["kind"] == kind and row["round"] > 0]
        table.append([kind, f"{median(own):.2f}", f"{max(own):.2f}", f"{median(own) / limit:.2f}"])
    print_table(
        f"sites: {cfg.num_sites}, {cfg.megabytes:g} MB each way, mutual TLS on this machine, "
        f"{cfg.num_rounds - 1} rounds",
        ["round", "median s", "worst s", "of the limit"],
        table,
    )


def _print_bytes(cfg: Config, rows: list[dict[str, Any]], wire_bytes: int) -> None:
    payloads = cfg.num_sites * sum(3 if row["kind"] == "two phases" else 2 for row in rows)
    ledger = payloads * cfg.megabytes
    print_table(
        "The whole job, handshakes and signs of life included",
        ["ledger MB", "on the wire MB", "wire / ledger"],
        [[f"{ledger:.0f}", f"{wire_bytes / 1e6:.0f}", f"{wire_bytes / 1e6 / ledger:.3f}"]],
    )


def _print_processes(sites: list[str], rows: list[dict[str, Any]]) -> None:
    processes = []
    for site in sites:
        answers = [row["sites"][site] for row in rows]
        identities = {(each["process"], each["model"]) for each in answers}
        memory = max(each["memory"] for each in answers) / 1e6
        processes.append([site, "yes" if len(identities) == 1 else "no", f"{memory:.0f}"])
    print_table(
        "The sites' own processes",
        ["site", "same process and model in every round", "peak memory, MB"],
        processes,
    )


def serve(profile: Path) -> None:
    """Answers as a site whose client does nothing."""
    model = object()

    def answer(packed: bytes) -> bytes:
        message = unpack(packed)
        payload = {"payload": message["payload"]} if message["returns"] else {}
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        return pack(
            {
                **payload,
                "process": os.getpid(),
                "model": id(model),
                "memory": int(peak.split()[1]) * 1024,
            }
        )

    link.serve(profile, answer)


class Relay:
    """Stands between the sites and the server, and counts what passes, as TLS made it.

    Args:
        port: Of the server.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("localhost", 0))
        self.port: int = self._listener.getsockname()[1]
        self.num_bytes = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("localhost", self._target))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(source, sink), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while chunk := source.recv(1 << 20):
                sink.sendall(chunk)
                with self._lock:
                    self.num_bytes += len(chunk)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--site"]:
        serve(Path(sys.argv[2]))
    else:
        run_cli(main, Config, description=__doc__ or "")
