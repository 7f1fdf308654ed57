"""The user's optimizer once it is prepared: it holds hyperparameters, and says so when more is asked of it."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.optim import Optimizer

from elastrain.errors import ConfigError


class Facade:
    """Refuses by name what would do nothing. Raises ConfigError when the optimizer already carries hooks for steps."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._pre_hooks: set[int] = set()
        self._check_hooks()
        self._groups = self._parameters()
        optimizer.register_step_pre_hook(_refuse_step)
        optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        optimizer.register_load_state_dict_pre_hook(_refuse_load)
        self._pre_hooks = set(optimizer._optimizer_step_pre_hooks)

    def check(self) -> None:
        """Raises ConfigError if groups, state or hooks have changed since: nobody would have heeded that."""
        self._check_hooks()
        if self._parameters() != self._groups:
            raise ConfigError(
                "the optimizer's groups have other parameters than when they were prepared: call add_param_group "
                "before prepare, and freeze in the loop what is to be trained later"
            )
        if any(self.optimizer.state.values()):
            raise ConfigError(
                "state was put into the optimizer after prepare, and the sharded optimizer does not use it: this "
                "version starts with fresh state"
            )

    def _check_hooks(self) -> None:
        added = set(self.optimizer._optimizer_step_pre_hooks) - self._pre_hooks
        if added or self.optimizer._optimizer_step_post_hooks:
            raise ConfigError(
                "the optimizer has hooks for its steps (register_step_pre_hook, register_step_post_hook), which would "
                "never run: each member steps only its shards. Do after `for batch in step` what they do"
            )

    def _parameters(self) -> list[list[int]]:
        return [[id(parameter) for parameter in group["params"]] for group in self.optimizer.param_groups]


def _refuse_step(*_: Any) -> NoReturn:
    raise ConfigError(
        "optimizer.step() would do nothing here: the step is taken, on all members, when `for batch in step` ends. "
        "Leave the call out; to train on behind the loop, make a new optimizer"
    )


def _refuse_state_dict(*_: Any) -> NoReturn:
    raise ConfigError(
        "optimizer.state_dict() has nothing to give: the state is sharded over the members, with verified copies in "
        "memory. Let the job write durable checkpoints (elastrain run --checkpoint-dir): `elastrain checkpoint export` "
        "makes plain state dicts of them"
    )


def _refuse_load(*_: Any) -> NoReturn:
    raise ConfigError(
        "optimizer.load_state_dict() would do nothing here: the state is sharded over the members. Begin the job from "
        "a checkpoint with `elastrain run --resume`; `elastrain checkpoint import` makes one of a plain state"
    )
