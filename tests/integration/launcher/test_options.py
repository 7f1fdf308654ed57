"""The options of `elastrain run`: what scripts are given, where output goes, what wrong input is answered with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import warm
from tests.support.nodes_harness import NodesJob, stub_job

ELASTRAIN = [sys.executable, "-m", "elastrain.launcher"]


def launched(tmp_path: Path, *options: str, script: Path, args: tuple[str, ...] = ()) -> NodesJob:
    return NodesJob(tmp_path, "--standalone", *options, arguments=args, script=script, held="")


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text(text)
    return path


def test_scripts_get_their_arguments_and_the_environment_of_torchrun_and_ours(tmp_path: Path) -> None:
    text = (
        "import json, os, sys\n"
        "name = os.path.join(sys.argv[1], os.environ['RANK'])\n"
        "json.dump({'args': sys.argv[2:], 'env': dict(os.environ)}, open(name, 'w'))\n"
    )
    args = (str(tmp_path), "--lr", "3e-4", "--nproc-per-node", "7", "--", "-x")
    with launched(
        tmp_path, "--nproc-per-node", "2", "--rdzv-id", "j1", script=script(tmp_path, text), args=args
    ) as job:
        assert job.end().exit_code == 0
    got = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert got[1]["args"] == list(args[1:])
    env = got[1]["env"]
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"]
    assert [env[name] for name in names] == ["1", "1", "2", "2", "0", "j1"]
    ours = ["ELASTRAIN_AGENT", "ELASTRAIN_JOB", "ELASTRAIN_MEMBER", "ELASTRAIN_NODE", "ELASTRAIN_INJECT"]
    assert [env[name] for name in ours] == ["elastrain/j1/agent", "j1", "m1", "node0", "0"]
    assert env["ELASTRAIN_RUN_DIR"] == str(job.run.path)
    assert env["ELASTRAIN_SECRET_FILE"] == str(job.run.secret)
    assert env["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    assert (env["TORCHELASTIC_USE_AGENT_STORE"], env["TORCH_NCCL_ASYNC_ERROR_HANDLING"]) == ("False", "1")
    assert env["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def test_a_worker_knows_its_rank_before_the_loop_and_what_it_starts_is_a_job_of_one(tmp_path: Path) -> None:
    text = (
        "import elastrain, multiprocessing, os, sys\n"
        "def told(where):\n"
        "    job = elastrain.init()\n"
        "    name = os.path.join(sys.argv[1], where + os.environ['RANK'])\n"
        "    open(name, 'w').write(f'{job.rank} of {job.world_size}')\n"
        "if __name__ == '__main__':\n"
        "    told('outer')\n"
        "    child = multiprocessing.get_context('spawn').Process(target=told, args=('inner',))\n"
        "    child.start()\n"
        "    child.join()\n"
        "    sys.exit(child.exitcode)\n"
    )
    with launched(tmp_path, "--nproc-per-node", "2", script=script(tmp_path, text), args=(str(tmp_path),)) as job:
        assert job.end().exit_code == 0
    told = {name: (tmp_path / name).read_text() for name in ("outer0", "outer1", "inner0", "inner1")}
    assert told == {"outer0": "0 of 2", "outer1": "1 of 2", "inner0": "0 of 1", "inner1": "0 of 1"}


def test_a_vocabulary_made_of_a_set_of_words_is_the_same_in_every_worker(tmp_path: Path) -> None:
    """Python's hashes are salted per process: without a common salt a word has another number in each worker."""
    text = (
        "import os, sys\n"
        "order = ' '.join({f'word{n}' for n in range(50)})\n"
        "open(os.path.join(sys.argv[1], os.environ['RANK']), 'w').write(order)\n"
    )
    command = [*ELASTRAIN, "run", "--nproc-per-node", "2"]
    unset = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    orders = []
    for number, seed in enumerate(({}, {}, {"PYTHONHASHSEED": "7"})):
        folder = ["--run-dir", str(tmp_path / f"run{number}")]
        started = [*command, *folder, str(script(tmp_path, text)), str(tmp_path)]
        warm.run(started, env={**unset, **seed}, check=True, timeout=180)
        orders.append({(tmp_path / str(rank)).read_text() for rank in range(2)})
    assert [len(order) for order in orders] == [1, 1, 1]
    assert orders[0] == orders[1], "another run of the script"
    assert orders[0] != orders[2], "what the user has set stays"


def test_output_goes_to_files_or_to_both_as_asked_for_per_rank(tmp_path: Path) -> None:
    text = "import os, sys; print('out of', os.environ['RANK']); print('err', file=sys.stderr)\n"
    flags = ("--nproc-per-node", "3", "--redirects", "0:3", "--tee", "1:1")
    with launched(tmp_path, *flags, script=script(tmp_path, text)) as job:
        assert job.end().exit_code == 0
    logs = job.run.logs
    assert (logs / "m0" / "stdout.log").read_text() == "out of 0\n"
    assert (logs / "m0" / "stderr.log").read_text() == "err\n"
    assert (logs / "m1" / "stdout.log").read_text() == "out of 1\n"
    assert not list((logs / "m2").glob("*.log"))
    lines = job.text().splitlines()
    assert "[m1] out of 1" in lines
    assert "out of 2" in lines
    assert "out of 0" not in job.text()
    assert lines.count("err") == 2


AGENT_MEMORY = """
import os
agent = os.getppid()
maps = open(f"/proc/{agent}/maps").read()
sizes = {words[0]: int(words[1]) for line in open(f"/proc/{agent}/status") if (words := line.split())[-1] == "kB"}
print("libtorch" in maps, sizes["VmRSS:"], sizes["RssAnon:"])
"""


@pytest.mark.parametrize(("flags", "most_mib"), [((), 60), (("--join", "127.0.0.1", "--nnodes", "1"), 90)])
def test_an_agent_is_small_before_the_script_starts(tmp_path: Path, flags: tuple[str, ...], most_mib: int) -> None:
    options = (*flags, "--rdzv-id", f"small-{len(flags)}", "--redirects", "1", "--run-dir", str(tmp_path / "run"))
    command = [sys.executable, "-m", "elastrain.launcher", "run", *options, str(script(tmp_path, AGENT_MEMORY))]
    # Not one of the tests' warm processes, which have imported torch.
    subprocess.run(command, env=os.environ | {"ELASTRAIN_HOME": str(tmp_path)}, check=True, timeout=180)
    written = (tmp_path / "run" / "logs" / "m0" / "stdout.log").read_text()
    has_torch, resident_kib, own_kib = written.split()
    assert has_torch == "False", "torch alone takes 200 MiB and seconds of every start"
    assert int(resident_kib) <= most_mib << 10
    assert int(own_kib) <= 60 << 10


def test_log_dir_gets_a_folder_of_each_run_and_none_is_overwritten(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        flags = ("--rdzv-id", "again", "--log-dir", str(logs), "--redirects", "1")
        text = f"print('run {number}')\n"
        with launched(tmp_path / str(number), *flags, script=script(tmp_path, text)) as job:
            assert job.end().exit_code == 0
    written = {path.read_text() for path in logs.glob("again_*/m0/stdout.log")}
    assert written == {"run 0\n", "run 1\n"}


def test_module_and_program_are_run_as_they_are(tmp_path: Path) -> None:
    with launched(tmp_path, "-m", script=Path("platform"), args=("--terse",)) as job:
        assert job.end().exit_code == 0
        assert "Linux" in job.text()
    (tmp_path / "second").mkdir()
    with launched(tmp_path / "second", "--no-python", script=Path("echo"), args=("hello",)) as job:
        assert job.end().exit_code == 0
        assert "hello" in job.text().splitlines()


def test_exit_code_of_a_script_that_fails_is_not_zero_and_said(tmp_path: Path) -> None:
    with launched(tmp_path, "--nproc-per-node", "2", script=script(tmp_path, "raise SystemExit(5)")) as job:
        assert job.end().exit_code == 1
        assert "ended with exit code 5 before the first commit" in job.text()
        job.assert_nothing_left()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["--no-python", "no-such-program"], "there is no program 'no-such-program'"),
        (["-m", "--no-python", "x"], "-m and --no-python exclude one another"),
        (["--nproc-per-node", "many", __file__], "--nproc-per-node 'many': write a number, or cpu, gpu or auto"),
        (["--nproc-per-node", "0", __file__], "--nproc-per-node 0: from 1 to 1024 workers"),
        (["--rdzv-backend", "c10d", __file__], "--rdzv-backend c10d: nodes meet in an etcd v3 only"),
        (["--rdzv_conf=timeout=3", __file__], "torchrun's --rdzv_conf is no option here: say --join-timeout"),
        (["--tee", "3", "--run-path", __file__], "torchrun's --run-path is no option here: leave it out"),
        (["--nprocs", "2", __file__], "No such option"),
        (["--tee", "9", __file__], "--tee '9': write 0, 1, 2 or 3"),
        (["--rdzv-id", "a/b", __file__], "--rdzv-id 'a/b': use up to 64 letters"),
        (["--faults", "nowhere", __file__], "the faults file nowhere cannot be read"),
        (["--run-dir", "/proc/nothing/run", __file__], "cannot be made"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_input_ends_in_one_sentence_and_exit_code_2(tmp_path: Path, flags: list[str], sentence: str) -> None:
    env = {**os.environ, "ELASTRAIN_HOME": str(tmp_path)}
    done = warm.run([*ELASTRAIN, "run", *flags], capture_output=True, text=True, timeout=270, env=env)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("*.jsonl"))


def test_faults_file_is_checked_before_anything_starts(tmp_path: Path) -> None:
    faults = tmp_path / "faults"
    faults.write_text("kill --target member:m1 --at step=1\nkill --target member:m1 --at phase=lunch\n")
    command = [*ELASTRAIN, "run", "--run-dir", str(tmp_path / "run"), "--faults", str(faults), __file__]
    done = warm.run(command, capture_output=True, text=True, timeout=270)
    assert done.returncode == 2
    assert f"{faults}, line 2: unknown phase 'lunch'" in done.stderr
    assert not (tmp_path / "run").exists()


def test_second_job_of_one_name_is_refused_and_leaves_no_secret(tmp_path: Path) -> None:
    twin = ("--standalone", "--rdzv-id", "twin")
    with stub_job(tmp_path, *twin) as job:
        job.wait("view")
        (tmp_path / "second").mkdir()
        with stub_job(tmp_path / "second", *twin) as second:
            assert second.end().exit_code == 2
            assert "a job of this name already runs here" in second.text()
            assert not second.run.secret.exists()
        assert job.finish().exit_code == 0


def test_nothing_is_written_outside_the_runs_folder(tmp_path: Path) -> None:
    temporary, home, run = tmp_path / "tmp", tmp_path / "home", tmp_path / "run"
    for folder in (temporary, home):
        folder.mkdir()
    env = {**os.environ, "TMPDIR": str(temporary), "HOME": str(home), "ELASTRAIN_HOME": ""}
    # In one piece: what is copied in two has its prefix twice.
    hello = script(tmp_path, "import sys; sys.stdout.write('hello\\n')")
    command = [*ELASTRAIN, "run", "--run-dir", str(run), "--tee", "3", str(hello)]
    done = warm.run(command, capture_output=True, text=True, timeout=270, env=env)
    assert (done.returncode, done.stdout) == (0, "[m0] hello\n")
    assert not list(temporary.iterdir())
    assert not list(home.iterdir())
    assert sorted(path.name for path in run.iterdir()) == ["events.jsonl", "logs", "run.json"]
