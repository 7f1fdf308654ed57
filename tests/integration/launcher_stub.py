"""A worker without a model: it speaks the agent's channel as the runtime does, and misbehaves on request.

Run by the launcher as an ordinary script; imports no torch, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.wire.handshake import dial

HOLDERS = {"0": ["m0", "m1"], "1": ["m1", "m2"], "2": ["m2", "m0"]}


class Agent:
    """The worker's end of the channel."""

    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect("\0" + os.environ["ELASTRAIN_AGENT"])
        secret = Path(os.environ["ELASTRAIN_SECRET_FILE"]).read_bytes()
        dial(self.sock, secret=secret, job=os.environ["ELASTRAIN_JOB"], me=os.environ["ELASTRAIN_MEMBER"], timeout_s=5)
        self._rest = b""

    def say(self, message_type: str, fds: tuple[int, ...] = (), **fields: Any) -> None:
        line = json.dumps({"type": message_type, **fields}).encode() + b"\n"
        if fds:
            socket.send_fds(self.sock, [line], list(fds))
        else:
            self.sock.sendall(line)

    def hear(self, timeout_s: float) -> list[dict[str, Any]]:
        """What came within the time; ends the process when the agent is gone."""
        if not select.select([self.sock], [], [], timeout_s)[0]:
            return []
        data = self.sock.recv(1 << 16)
        if not data:
            os._exit(7)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]


def main() -> None:
    options = _options()
    me = os.environ["ELASTRAIN_MEMBER"]
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if me in options.child_of and os.fork() == 0:
        signal.pause()
    if me in options.raise_at_import:
        raise ImportError("no such thing as a flux capacitor")
    beacon = Beacon()
    agent = Agent()
    spec = {"seed": 0, "torch": "2.13.0", **({"seed": 1} if me in options.other_spec else {})}
    if me in options.never_ready:
        while True:
            agent.hear(60)
    agent.say("hello", (beacon.fd,), member=me, pid=os.getpid(), address=f"unix:{me}", spec=spec, beacon=True)
    if me in options.garbage:
        agent.sock.sendall(b"{]\n")
    Worker(me, agent, options).train()


class Worker:
    def __init__(self, me: str, agent: Agent, options: argparse.Namespace) -> None:
        self.me, self.agent, self.options = me, agent, options
        self.view: dict[str, Any] | None = None
        self.fault: dict[str, Any] | None = None

    def train(self) -> None:
        while self.view is None:
            self._listen(60)
        for step in range(10_000):
            self._maybe_fail(step)
            self._step(step)
            if self.options.finish.exists():
                self.agent.say("finished", step=step, digest="other" if self.me in self.options.other_digest else "d")
                sys.exit(0)

    def _step(self, step: int) -> None:
        assert self.view is not None
        if self.fault and self.fault["step"] in (None, step):
            os.kill(os.getpid(), signal.SIGKILL)
        self._listen(0.02)
        generation = self.view["generation"]
        loss = 1 / (step + 1)
        self.agent.say(
            "progress",
            step=step,
            generation=generation,
            loss=loss,
            samples=8 * step,
            at_s=time.monotonic(),
            holders=HOLDERS if self.options.holders and step == 0 else None,
        )

    def _maybe_fail(self, step: int) -> None:
        if self.options.bug_file and self.options.bug_file.exists() and self.me in self.options.bug:
            text = "Traceback (most recent call last):\nValueError: odd batch\n"
            self.agent.say("failed", step=3, micro_batch=5, signature="ValueError: odd batch", traceback=text)
            sys.exit(1)

    def _listen(self, timeout_s: float) -> None:
        for message in self.agent.hear(timeout_s):
            if message["type"] == "view":
                self._on_view(message)
            elif message["type"] == "fault":
                self.fault = message
            elif message["type"] == "refused":
                sys.stderr.write(f"refused: {message['reason']}\n")
                sys.exit(3)
            elif message["type"] == "stop" and not self.options.ignore_term:
                sys.exit(4)

    def _on_view(self, message: dict[str, Any]) -> None:
        if self.me in [member["id"] for member in message["members"]]:
            self.view = message
        ids = [member["id"] for member in message["members"]]
        self.agent.say("event", kind="saw_view", generation=message["generation"], members=ids, at_s=time.monotonic())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--finish", type=Path, required=True, help="finish once this file exists")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--holders", action="store_true")
    parser.add_argument("--bug-file", type=Path)
    for name in ("other-digest", "raise-at-import", "other-spec", "never-ready", "garbage", "bug", "child-of"):
        parser.add_argument(f"--{name}", action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
