"""Flood a bank server in seven ways at once, and measure what an honest client notices.

    python -m benchmarks.flood [--seconds 12]

The server is a process of its own, with a token that most of the flood has too. The figures are
printed: the slowest hundredth of an honest client's searches before and during the flood, memory of
the server, and the first search after it. Times mean something on a quiet machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np

import experiential as xp
from experiential.bank.protocol import Bank

TOKEN = "the token"
FLOOD = """
import http.client, json, os, random, socket, sys, threading, time
port, token, seconds = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
os.nice(10)  # it would come from elsewhere: what it takes of this machine is not the matter
until = time.monotonic() + seconds
sent = {}
lines = []

def post(path, body, host="127.0.0.1", token=token, timeout=5):
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    headers = {"Host": host, "Content-Type": "application/json"}
    headers |= {"Authorization": "Bearer " + token} if token else {}
    line.request("POST", path, body, headers)
    status = line.getresponse().status
    line.close()
    return status

def half(data):
    line = socket.create_connection(("127.0.0.1", port), timeout=5)
    line.sendall(data)
    lines.append(line)
    if len(lines) > 400:
        lines.pop(0).close()
    return 0

many = json.dumps({"queries": ["a"] * 300_000})
head = f"POST /v1/add HTTP/1.1\\r\\nHost: localhost\\r\\nAuthorization: Bearer {token}\\r\\n"
body = (head + "Content-Length: 8000000\\r\\n\\r\\n").encode() + b" " * 2_000_000
ways = {
    "big k": lambda: post("/v1/search", json.dumps({"queries": ["a"] * 50, "k": 2_000_000_000})),
    "many queries": lambda: post("/v1/search", many),
    "unfinished bodies": lambda: half(body),
    "half-sent headers": lambda: half(b"GET / HTTP/1.1\\r\\nHost: lo"),
    "namespaces": lambda: post(f"/v1/info?namespace=n{random.random()}", "{}"),
    "wrong host": lambda: post("/v1/info", "{}", host="evil.example"),
    "no token": lambda: post("/v1/info", "{}", token=""),
}

def run(name, way):
    while time.monotonic() < until:
        try:
            said = way()
        except OSError:
            said = "cut"
        sent.setdefault(name, {}).setdefault(str(said), 0)
        sent[name][str(said)] += 1
        time.sleep(0.05)

threads = [threading.Thread(target=run, args=one) for one in ways.items()]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(sent))
"""


def memory(pid: int) -> int:
    """Return the resident MiB of a process."""
    line = next(
        row for row in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmRSS" in row
    )
    return int(line.split()[1]) // 1024


def cpu(pid: int) -> float:
    """Return the seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def waits(bank: Bank, seconds: float) -> list[float]:
    """Return how long each of a client's searches took."""
    taken: list[float] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        assert bank.search("red door", k=3)
        taken.append(time.monotonic() - began)
        time.sleep(0.02)
    return taken


def run(quiet: float = 6.0, seconds: float = 12.0) -> dict[str, Any]:
    """Return the figures of one flood.

    Args:
        quiet: seconds of searches before the flood.
        seconds: of the flood.
    """
    with TemporaryDirectory(prefix="experiential-flood-") as folder:
        command = [sys.executable, "-m", "experiential.cli.main", "serve", folder]
        command += ["--port", "0", "--embedder", "hashing", "--token", TOKEN]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                return measure(server.pid, server.stdout.readline().split()[1], quiet, seconds)
            finally:
                server.kill()


def measure(pid: int, url: str, quiet: float, seconds: float) -> dict[str, Any]:
    """Flood the server at an address, and return the figures."""
    with xp.ExperienceBank(url, token=TOKEN) as bank:
        bank.add_many([f"the {i}. red door" for i in range(2000)])
        waits(bank, quiet / 3)  # warms up
        usual = waits(bank, quiet)
        before, used, began = memory(pid), cpu(pid), time.monotonic()
        command = [sys.executable, "-c", FLOOD, url.rsplit(":", 1)[1], TOKEN, str(seconds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flood:
            peak, taken = before, list[float]()
            while flood.poll() is None:
                taken += waits(bank, 0.5)
                peak = max(peak, memory(pid))
            assert flood.stdout is not None
            sent = json.loads(flood.stdout.read())
        lasted, ended = time.monotonic() - began, time.monotonic()
        assert bank.search("red door")
        recovery = time.monotonic() - ended
        health = httpx.get(f"{url}/v1/health", headers={"Authorization": f"Bearer {TOKEN}"})
    p99 = [1000 * float(np.quantile(row, 0.99)) for row in (usual, taken)]
    return {
        "quiet p99 ms": round(p99[0], 1),
        "flood p99 ms": round(p99[1], 1),
        "ratio": round(p99[1] / p99[0], 2),
        "memory MiB": (before, peak),
        "recovery ms": round(1000 * recovery, 1),
        "flood s": round(lasted, 1),
        "honest requests": len(taken),
        "namespaces": len(health.json()["namespaces"]),
        "server cpu s": round(cpu(pid) - used, 1),
        "load": os.getloadavg()[0],
        "sent": sent,
    }


def main() -> None:
    """Run the flood that the command line asks for, and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quiet", type=float, default=6.0, help="seconds before the flood")
    parser.add_argument("--seconds", type=float, default=12.0, help="seconds of the flood")
    options = parser.parse_args()
    print(json.dumps(run(options.quiet, options.seconds), indent=1))


if __name__ == "__main__":
    main()
