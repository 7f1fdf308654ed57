"""Choices of torch's compiler: by rule unless the user wants otherwise, and compared by members."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from elastrain.base.compile_cache import INDUCTOR, PEERS, TRITON, peers_from_text
from elastrain.errors import ConfigError
from elastrain.launcher.agent.node_cache import CompileCache
from elastrain.launcher.shared.job_values import NodeRecord
from elastrain.runtime.model import compiler_choices
from elastrain.runtime.model.compiler_choices import DETERMINISTIC


class Config(SimpleNamespace):
    """Inductor's settings, as a script that compiles has imported them."""

    def _is_default(self, name: str) -> bool:
        return {"max_autotune": False, "cpp.simdlen": None}[name] == compiler_choices._value(self, name)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Config:
    for name in list(compiler_choices.compiler_variables()):
        monkeypatch.delenv(name)
    monkeypatch.setenv(DETERMINISTIC, "1")  # so that it is taken away again
    monkeypatch.delenv(DETERMINISTIC)
    made = Config(deterministic=False, max_autotune=False, cpp=SimpleNamespace(simdlen=None))
    monkeypatch.setitem(sys.modules, "torch._inductor.config", made)
    return made


def test_a_deterministic_job_makes_the_compiler_choose_by_rule_and_another_one_does_not(config: Config) -> None:
    compiler_choices.settle(deterministic=False)
    assert not config.deterministic and compiler_choices.compiler_variables() == {}
    compiler_choices.settle(deterministic=True)
    assert config.deterministic and compiler_choices.compiler_variables() == {DETERMINISTIC: "1"}
    assert compiler_choices.described() == {}


def test_a_user_who_lets_the_compiler_choose_by_time_is_refused(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DETERMINISTIC, "0")
    compiler_choices.settle(deterministic=True)
    with pytest.raises(ConfigError, match="inductor's deterministic mode is off"):
        compiler_choices.described()
    monkeypatch.delitem(sys.modules, "torch._inductor.config")
    compiler_choices.described()  # nothing was compiled


def test_settings_that_differ_from_their_defaults_are_compared(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config.deterministic, config.max_autotune, config.cpp.simdlen = True, True, 8
    monkeypatch.setenv("TORCHINDUCTOR_FREEZING", "1")
    monkeypatch.setenv(INDUCTOR, "/elsewhere")
    assert compiler_choices.described() == {
        "inductor max_autotune": "True",
        "inductor cpp.simdlen": "8",
        "inductor TORCHINDUCTOR_FREEZING": "1",
    }


def test_a_worker_is_told_the_folder_of_its_node_unless_the_user_named_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INDUCTOR, raising=False)
    monkeypatch.delenv(TRITON, raising=False)
    peer = NodeRecord(name="n1", incarnation=7, workers=1, endpoint="h:1")
    coming = NodeRecord(name="n2", incarnation=8, workers=1)
    cache = CompileCache(folder=Path("/run/c"), is_shared=True, peers=lambda: [peer, coming])
    told = cache.environment()
    assert (told[INDUCTOR], told[TRITON], cache.given) == ("/run/c", "/run/c/triton", Path("/run/c"))
    assert [(each.node, each.door, each.endpoint) for each in peers_from_text(told[PEERS])] == [
        ("n1", peer.signature, "h:1")
    ]
    alone = CompileCache(folder=Path("/run/c"), peers=lambda: [peer])
    assert alone.environment()[PEERS] == "" and alone.given is None
    monkeypatch.setenv(INDUCTOR, "/mine")
    told = cache.environment()
    assert told[INDUCTOR] == "/mine" and TRITON not in told and cache.given == Path("/mine")
