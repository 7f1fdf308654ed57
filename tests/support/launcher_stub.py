"""A worker without a model: it speaks the agent's channel as the runtime does, and misbehaves on request.

Run by the launcher as an ordinary script; imports no torch, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

from elastrain.base.environment import read_environment
from elastrain.comm.shm.liveness import Beacon
from elastrain.comm.wire.handshake import dial
from elastrain.job.world import View
from elastrain.protocol import agent_messages as am

HOLDERS: dict[str, tuple[str, ...]] = {"0": ("m0", "m1"), "1": ("m1", "m2"), "2": ("m2", "m0")}


class Agent:
    """The worker's end of the channel."""

    def __init__(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect("\0" + os.environ["ELASTRAIN_AGENT"])
        secret = Path(os.environ["ELASTRAIN_SECRET_FILE"]).read_bytes()
        dial(self.sock, secret=secret, job=read_environment().scope, me=os.environ["ELASTRAIN_MEMBER"], timeout_s=5)
        self._rest = b""

    def say(self, message: am.FromWorker, fds: tuple[int, ...] = ()) -> None:
        line = am.FROM_WORKER.encode(message)
        if fds:
            socket.send_fds(self.sock, [line], list(fds))
        else:
            self.sock.sendall(line)

    def hear(self, timeout_s: float) -> list[am.ToWorker]:
        """What came within the time; ends the process when the agent is gone."""
        if not select.select([self.sock], [], [], timeout_s)[0]:
            return []
        data = self.sock.recv(1 << 16)
        if not data:
            os._exit(7)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [am.TO_WORKER.decode(line) for line in lines]


def main() -> None:
    options = _options()
    me = os.environ["ELASTRAIN_MEMBER"]
    for _ in range(options.chatter):
        sys.stdout.write("chatter\n")
        sys.stderr.write("chatter\n")
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
    agent.say(am.Hello(member=me, address=f"unix:{me}", spec=spec), (beacon.fd,))
    if me in options.garbage:
        agent.sock.sendall(b"{]\n")
    Worker(me, agent, options).train()


class Worker:
    def __init__(self, me: str, agent: Agent, options: argparse.Namespace) -> None:
        self.me, self.agent, self.options = me, agent, options
        self.view: View | None = None
        self.fault: am.ArmFault | None = None

    def train(self) -> None:
        while self.view is None:
            self._listen(60)
        for step in range(10_000):
            self._maybe_fail(step)
            self._step(step)
            if self.options.finish.exists():
                digest = "other" if self.me in self.options.other_digest else "d"
                self.agent.say(am.Finished(step=step, digest=digest))
                sys.exit(0)

    def _step(self, step: int) -> None:
        assert self.view is not None
        if self.fault and self.fault.step in (None, step):
            os.kill(os.getpid(), signal.SIGKILL)
        self._listen(0.02)
        holders = HOLDERS if self.options.holders and step == 0 else None
        self.agent.say(am.Progress(step=step, loss=1 / (step + 1), samples=8 * step, holders=holders))

    def _maybe_fail(self, step: int) -> None:
        if step == 3 and self.options.lose_state_below_life > read_environment().life:
            self.agent.say(am.LostState(sentence="all holders of shard 0 are gone"))
            self._listen(60)
        if self.options.bug_file and self.options.bug_file.exists() and self.me in self.options.bug:
            text = "Traceback (most recent call last):\nValueError: odd batch\n"
            self.agent.say(am.Failed(step=3, micro_batch=5, signature="ValueError: odd batch", traceback=text))
            sys.exit(1)

    def _listen(self, timeout_s: float) -> None:
        for message in self.agent.hear(timeout_s):
            if isinstance(message, am.NewView):
                self._on_view(message.view)
            elif isinstance(message, am.ArmFault):
                self.fault = message
            elif isinstance(message, am.Refused):
                sys.stderr.write(f"refused: {message.reason}\n")
                sys.exit(3)
            elif isinstance(message, am.WriteLast):
                self.agent.say(am.LostState(sentence="all holders of shard 0 are gone"))
            elif isinstance(message, am.Stop) and not self.options.ignore_term:
                sys.exit(4)

    def _on_view(self, view: View) -> None:
        if self.me in view:
            self.view = view
        seen = {"kind": "saw_view", "generation": view.generation, "members": view.ids, "at_s": time.monotonic()}
        self.agent.say(am.Note(fields=seen))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--finish", type=Path, required=True, help="finish once this file exists")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--chatter", type=int, default=0, help="lines on each standard stream")
    parser.add_argument("--lose-state-below-life", type=int, default=0)
    parser.add_argument("--holders", action="store_true")
    parser.add_argument("--bug-file", type=Path)
    for name in ("other-digest", "raise-at-import", "other-spec", "never-ready", "garbage", "bug", "child-of"):
        parser.add_argument(f"--{name}", action="append", default=[])
    return parser.parse_args()


if __name__ == "__main__":
    main()
