"""A Ray cluster of several nodes on one machine: network namespaces on a bridge, real raylets, links that can be cut.

The head gives no CPU away, as the one of a cluster whose workers compute. Needs root and `ip`. By hand: `scripts/netns_cluster`
makes one, says how to serve in it, and takes orders until it is told to end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

HEAD = "head"
GCS_PORT = 6379
START_TIMEOUT_S = 300.0  # 3 s on a machine that has nothing else to do
END_TIMEOUT_S = 20.0
_OBJECT_STORE_BYTES = 80_000_000

_RAY = [sys.executable, "-m", "ray.scripts.scripts"]
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    # Workers are nice by default: on a machine with other work ranks would start after minutes.
    "RAY_worker_niceness": "0",
}


def why_not() -> str | None:
    """Why this machine cannot have one; None when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "`ip` is not installed (Debian: iproute2)"
    probe = f"gw-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "del", probe)
    return None


class NetnsCluster:
    """A context manager. Nodes are called "head", "worker-1", …; each has an address of its own in 10.99.0.0/24, which nobody
    outside of the namespaces sees."""

    def __init__(self) -> None:
        self._prefix = f"gw{secrets.token_hex(2)}"
        self._bridge = f"{self._prefix}-net"
        self._addresses: dict[str, str] = {}
        self._directory = Path()
        self.environment = {**os.environ, **_VARIABLES, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def __enter__(self) -> NetnsCluster:
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="gw-ns-", dir="/tmp"))  # Ray's socket paths must be short
            _ip("netns", "add", self._bridge)
            _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._bridge, "link", "set", "br0", "up")
            self._add_node(HEAD)
            head = ["--head", f"--port={GCS_PORT}", "--num-cpus=0", f"--temp-dir={self._directory}", "--no-monitor"]
            self._start_ray(HEAD, *head, "--include-dashboard=false")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def ray_address(self) -> str:
        return f"{self._addresses[HEAD]}:{GCS_PORT}"

    @property
    def nodes(self) -> list[str]:
        return list(self._addresses)

    def namespace(self, node: str) -> str:
        return f"{self._prefix}-{node}"

    def inside(self, node: str, command: Sequence[str]) -> list[str]:
        """The command, to be run on that node."""
        return ["ip", "netns", "exec", self.namespace(node), *command]

    def add_worker(self, node: str, num_cpus: int = 1) -> None:
        """One that is new, or one that was there, started anew and with its link mended."""
        if node in self._addresses:
            self._end_processes(node)
        else:
            self._add_node(node)
        self.mend(node)
        self._start_ray(node, f"--address={self.ray_address}", f"--num-cpus={num_cpus}")

    def cut(self, node: str) -> None:
        """Pulls its cable: no packet goes in or out, and nobody is told."""
        _ip("-n", self._bridge, "link", "set", node, "down")

    def mend(self, node: str) -> None:
        _ip("-n", self._bridge, "link", "set", node, "up")

    def kill(self, node: str) -> None:
        """All its processes at once."""
        for pid in self.pids(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self, node: str) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.namespace(node)).split()]

    def close(self) -> None:
        for node in self._addresses:
            self._end_processes(node)
            _ip("netns", "del", self.namespace(node), check=False)
        self._addresses.clear()
        _ip("netns", "del", self._bridge, check=False)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _end_processes(self, node: str) -> None:
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while self.pids(node) and time.monotonic() < deadline_s:
            self.kill(node)
            time.sleep(0.05)

    def _add_node(self, node: str) -> None:
        address = f"10.99.0.{len(self._addresses) + 1}"
        namespace = self.namespace(node)
        _ip("netns", "add", namespace)
        self._addresses[node] = address
        # The bridge's end of the cable has the node's name: it must be shorter than 16 characters.
        _ip("link", "add", node, "netns", self._bridge, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("-n", self._bridge, "link", "set", node, "master", "br0", "up")
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", link, "up")

    def _start_ray(self, node: str, *words: str) -> None:
        command = [
            *_RAY, "start", f"--node-ip-address={self._addresses[node]}", f"--node-name={node}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}", "--disable-usage-stats", "--include-log-monitor=false",
            "--log-style=record", "--log-color=false", *words,
        ]  # fmt: skip
        done = subprocess.run(
            self.inside(node, command), env=self.environment, cwd="/", capture_output=True, text=True,
            timeout=START_TIMEOUT_S, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(f"`ray start` on {node} exited with code {done.returncode}:\n{done.stdout}{done.stderr}")


def _ip(*words: str, check: bool = True) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"`ip {shlex.join(words)}` failed: {done.stderr.strip()}")
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/netns_cluster", description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="worker nodes (default: 2)")
    parser.add_argument("--cpus", type=int, default=1, help="CPUs that each may give away (default: 1)")
    args = parser.parse_args()
    if (reason := why_not()) is not None:
        print(f"netns_cluster: {reason}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # else namespaces and their processes would stay
    with NetnsCluster() as cluster:
        for i in range(args.workers):
            cluster.add_worker(f"worker-{i + 1}", args.cpus)
        variables = [f"{name}={cluster.environment[name]}" for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")]
        serve = cluster.inside(HEAD, [sys.executable, "-m", "gateway", "serve", "MODEL", "--ray-address", cluster.ray_address])
        print(f"nodes: {', '.join(cluster.nodes)}. To serve, in another terminal:\n")
        print(f"  {shlex.join(['env', *variables, *serve, '-dp', '2', '--engine', 'simulated'])}\n")
        print("Its addresses exist in the namespaces only, so whoever asks must be there, too:\n")
        print(f"  {shlex.join(cluster.inside(HEAD, [sys.executable, '-m', 'gateway', 'status']))}")
        print(f"  {shlex.join(cluster.inside(HEAD, ['curl', '-s', 'http://127.0.0.1:8000/ready']))}\n")
        print("The token in a command line, where all can see it, and the path to Python are for this demonstration only.\n")
        _obey(cluster, args.cpus)
    return 0


def _obey(cluster: NetnsCluster, num_cpus: int) -> None:
    """Orders from the terminal, until its end or Ctrl-C."""
    orders = {
        "kill": cluster.kill,
        "cut": cluster.cut,
        "mend": cluster.mend,
        "add": lambda node: cluster.add_worker(node, num_cpus),
    }
    print("orders: kill|cut|mend|add NODE; end with Ctrl-C", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        for line in sys.stdin:
            word, _, node = line.strip().partition(" ")
            if word not in orders or (word != "add" and node not in cluster.nodes):
                print(f"not an order: {line.strip()!r}", flush=True)
                continue
            try:
                orders[word](node)
            except RuntimeError as error:
                print(error, flush=True)
            else:
                print(f"done: {word} {node}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
