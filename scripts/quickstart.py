"""Starts `gateway serve` with the quickstart configuration and prints one streamed chat answer.

Stays in the foreground until Ctrl-C. `--check` ends after the answer and exits 0 only if it was right.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the capital of France?"
READY = "gateway ready: "
STOP_TIMEOUT_S = 60


def start_server(port: int | None) -> tuple[subprocess.Popen[str], str]:
    """Starts the server and returns it with its URL once it is ready."""
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(ROOT / "configs/quickstart.yaml")]
    if port is not None:
        command += ["--port", str(port)]
    print("Starting: gateway", *command[3:], flush=True)
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="", flush=True)
        if line.startswith(READY):
            return server, line.removeprefix(READY).split()[0]
    raise SystemExit(f"the server ended with exit code {server.wait()} before it was ready")


def stream_answer(url: str) -> Iterator[str]:
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 48,
    }
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]["delta"].get("content") or ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="stop after the answer; exit 0 only if it was right")
    parser.add_argument("--port", type=int, help="port to listen on; default: the configuration's, with --check any free one")
    args = parser.parse_args()
    server, url = start_server(0 if args.check and args.port is None else args.port)
    try:
        print(f"\n> {QUESTION}\n", flush=True)
        answer = ""
        for piece in stream_answer(url):
            answer += piece
            print(piece, end="", flush=True)
        print("\n", flush=True)
        status = f"{Path(sys.executable).with_name('gateway')} status --url {url}"
        if args.check:
            print(f"With --check the server ends now. While it runs: {status}", flush=True)
            return 0 if "Paris" in answer else 1
        print(f"The server runs on. Try: {status}    (Ctrl-C ends it)", flush=True)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            server.wait(STOP_TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main())
