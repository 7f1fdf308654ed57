"""What scripts do behind the runtime's back: each case is a job of one that goes on, or ends with a sentence.

Prints a line per case: its name, and what it was told or the digest that it ended with.
"""

import copy
import io
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import elastrain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.tied = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8)
        self.head.weight = self.tied.weight
        self.teacher = nn.Linear(4, 8).requires_grad_(False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.tied, self.norm(self.entry(x)), use_reentrant=False)
        return self.head(self.drop(torch.tanh(hidden))) - self.teacher(x)


class Case:
    """What a case may do at each place of the loop. `at` names the place that does something at step 2."""

    def __init__(self, at: str, what: Callable[["Case"], Any]) -> None:
        self.at, self.what = at, what
        self.model: Any = Net()
        self.optimizer = torch.optim.AdamW(q for q in self.model.parameters() if q.requires_grad)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.batch = torch.zeros(2, 4)
        self.leaves = False
        self.has_loop = False
        self.unmoved: Tensor | None = None

    def reach(self, place: str) -> None:
        if place == self.at:
            self.what(self)


def teacher_through_data(case: Case) -> None:
    case.model.teacher.weight.data.mul_(0.5)


def teacher_in_place(case: Case) -> None:
    with torch.no_grad():
        case.model.teacher.weight.mul_(0.9).add_(case.model.entry.weight, alpha=0.1)


def clamp(case: Case) -> None:
    with torch.no_grad():
        case.model.head.weight.clamp_(-1, 1)


def evaluate(case: Case) -> None:
    case.model.eval()
    with torch.no_grad():
        case.model(case.batch)
    case.optimizer.zero_grad()
    case.model.zero_grad(set_to_none=False)
    torch.autograd.grad(case.model(case.batch).sum(), case.model.entry.weight)
    case.model.train()


def load(case: Case) -> None:
    case.model.load_state_dict({name: value + 0.01 for name, value in case.model.state_dict().items()})


def clamp_and_leave(case: Case) -> None:
    clamp(case)
    case.leaves = True


def stand_still(case: Case) -> None:
    for group in case.optimizer.param_groups:
        group["lr"] = 0.0
    case.unmoved = case.model.entry.weight.clone()


CASES: dict[str, tuple[str, Callable[[Case], Any]]] = {
    "nothing": ("never", evaluate),
    "evaluation after the step": ("after", evaluate),
    "evaluation before the step": ("before", evaluate),
    "evaluation within it": ("within", evaluate),
    "load before the loop": ("prepared", load),
    "backward before the loop": ("prepared", lambda c: c.model(c.batch).sum().backward()),
    "load after a step": ("after", load),
    "frozen teacher in place": ("after", teacher_in_place),
    "frozen teacher through data": ("after", teacher_through_data),
    "frozen teacher at the start": ("before", teacher_through_data),
    "frozen teacher within": ("within", teacher_in_place),
    "clamped": ("after", clamp),
    "clamped after the backward": ("within", clamp),
    "a rate of 0 before the batches": ("before", stand_still),
    "clamped, then the loop is left": ("after", clamp_and_leave),
    "another layer": ("after", lambda c: setattr(c.model.entry, "weight", nn.Parameter(torch.zeros(8, 4)))),
    "a second backward": ("within", lambda c: c.model(c.batch).sum().backward()),
    "a backward after it": ("done", lambda c: c.model(c.batch).sum().backward()),
    "a backward between steps": ("after", lambda c: c.model(c.batch).sum().backward()),
    "thawed": ("after", lambda c: c.model.teacher.requires_grad_(True)),
    "frozen and thawed": ("after", lambda c: c.model.head.requires_grad_(not c.model.head.bias.requires_grad)),
    "a group more": ("after", lambda c: c.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})),
    "optimizer.step": ("done", lambda c: c.optimizer.step()),
    "optimizer.state_dict": ("within", lambda c: c.optimizer.state_dict()),
    "optimizer.load_state_dict": ("after", lambda c: c.optimizer.load_state_dict({"state": {}, "param_groups": []})),
    "a hook after prepare": ("prepared", lambda c: c.optimizer.register_step_post_hook(print)),
    "a hook before prepare": ("made", lambda c: c.optimizer.register_step_post_hook(print)),
    "an embedding with max_norm": ("made", lambda c: c.model.append(nn.Embedding(4, 4, max_norm=1.0))),
}


def run(case: Case) -> str:
    """The whole job of one; its digest."""
    job = elastrain.init(seed=3)
    data = [torch.randn(4, generator=torch.Generator().manual_seed(i)) for i in range(32)]
    loader = elastrain.DataLoader(data, global_batch_size=8, micro_batch_size=4, num_workers=0)
    case.reach("made")
    model, _, loader = job.prepare(case.model, case.optimizer, loader)
    case.reach("prepared")
    case.has_loop = True
    for step in job.steps(loader, until=4):
        if step.number == 2:
            case.reach("before")
        for batch in step:
            if step.number == 2:
                case.reach("within")
            step.backward(model(batch).square().mean())
            if step.number == 2:
                case.reach("done")
        case.scheduler.step()
        if step.number == 2:
            case.reach("after")
            if case.leaves:
                break
            if case.unmoved is not None:
                return f"unmoved: {torch.equal(case.unmoved, model.entry.weight)}"
    return job.digest()


def is_ordinary(model: nn.Module) -> bool:
    """Whether a model that was trained has no hooks any more, and a file of it has its own size."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks")
    on_modules = any(getattr(each, kind) for each in model.modules() for kind in hooks)
    on_parameters = any(each._post_accumulate_grad_hooks for each in model.parameters())
    copied, file = copy.deepcopy(model), io.BytesIO()
    torch.save(model, file)
    model.zero_grad()
    for each in (model, copied):
        torch.manual_seed(0)
        each(torch.ones(2, 4)).sum().backward()
    pairs = zip(model.parameters(), copied.parameters(), strict=True)
    is_equal = all(p.grad is None or torch.equal(p.grad, q.grad) for p, q in pairs)
    return is_equal and not on_modules and not on_parameters and len(file.getvalue()) < 20_000


def main() -> None:
    torch.set_num_threads(1)
    for name, (at, what) in CASES.items():
        torch.manual_seed(0)
        case = Case(at, what)
        if "max_norm" in name:
            case.model = nn.Sequential(case.model)
        try:
            told = run(case)
        except elastrain.ConfigError as error:
            told = f"ConfigError: {error}"
        sys.stdout.write(f"{name} | {told}\n")
        if case.has_loop:
            sys.stdout.write(f"{name}: the model | {is_ordinary(case.model)}\n")


if __name__ == "__main__":
    main()
