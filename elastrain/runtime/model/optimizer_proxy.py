"""The guard on the user's optimizer: which of its calls work in a job, and which are refused."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from elastrain.errors import ConfigError
from elastrain.runtime.model.optimizer import is_stepped


class OptimizerProxy:
    """A guard on the user's optimizer: calls that would have no effect raise ConfigError, and so do step hooks.

    In the loop, `state_dict` returns the whole state, which `fetch` brings.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._fetch: Callable[[], Mapping[Tensor, dict[str, Any]]] | None = None
        """Returns the whole state by parameter, or raises ConfigError. None before the loop."""
        self._pre_hooks: set[int] = set()
        self._check_hooks()
        self._groups = self._parameters()
        optimizer.register_step_pre_hook(_refuse_step)
        optimizer.register_state_dict_pre_hook(self._fill)
        optimizer.register_state_dict_post_hook(self._empty)
        optimizer.register_load_state_dict_pre_hook(self._check_load)
        self._pre_hooks = set(optimizer._optimizer_step_pre_hooks)

    def take_loaded(self) -> dict[Tensor, dict[str, Any]]:
        """Return the state that the script has loaded or made before the loop, by parameter, and take it away."""
        loaded = {parameter: state for parameter, state in self.optimizer.state.items() if is_stepped(state)}
        self.optimizer.state.clear()
        return loaded

    def enter_loop(self, fetch: Callable[[], Mapping[Tensor, dict[str, Any]]]) -> None:
        """Let `state_dict` return what `fetch` brings, and refuse what a script does with `optimizer.state` itself."""
        self._fetch = fetch
        self.optimizer.state = _ShardedState()

    def check(self) -> None:
        """Raise ConfigError if groups, state or hooks changed since `prepare`, because changes have no effect."""
        self._check_hooks()
        if self._parameters() != self._groups:
            raise ConfigError(
                "the optimizer's groups have other parameters than when they were prepared: call add_param_group "
                "before prepare, and freeze in the loop what is to be trained later"
            )
        is_replaced = self._fetch is not None and type(self.optimizer.state) is not _ShardedState
        if is_replaced or any(self.optimizer.state.values()):
            raise ConfigError(
                "state was put into the optimizer in the loop, and the sharded optimizer does not use it: load it "
                "before the loop over job.steps(…)"
            )

    def _check_hooks(self) -> None:
        hooks = self.optimizer._optimizer_step_pre_hooks
        added = set(hooks) - self._pre_hooks
        if any(_is_of_within(hooks[each]) for each in added):
            raise ConfigError(
                "the optimizer is in elastrain.offload.within, which steps it block by block, and in a job each member "
                "steps its own shards: leave within out, and bound what a member holds by `elastrain run "
                "--memory-limit` (init(memory_limit=…)) with --offload-dir; offload.save_on_disk works in the loop"
            )
        if added or self.optimizer._optimizer_step_post_hooks:
            raise ConfigError(
                "the optimizer has hooks for its steps (register_step_pre_hook, register_step_post_hook), which would "
                "never run: each member steps only its shards. Do after `for batch in step` what they do"
            )

    def _fill(self, optimizer: Optimizer) -> None:
        if self._fetch is not None:
            found = self._fetch()
            # In plain PyTorch the order is that of the groups, too.
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            optimizer.state.update({each: found[each] for each in parameters if each in found})

    def _empty(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        if self._fetch is not None:
            optimizer.state = _ShardedState()

    def _check_load(self, *_: Any) -> None:
        if self._fetch is not None:
            raise ConfigError(
                "optimizer.load_state_dict() would do nothing in the loop: the state is sharded over the members. "
                "Call it before the loop over job.steps(…), or begin the job from a checkpoint with `elastrain run "
                "--resume`"
            )

    def _parameters(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]


class _ShardedState(defaultdict[Tensor, dict[str, Any]]):
    """`optimizer.state` in the loop: empty, because the state is sharded, so that to read or clear it has no effect."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise ConfigError(
            "optimizer.state is empty in the loop, because the state is sharded over the members: read it from "
            "optimizer.state_dict(), and begin a new job to go on without it"
        )

    # A read of what is not there would put an empty state in; copies and pickles would lack the state.
    __missing__ = clear = pop = popitem = setdefault = __delitem__ = __reduce_ex__ = _refuse


def _is_of_within(hook: object) -> bool:
    """Return True for a hook of `elastrain.offload.within`. By name, because jobs do not import it."""
    return type(getattr(hook, "__self__", None)).__module__.startswith("elastrain.offload.lifetimes.")


def _refuse_step(*_: Any) -> NoReturn:
    raise ConfigError(
        "optimizer.step() would do nothing here: the step is taken, on all members, when `for batch in step` ends. "
        "Leave the call out; to train on behind the loop, make a new optimizer"
    )
