"""torch's compiler is imported by who compiles, and by nobody else: each case in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys, torch, elastrain

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return torch.full((4,), float(index))

job = elastrain.init(seed=3)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.AdamW(model.parameters())
optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
optimizer.zero_grad()
optimizer.load_state_dict(optimizer.state_dict())
optimizer = torch.optim.AdamW(model.parameters())
loader = elastrain.DataLoader(Samples(), global_batch_size=4, micro_batch_size=2)
model, optimizer, loader = job.prepare(model, optimizer, loader)
for step in job.steps(loader, until=4):
    for batch in step:
        step.backward(model(batch).square().mean())
print("torch._dynamo" in sys.modules)
"""
COMPILES = """
import torch
from elastrain.runtime.model.kernels import import_compiler_late
import_compiler_late()
parameter = torch.nn.Parameter(torch.zeros(3))
optimizer = torch.optim.SGD([parameter], lr=0.5)
optimizer.zero_grad()

@torch.compile(backend="eager")
def loss(factor):
    optimizer.zero_grad()
    return (parameter * factor - 1).square().sum()

for factor in (torch.tensor(1.0), torch.tensor(2.0)):
    loss(factor).backward()
    optimizer.step()
kept_out = torch.optim.Optimizer.zero_grad.__wrapped__.__wrapped__.__dict__["__dynamo_disable"]
print(parameter.tolist(), kept_out.__module__)
"""

EACH = """
import sys, torch
from elastrain.runtime.model.kernels import import_compiler_late
import_compiler_late()
classes = [each for each in vars(torch.optim).values() if isinstance(each, type) and each.__name__ not in
           ("Optimizer", "LBFGS", "SparseAdam")]

def stepped(cls):
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(3, 4))
    optimizer = cls([parameter], lr=0.1)
    for _ in range(3):
        parameter.grad = parameter.detach() * 0.3 + 1
        optimizer.step()
        optimizer.zero_grad()
    return parameter.detach()

without = [stepped(cls) for cls in classes]
assert "torch._dynamo" not in sys.modules
import torch._dynamo
print(all(torch.equal(stepped(cls), before) for cls, before in zip(classes, without)), len(classes) > 9)
"""


def _says(code: str) -> str:
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=360)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.strip().splitlines()[-1]


def test_a_job_that_compiles_nothing_does_without_the_compiler() -> None:
    assert _says(SCRIPT) == "False"


def test_who_compiles_has_the_methods_that_torch_keeps_out_of_it() -> None:
    assert _says(COMPILES) == "[-1.0, -1.0, -1.0] torch._dynamo.eval_frame"


def test_each_optimizer_makes_the_same_steps_without_the_compiler_and_beside_it() -> None:
    assert _says(EACH) == "True True"
