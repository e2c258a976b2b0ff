"""What `gateway status` costs: `python -m scripts.board_cost [--ranks N …] [--interval S] [--seconds S]`.

A made-up endpoint whose numbers all change between two looks, a terminal of 200×60, and the CPU time (user and system) of the
board's process as the kernel counts it, once it has started.
"""

from __future__ import annotations

import argparse
import fcntl
import multiprocessing
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized

from aiohttp import web

from scripts.board_scenes import status_at

WARM_UP_S = 6.0


def serve(num_ranks: int, port: Connection, num_looks: Synchronized[int]) -> None:
    """Says its port. Documents are made in advance: this process has little to do beside the one that is measured."""
    documents = [web.json_response(status_at(num_ranks, 60 + i / 4).to_document()).body for i in range(240)]

    async def status(_request: web.Request) -> web.Response:
        num_looks.value += 1
        return web.Response(body=documents[num_looks.value % len(documents)], content_type="application/json")

    async def on_start(_app: web.Application) -> None:
        port.send(sock.getsockname()[1])

    import socket

    sock = socket.create_server(("127.0.0.1", 0))
    app = web.Application()
    app.router.add_get("/status", status)
    app.on_startup.append(on_start)
    web.run_app(app, sock=sock, print=None, access_log=None)


def cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as file:
        user, system = file.read().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def measure(num_ranks: int, interval_s: float, seconds: float) -> tuple[float, float, float]:
    """Share of a core, bytes a second to the terminal, and looks a second that it took at the endpoint."""
    here, there = multiprocessing.Pipe()
    num_looks = multiprocessing.Value("i", 0)
    server = multiprocessing.Process(target=serve, args=(num_ranks, there, num_looks), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{here.recv()}"
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 200, 0, 0))
    command = [sys.executable, "-m", "gateway", "status", "--interval", str(interval_s), "--url", url]
    board = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=os.environ | {"TERM": "xterm-256color"})
    num_bytes = 0

    def read() -> None:
        nonlocal num_bytes
        while data := os.read(master, 65536):
            num_bytes += len(data)

    threading.Thread(target=read, daemon=True).start()
    try:
        time.sleep(WARM_UP_S)
        start_s, start_cpu_s, start_bytes, start_looks = time.monotonic(), cpu_s(board.pid), num_bytes, num_looks.value
        time.sleep(seconds)
        elapsed_s = time.monotonic() - start_s
        grown = (cpu_s(board.pid) - start_cpu_s, num_bytes - start_bytes, num_looks.value - start_looks)
        share, per_s, looks_per_s = (growth / elapsed_s for growth in grown)
        return share, per_s, looks_per_s
    finally:
        board.kill()
        board.wait()
        server.kill()
        server.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--interval", type=float, default=0.25)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    for num_ranks in args.ranks:
        share, per_s, looks_per_s = measure(num_ranks, args.interval, args.seconds)
        print(f"{num_ranks:>3} ranks, {looks_per_s:.2f} looks a second: {share:.2%} of a core, {per_s / 1000:.1f} kB/s")


if __name__ == "__main__":
    main()
