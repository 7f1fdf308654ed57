"""Manifests for Kubernetes: what is written for any options passes `kubernetes-validate --strict`."""

from __future__ import annotations

import base64
import functools
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from elastrain.errors import ConfigError
from elastrain.launcher.cli.command_line import app
from elastrain.launcher.schedulers.kubernetes import JobWish, PodSize, as_yaml, manifests

pytest.importorskip("kubernetes_validate")
import kubernetes_validate as validate

yaml = pytest.importorskip("yaml")

SECRET = bytes(range(32))
NAMED = ("launch", "kubernetes", "--name", "job", "--image", "image", "--rdzv-endpoint", "etcd:2379")
WORDS = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=12)
QUANTITIES = st.sampled_from(["1", "500m", "16Gi", "1.5Gi", "64G"])
NAMES = st.from_regex(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)


@st.composite
def wishes(draw: st.DrawFn) -> JobWish:
    least = draw(st.integers(1, 64))
    first = draw(st.integers(1024, 60000))
    size = PodSize(
        cpu=draw(QUANTITIES), memory=draw(QUANTITIES), shm=draw(QUANTITIES), gpus=draw(st.sampled_from([0, 1, 8]))
    )
    return JobWish(
        name=draw(NAMES),
        image=draw(st.sampled_from(["image", "registry.example:5000/a/b:1.0@sha256:" + "0" * 64])),
        nodes_min=least,
        nodes_max=least + draw(st.integers(0, 8)),
        command=("train.py", *draw(st.lists(WORDS, max_size=4))),
        endpoint=draw(st.sampled_from(["", "etcd:2379"])),
        workers=draw(st.sampled_from(["1", "8", "gpu", "auto"])),
        ports=(first, first + draw(st.integers(127, 5000))),
        size=size,
        hand_over_s=draw(st.integers(1, 3600)),
        retries=draw(st.integers(0, 100)),
        claim=draw(st.just("") | NAMES),
    )


def read(wish: JobWish, **more: Any) -> list[dict[str, Any]]:
    documents = manifests(wish, SECRET, **more)
    read_back = list(yaml.safe_load_all(as_yaml(documents)))
    assert read_back == documents, "the text says what was meant"
    return read_back


@pytest.fixture(scope="module")
def schemas() -> Iterator[None]:
    """Read each schema once, and index its definitions once: they have megabytes."""
    kind = validate.utils.jsonschema.validators.Draft202012Validator
    made: dict[int, Any] = {}

    def validator(schema: dict[str, Any], registry: Any) -> Any:
        if id(schema) not in made:
            made[id(schema)] = kind(schema, registry=registry.crawl())
        return made[id(schema)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validate.utils, "schema_contents", functools.cache(validate.utils.schema_contents))
        patch.setattr(validate.utils.jsonschema.validators, "Draft202012Validator", validator)
        yield


@pytest.mark.usefixtures("schemas")
@settings(deadline=None)
@given(wish=wishes())
def test_every_manifest_passes_strict_validation_for_all_options(wish: JobWish) -> None:
    documents = read(wish)
    for document in documents:
        validate.validate(document, "1.34", strict=True)
    # A JobSet is no kind of Kubernetes itself: the Job in it is validated.
    inner = read(wish, as_job_set=True)[3]["spec"]["replicatedJobs"][0]["template"]
    validate.validate({**documents[3], "spec": inner["spec"]}, "1.34", strict=True)


@pytest.mark.usefixtures("schemas")
def test_a_wrong_field_would_be_found() -> None:
    job = read(example())[3]
    job["spec"]["completionsMode"] = "Indexed"
    with pytest.raises(validate.ValidationError):
        validate.validate(job, "1.34", strict=True)


def example(**more: Any) -> JobWish:
    told: dict[str, Any] = {"name": "job", "image": "image", "nodes_min": 2, "nodes_max": 3, "endpoint": "etcd:2379"}
    return JobWish(**{**told, "command": ("train.py",), **more})


def test_the_job_is_what_the_launcher_needs() -> None:
    secret, service, policy, job = read(example(hand_over_s=60, size=PodSize(gpus=8)))
    pod = job["spec"]["template"]["spec"]
    container, volumes = pod["containers"][0], {volume["name"]: volume for volume in pod["volumes"]}
    assert base64.b64decode(secret["data"]["secret"]) == SECRET
    assert service["spec"]["clusterIP"] == "None"
    assert (job["spec"]["completionMode"], job["spec"]["podReplacementPolicy"]) == ("Indexed", "Failed")
    assert pod["terminationGracePeriodSeconds"] > 60 and "startupProbe" in container
    assert volumes["secret"]["secret"]["defaultMode"] == 0o600 and volumes["shm"]["emptyDir"]["medium"] == "Memory"
    ports = policy["spec"]["ingress"][0]["ports"][0]
    assert pod["securityContext"]["sysctls"][0]["value"] == f"{ports['port']} {ports['endPort']}"
    command = container["command"]
    assert command[command.index("--node-name") + 1] == "$(POD_NAME)", "a pod that comes back is a new node"
    assert command[command.index("--nnodes") + 1] == "2:3" and command[-1] == "train.py"


def run_options(wish: JobWish, *, as_job_set: bool = False) -> dict[str, str]:
    job = read(wish, as_job_set=as_job_set)[3]
    job = job["spec"]["replicatedJobs"][0]["template"] if as_job_set else job
    words = job["spec"]["template"]["spec"]["containers"][0]["command"][2:]
    return dict(zip(words[::2], words[1::2], strict=False))


@pytest.mark.parametrize(("pods", "hosts"), [(1, 1), (2, 2), (3, 3), (9, 3)])
def test_the_first_pods_run_the_etcd_and_are_named_by_the_service(pods: int, hosts: int) -> None:
    """The host name of an indexed Job's pod is the Job's name and its index, and the service is its domain."""
    wish = example(name="gpt", nodes_min=1, nodes_max=pods, endpoint="", ports=(31000, 31999))
    names = [f"gpt-{index}.gpt:31000" for index in range(hosts)]
    assert run_options(wish)["--join"] == ",".join(names)
    inside = [name.replace("gpt-", "gpt-node-0-", 1) for name in names]
    assert run_options(wish, as_job_set=True)["--join"] == ",".join(inside)
    pod = read(wish)[3]["spec"]["template"]["spec"]
    assert pod["subdomain"] == read(wish)[1]["metadata"]["name"] == "gpt"
    # The kernel leaves the three ports of the etcd alone, and the policy opens them.
    assert pod["securityContext"]["sysctls"][0]["value"] == "31003 31999"
    assert read(wish)[2]["spec"]["ingress"][0]["ports"][0] == {"protocol": "TCP", "port": 31000, "endPort": 31999}


def test_a_pod_waits_for_the_others_as_long_as_its_probe_lets_it() -> None:
    wish = example(endpoint="")
    probe = read(wish)[3]["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] * probe["periodSeconds"] > int(run_options(wish)["--join-timeout"])


def test_the_command_of_the_pods_is_read_by_run() -> None:
    """Options of `run` that the manifest writes exist, and have values that it accepts."""
    for endpoint in ("", "etcd:2379"):
        told = run_options(example(endpoint=endpoint, claim="c"))
        assert ("--join" in told) != ("--rdzv-endpoint" in told)
        words = [word for pair in told.items() for word in pair if pair[0].startswith("--")]
        result = CliRunner().invoke(app, ["run", *words, "--rdzv-backend", "c10d", "train.py"])
        assert result.exit_code == 2 and "--rdzv-backend" in result.output, result.output


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "Job_1"}, "small letters"),
        ({"claim": "-"}, "--checkpoint-claim"),
        ({"image": ""}, "--image"),
        ({"ports": (30000, 30050)}, "at least 128 ports"),
        ({"ports": (80, 30050)}, "from 1024"),
        ({"command": ()}, "no script"),
        ({"command": ("--rdzv_id=x", "train.py")}, "--rdzv_id=x is set by the manifest"),
        ({"command": ("--join", "h", "train.py")}, "--join is set by the manifest"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        example(**wrong)


@pytest.mark.parametrize(
    "words",
    [
        ("--nodes", "3:2"),
        ("--port-range", "1"),
        ("--memory", "much"),
        ("--nproc-per-node", "0"),
        ("--rdzv-endpoint", "etcd:x"),
        ("--out", "/nowhere/job.yaml"),
    ],
)
def test_bad_options_end_the_command_with_2(words: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*NAMED, *words, "--", "train.py"])
    assert result.exit_code == 2 and result.output.count("\n") == 1 and words[1] in result.output


def test_the_file_with_the_secret_is_the_users_alone_and_replaces_no_other(tmp_path: Path) -> None:
    out = tmp_path / "job.yaml"
    for code in (0, 2):
        result = CliRunner().invoke(app, [*NAMED, "--job-set", "--out", str(out), "--", "--tee", "3", "train.py"])
        assert result.exit_code == code, result.output
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert [each["kind"] for each in yaml.safe_load_all(out.read_text())][-1] == "JobSet"
