"""Python processes that start at once: forked from one that has imported torch and elastrain, not started cold.

Importing both takes three seconds of a core, and a job of the tests starts half a dozen processes. `run` and `Popen`
are those of `subprocess`, for commands of this Python with a script, `-m` or `-c`; whatever else is asked for starts as
ever. A launcher that is started this way starts its agents and workers likewise.

Such a process is a true child of who started it: exit codes, signals, process groups, sessions, standard streams and
death signals are those of any other, and /proc shows its own command line and environment. It differs in this: its
modules are imported already, and what they asked for at the end of a process is not done; its memory is shared with
others until it is written to, and what Python and torch read from the environment when they start is what the fork
server has read. A command with another value there starts cold.

    the tests ── fork server                       children are handed up: a process between forks them and ends, and
        └─ launcher ── fork server                 for that moment the owner takes in who has lost his parent
              └─ workers
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from elastrain.base.processes import die_with_parent, tied
from tests.support.huge_pages import collapse

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    "numpy",
    "torch._dynamo",  # an optimizer imports it when it is made
    "torch.distributed.elastic.multiprocessing",
    "elastrain.runtime.job",
    "elastrain.launcher.agent.agent",
    "elastrain.launcher.cli.main",
    "elastrain.launcher.cli.command_line",
)
READ_AT_START = ("ATEN_", "GOMP_", "KMP_", "LD_", "MALLOC_", "MKL_", "OMP_", "ONEDNN_", "PYTHON", "TORCH_")
"""Of the environment, what is read once: names that begin so must have the values that the fork server has seen."""
READ_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
"""But for these, which are carried over."""
NO_SEED = {"PYTHONHASHSEED": "0"}
"""Where a command does not say one, any will do."""
THERE = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **NO_SEED}
"""What a fork server is told, besides the environment in which this module was imported."""

ALL_COLD = "TESTS_START_COLD"
"""Set, whatever the value, everything starts cold: to see whether a failure comes from here."""

_AT_IMPORT = dict(os.environ)
_forked = False

_PADDING = "ELASTRAIN_TESTS_PADDING"
_PADDING_BYTES = 1 << 16
_MESSAGE_BYTES_MAX = 1 << 17
_ANSWER_BYTES_MAX = 1 << 10
_SUBREAPER, _GET_SUBREAPER = 36, 37


@dataclass(frozen=True, kw_only=True)
class Order:
    """A process that is wanted. Its standard streams, then the descriptors named `fds`, travel beside it."""

    arguments: tuple[str, ...]
    """The command line, the interpreter first."""
    environment: dict[str, str]
    folder: str
    session: bool
    """In a session of its own, else in the process group of its parent."""
    held_back: tuple[int, ...] = ()
    """The signals that its parent blocks."""
    fds: tuple[int, ...]
    network: str
    """The network namespace that it enters, by its name; empty: its parent's."""
    parent: int
    group: int
    death_signal: int = 0
    """What it gets when its parent dies; 0: nothing."""


class _Server:
    """The owner's side of a fork server: what it forks is a child of this process."""

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._socket = sock
        self._process = process
        self._lock = threading.Lock()

    def fork(self, order: Order, fds: Sequence[int]) -> int:
        """The process id. Raises OSError if the server is gone, or the process came to be somebody else's child."""
        with self._lock:
            before = ctypes.c_int()
            _prctl(_GET_SUBREAPER, ctypes.byref(before))
            _prctl(_SUBREAPER, 1)
            try:
                socket.send_fds(self._socket, [json.dumps(vars(order)).encode()], list(fds))
                answer = self._socket.recv(_ANSWER_BYTES_MAX)
            finally:
                _prctl(_SUBREAPER, before.value)
        if not answer:
            raise OSError("the fork server is gone")
        if not answer.isdigit():
            raise OSError(answer.decode())
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        if self._process is None:
            return
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:  # it still imports, on a busy machine
            self._process.kill()
            self._process.wait()


_server: _Server | None = None
_starting = threading.Lock()
"""Two servers would be two locks around the one mark by which this process takes in who has lost his parent."""
_more: tuple[str, ...] = ()


def import_too(modules: Sequence[str]) -> None:
    """What the fork server is to have imported besides, where it has not started yet."""
    global _more
    _more = tuple(modules)


def stop() -> None:
    """End this process's fork server. The next command starts another."""
    global _server
    if _server is not None:
        _server.close()
        _server = None


def _started() -> _Server:
    """This process's fork server, a cold Python the first time, whichever thread asks first."""
    global _server
    with _starting:
        if _server is None:
            _server = _start_cold()
            atexit.register(stop)
    return _server


def _start_cold() -> _Server:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = {name: value for name, value in _AT_IMPORT.items() if not name.startswith("ELASTRAIN_")}
    code = f"from tests.support.warm import serve_cold; serve_cold({theirs.fileno()}, {_more!r})"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "x" * _PADDING_BYTES],
        env={**kept, **THERE, **_found_by(kept), _PADDING: "x" * _PADDING_BYTES},
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        process_group=0,
    )
    theirs.close()
    return _Server(ours, process)


def _found_by(environment: Mapping[str, str]) -> Mapping[str, str]:
    """Where what is imported besides may lie."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])} if _more else {}


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, warm where it can be."""

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        (preexec, _, pass_fds, cwd, env, *_, shell) = rest[:8]
        inherited = rest[8:14]
        (_, gid, gids, uid, umask, session, group) = rest[14:21]
        network, arguments = _network_of(args)
        arguments, is_tied = _untied(arguments)
        death_signal = signal.SIGKILL if is_tied and preexec is None else _death_signal(preexec)
        plain = (shell, gid, gids, uid, umask, group) == (False, None, None, None, -1, -1) and death_signal is not None
        environment = dict(os.environ if env is None else env)
        if not plain or executable not in (None, args[0]) or not _can_be_warm(arguments, environment):
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        child_end = (inherited[0], inherited[3], inherited[5])
        streams = [number if end == -1 else end for number, end in enumerate(child_end)]
        folder = os.path.abspath(os.fsdecode(cwd)) if cwd is not None else os.getcwd()
        order = _order(arguments, environment, folder, tuple(pass_fds), session=session, network=network)
        if death_signal:
            order = replace(order, death_signal=death_signal)
        self.pid = _started().fork(order, [*streams, *pass_fds])
        self._child_created = True
        self._close_pipe_fds(*inherited)  # type: ignore[attr-defined]


def run(
    command: Sequence[str | Path], *, timeout: float, capture_output: bool = False, check: bool = False, **how: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, warm where it can be."""
    if capture_output:
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **how) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def _death_signal(preexec: Any) -> int | None:
    """The signal of which alone `preexec_fn` speaks, 0 without one; None where it does anything else."""
    if preexec is None:
        return 0
    return int(preexec.args[0]) if getattr(preexec, "func", None) is die_with_parent else None


def _untied(arguments: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """The command that `tied` of this process stands before, and whether it does."""
    before = tuple(tied([]))
    is_tied = arguments[: len(before)] == before
    return arguments[len(before) :] if is_tied else arguments, is_tied


def _network_of(args: Any) -> tuple[str, tuple[str, ...]]:
    """The namespace that `ip netns exec NAME COMMAND` names, empty without it, and the command."""
    arguments = tuple(os.fsdecode(part) for part in args) if not isinstance(args, str | bytes) else ()
    return (arguments[3], arguments[4:]) if arguments[:3] == ("ip", "netns", "exec") else ("", arguments)


def _order(
    arguments: tuple[str, ...],
    environment: dict[str, str],
    folder: str,
    fds: tuple[int, ...],
    *,
    session: bool,
    network: str = "",
) -> Order:
    return Order(
        arguments=arguments,
        environment=environment,
        folder=folder,
        session=session,
        fds=fds,
        network=network,
        parent=os.getpid(),
        group=os.getpgrp(),
        held_back=tuple(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    )


def _can_be_warm(arguments: Sequence[str], environment: dict[str, str]) -> bool:
    """Whether it is a script, module or command of this Python, and starts in the surroundings of a fork server."""
    if ALL_COLD in _AT_IMPORT or not arguments or arguments[0] != sys.executable or (_forked and _server is None):
        return False
    _, rest = _options(arguments)
    if not rest or (rest[0] not in ("-m", "-c") and not Path(rest[0]).is_file()):
        return False
    seen = {name: value for name, value in {**_AT_IMPORT, **THERE}.items() if _is_read_at_start(name)}
    wanted = {**NO_SEED, **{name: value for name, value in environment.items() if _is_read_at_start(name)}}
    paths = environment.get("PYTHONPATH", str(ROOT)).split(os.pathsep)
    return wanted == seen and str(ROOT) in paths and _size(arguments, environment) < _PADDING_BYTES


def _size(arguments: Sequence[str], environment: dict[str, str]) -> int:
    return max(len("\0".join(arguments)), sum(len(name) + len(value) + 2 for name, value in environment.items()))


def _is_read_at_start(name: str) -> bool:
    return name.startswith(READ_AT_START) and name not in READ_LATER


def _prctl(option: int, argument: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


# ------------------------------------------------------------------------------------------- in the fork server


def serve_cold(fd: int, more: Sequence[str] = ()) -> NoReturn:
    """The body of the tests' own fork server."""
    _import(more)
    _serve(socket.socket(fileno=fd))


def _import(more: Sequence[str] = ()) -> None:
    gc.disable()  # as in conftest.py: imports leave hardly any garbage
    for module in (*IMPORTED, *more):
        __import__(module)
    import torch
    import typer.main

    from elastrain.launcher.cli.command_line import app

    # What they import late, fifty modules of pydantic among it: a twentieth of a second of each command.
    torch.optim.SGD([torch.zeros(1)], lr=1.0)
    typer.main.get_command(app).commands["run"].make_context("run", [__file__])  # type: ignore[attr-defined]
    gc.enable()
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # by torch, which takes its operators apart: that would copy 32 MiB of shared memory
    gc.collect()
    gc.freeze()  # a collection in a forked process need not copy what is shared
    collapse()


def in_other_surroundings(**environment: str) -> tuple[str, ...]:
    """What to write before a launcher's command so that it starts cold, with this environment, and all else warm.

    For what no fork server here has read, such as a library that is preloaded: the agents and workers are forked from
    the launcher, and have it from there.
    """
    set_to = [f"{name}={value}" for name, value in {**environment, _PADDING: "x" * _PADDING_BYTES}.items()]
    return ("env", *set_to, sys.executable, "-c", "from tests.support import warm; warm.launch()", "x" * _PADDING_BYTES)


def launch() -> NoReturn:
    """The body of such a launcher: become the process of the command behind the padding."""
    _import()
    del os.environ[_PADDING]
    order = _order(tuple(sys.argv[2:]), dict(os.environ), os.getcwd(), (), session=False)
    _show(order)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.orig_argv = list(order.arguments)
    _start_warm_too()
    _end(_body(_options(order.arguments)[1]))


def _serve(sock: socket.socket) -> NoReturn:
    """Fork what is asked for until the owner ends."""
    while True:
        data, fds, _, _ = socket.recv_fds(sock, _MESSAGE_BYTES_MAX, 64)
        if not data:
            os._exit(0)
        order = Order(**{name: _frozen(value) for name, value in json.loads(data).items()})
        answer, told = os.pipe()
        between = os.fork()
        if between == 0:
            me = os.getpid()
            if os.fork() == 0:
                sock.detach()
                _wait_for_parent(order.parent, me, told)
                _become(order, fds, told)
            os._exit(0)
        for fd in (told, *fds):
            os.close(fd)
        os.waitpid(between, 0)  # only now has the owner taken in what it has forked
        sock.send(os.read(answer, _ANSWER_BYTES_MAX) or b"the forked process ended before it told its id")
        os.close(answer)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------- in a forked process


def _wait_for_parent(wanted: int, between: int, told: int) -> None:
    """Until this process is its owner's child; end, saying so, if somebody else has taken it in: that is for ever."""
    while (parent := os.getppid()) == between:
        time.sleep(0.0005)
    if parent != wanted:
        os.write(told, f"process {os.getpid()} is now a child of {parent}, not of {wanted}".encode())
        os._exit(1)


def _become(order: Order, fds: Sequence[int], told: int) -> NoReturn:
    """Look like a process that was started with this command, tell its id, run the command, and end as it does."""
    global _forked
    _forked = True
    signal.pthread_sigmask(signal.SIG_SETMASK, order.held_back)
    if order.session:
        os.setsid()
    else:
        os.setpgid(0, order.group)
    _enter(f"/var/run/netns/{order.network}" if order.network else f"/proc/{order.parent}/ns/net")
    if order.death_signal:
        die_with_parent(signal.Signals(order.death_signal), order.parent)
    os.chdir(order.folder)
    numbers = (0, 1, 2, *order.fds)
    _take_descriptors((*fds, told), (*numbers, max(numbers) + 1))
    _show(order)
    # Not earlier: whoever hears of it may signal its group, change its priority, or look for it in /proc.
    os.write(max(numbers) + 1, str(os.getpid()).encode())
    os.close(max(numbers) + 1)
    os.environ.clear()
    os.environ.update(order.environment)
    _forget()
    options, arguments = _options(order.arguments)
    _open_streams(unbuffered="-u" in options or bool(order.environment.get("PYTHONUNBUFFERED")))
    sys.orig_argv = list(order.arguments)
    if arguments[:2] == ["-m", "elastrain.launcher"]:
        _start_warm_too()
    _end(_body(arguments))


def _enter(network: str) -> None:
    """A fork server is older than the network that its owner has entered meanwhile."""
    found, here = os.stat(network), os.stat("/proc/self/ns/net")
    if (found.st_dev, found.st_ino) == (here.st_dev, here.st_ino):
        return
    namespace = os.open(network, os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")
    os.close(namespace)


def _options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """`-u` and those that this Python has itself, then what is to run with its arguments."""
    known = {"-u", *subprocess._args_from_interpreter_flags()}  # type: ignore[attr-defined]
    rest = list(arguments[1:])
    options = []
    while rest and rest[0] in known:
        options.append(rest.pop(0))
    return options, rest


def _take_descriptors(came: Sequence[int], numbers: Sequence[int]) -> None:
    """Give what came these numbers, and close everything else."""
    above = max(*numbers, *came) + 1
    held = [os.dup2(fd, above + index) for index, fd in enumerate(came)]
    for fd, number in zip(held, numbers, strict=True):
        os.dup2(fd, number)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in numbers:
            try:
                os.close(int(name))
            except OSError:  # the one by which the folder was read
                pass


def _show(order: Order) -> None:
    """In /proc, the command line and the environment of the process are its own, not the fork server's."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    arguments, after_arguments, environment, after_environment = map(int, stat[45:49])
    os.environ.clear()  # the C library's pointers must not lead into what is overwritten
    _overwrite(arguments, after_arguments, order.arguments)
    _overwrite(environment, after_environment, [f"{name}={value}" for name, value in order.environment.items()])


def _overwrite(begin: int, end: int, words: Sequence[str]) -> None:
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    assert len(text) <= end - begin
    ctypes.memmove(begin, text.ljust(end - begin, b"\0"), end - begin)


def _forget() -> None:
    """What modules remember of the process in which they were imported."""
    import importlib
    import tempfile

    import numpy as np
    import torch

    importlib.invalidate_caches()
    tempfile.tempdir = None
    np.random.seed()
    torch.default_generator.seed()


def _open_streams(*, unbuffered: bool) -> None:
    """Standard streams as Python opens them."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        binary = os.fdopen(number, mode + "b", 0 if unbuffered and number else -1, closefd=False)
        stream = __import__("io").TextIOWrapper(
            binary,
            encoding=getattr(sys, name).encoding,
            errors="backslashreplace" if number == 2 else getattr(sys, name).errors,
            line_buffering=not unbuffered and (number == 2 or os.isatty(number)),
            write_through=unbuffered and number > 0,
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _body(arguments: list[str]) -> Callable[[], None]:
    """What `python ARGUMENTS` runs, in a `__main__` of its own."""
    import runpy
    import types

    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=__import__("builtins"), __spec__=None, __annotations__={})
    what, rest = arguments[0], arguments[1:]
    sys.path[:] = [path for path in sys.path if path not in ("", str(ROOT))]
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if what == "-m":
        sys.argv = rest
        sys.path.insert(0, os.getcwd())
        return lambda: runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    if what == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        return lambda: exec(compile(rest[0], "<string>", "exec", dont_inherit=True), main.__dict__)
    sys.argv = arguments
    sys.path.insert(0, str(Path(what).resolve().parent))
    main.__dict__.update(__file__=what, __cached__=None)
    return lambda: exec(compile(Path(what).read_bytes(), what, "exec", dont_inherit=True), main.__dict__)


def _end(body: Callable[[], None]) -> NoReturn:
    """Run it and end as Python does: threads, exit handlers, streams, exit code.

    Modules are not taken apart: it would copy most of the shared memory, a second's work.
    """
    code: Any = 0
    by_key = False
    try:
        body()
    except SystemExit as end:
        code = end.code
    except BaseException as error:  # noqa: BLE001  # the edge of a process: it is told as Python tells it
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code, by_key = 1, isinstance(error, KeyboardInterrupt)
    if code is not None and not isinstance(code, int):
        sys.stderr.write(f"{code}\n")
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # closed, or nobody reads it any more
            code = code or 120
    if by_key:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit((code or 0) & 0xFF)


def _start_warm_too() -> None:
    """Of a launcher: its own fork server, before it has any thread, for the agents and workers that it starts."""
    import multiprocessing.forkserver
    import multiprocessing.util

    from elastrain.launcher.agent import worker_start
    from elastrain.launcher.cli.commands import bits, doctor

    worker_start.subprocess = SimpleNamespace(Popen=Popen)  # type: ignore[assignment,attr-defined]
    for command in (bits, doctor):
        command.subprocess = SimpleNamespace(run=partial(run, timeout=600))  # type: ignore[attr-defined]
    cold, serve_one = multiprocessing.util.spawnv_passfds, multiprocessing.forkserver._serve_one  # type: ignore

    def spawn(path: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
        """Of multiprocessing's fork server only: its resource tracker is quick."""
        words = tuple(os.fsdecode(part) for part in arguments)
        if "multiprocessing.forkserver" not in words[-1] or not _can_be_warm(words, dict(os.environ)):
            return int(cold(path, arguments, fds))
        order = _order(words, dict(os.environ), os.getcwd(), tuple(fds), session=False)
        return _started().fork(order, [0, 1, 2, *fds])

    def agent(*given: Any) -> Any:
        _fork_server()
        return serve_one(*given)

    multiprocessing.util.spawnv_passfds = spawn  # type: ignore[assignment]
    multiprocessing.forkserver._serve_one = agent  # type: ignore
    _fork_server()  # last: multiprocessing's fork server is forked from it, and starts the agents


def _fork_server() -> None:
    """A fork server for this process, which has no thread yet."""
    global _server
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        kept = os.dup2(theirs.fileno(), 1000)
        os.closerange(3, 1000)
        for number in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
        os.closerange(3, 1000)
        _serve(socket.socket(fileno=kept))
    theirs.close()
    _server = _Server(ours)
