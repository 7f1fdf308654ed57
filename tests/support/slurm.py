"""A real Slurm on loopback: `munged`, `slurmctld` and three `slurmd`, as plain processes with one scratch folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path

from elastrain.base.processes import tied
from tests.support.free_ports import free_ports
from tests.support.waiting import until

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
NODES = ("n1", "n2", "n3")
_CONFIGURATION = """ClusterName=elastrain
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1{more}
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmdTimeout=6
SlurmctldTimeout=60
MessageTimeout=30
KillWait=30
InactiveLimit=0
JobRequeue=1
OverTimeLimit=1
SlurmdParameters=config_overrides
"""


def lacking() -> str:
    """Why no Slurm can be started here, or ""."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} here: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd starts tasks as root only"


class Slurm:
    """The daemons. Commands need `environment`. `expands`: Slurm lets nodes be added to a running job."""

    def __init__(self, folder: Path, *, expands: bool = False) -> None:
        self.folder, self._more = folder, ",permit_job_expansion" if expands else ""
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Slurm:
        folder, host = self.folder, socket.gethostname().partition(".")[0]
        for part in ("state", "spool"):
            (folder / part).mkdir(parents=True)
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        ports = free_ports(1 + len(NODES))
        lines = _CONFIGURATION.format(host=host, port=ports[0], folder=folder, more=self._more)
        for number, (name, port) in enumerate(zip(NODES, ports[1:], strict=True), start=2):
            address = f"NodeAddr=127.0.0.{number} Port={port}"  # an address each, as a quorum's hosts need
            lines += f"NodeName={name} NodeHostname={host} {address} CPUs=8 State=UNKNOWN\n"
        lines += f"PartitionName=main Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP\n"
        (folder / "slurm.conf").write_text(lines)
        own = [f"--{name}={folder}/munge{end}" for name, end in (("pid-file", ".pid"), ("log-file", ".log"))]
        own += [f"--key-file={key}", f"--socket={folder}/munge.sock", f"--seed-file={folder}/munge.seed"]
        try:
            self._start("munged", "munged", "--foreground", "--force", *own)
            until((folder / "munge.sock").exists, 30, "munged")
            self._start("slurmctld", "slurmctld", "-D", "-f", str(folder / "slurm.conf"))
            for name in NODES:
                self.start_node(name)
            until(lambda: self.told("sinfo", "-h", "-o", "%T %D") == "idle 3", 60, "three idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(subprocess.SubprocessError, OSError):
            for number in self.told("squeue", "-h", "-o", "%i").split():
                self.told("scancel", "--signal=KILL", "--full", number)
                self.told("scancel", number)
            until(lambda: not self.told("squeue", "-h"), 60, f"the end of all jobs: {self.told('squeue')}")
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start_node(self, name: str) -> None:
        self._start(name, "slurmd", "-D", "-N", name, "-f", str(self.folder / "slurm.conf"))

    def kill_node(self, name: str) -> None:
        """A power cut: the node's `slurmd`, its step and what the step runs."""
        self._processes.pop(name).kill()
        for pid in descendants(_steps_of(self.folder, name)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def node_state(self, name: str) -> str:
        return self.told("sinfo", "-h", "-n", name, "-o", "%T")

    def expand(self, job: str, node: str) -> str:
        """Add an idle node to a running job. Returns why Slurm refuses that, or ""."""
        words = ("salloc", "--no-shell", "--nodes=1", f"--nodelist={node}", f"--dependency=expand:{job}")
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=360, check=False)
        if done.returncode:
            return done.stderr.strip()
        number = done.stderr.split("Granted job allocation ")[1].split()[0]
        return self.told("scontrol", "update", f"JobId={number}", "NumNodes=0")

    def told(self, *command: str, text: str | None = None, cwd: Path | None = None) -> str:
        done = subprocess.run(
            command, env=self.environment, input=text, cwd=cwd, capture_output=True, text=True, timeout=180, check=False
        )
        return done.stdout.strip()

    def _start(self, name: str, *command: str) -> None:
        # The kernel ends them with this process, also where a test run is killed.
        with (self.folder / f"{name}.out").open("ab") as out:
            self._processes[name] = subprocess.Popen(
                tied(command),
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )


def _steps_of(folder: Path, name: str) -> list[int]:
    """The step daemons of a node, by the configuration and the node in their environment or command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "comm").read_text().strip() == "slurmstepd":
                pids = descendants([int(path.name)])
                marks = b"".join(_environment(pid) for pid in pids)
                if f"SLURMD_NODENAME={name}\0".encode() in marks and str(folder).encode() in marks:
                    found.append(int(path.name))
    return found


def _environment(pid: int) -> bytes:
    try:
        return (Path("/proc") / str(pid) / "environ").read_bytes()
    except OSError:
        return b""


def descendants(pids: list[int]) -> list[int]:
    """These processes and all that they have started, by the parents that the kernel names."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            pid, rest = path.read_text().split(" (", 1)
            children.setdefault(int(rest.rpartition(") ")[2].split()[1]), []).append(int(pid))
    found, to_look = list[int](), list(pids)
    while to_look:
        one = to_look.pop()
        found.append(one)
        to_look += children.get(one, [])
    return found
