"""torch's compiler stays out of a process that compiles nothing, and is itself in one that does."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from packaging.version import Version

TRAINED = """
import sys, torch
from trainwright.strategies.torch.engines import data_parallel
from trainwright.strategies.torch import profiling
from trainwright.strategies.torch.training.objective import BackwardRoots
from torch.distributed import HashStore, destroy_process_group, init_process_group

init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

def steps(optimizer, model=model):
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())

for kind in (torch.optim.SGD, torch.optim.AdamW):
    steps(kind(model.parameters(), 0.1))
carry = torch.nn.Parameter(torch.zeros(3))
values, slopes = model(torch.ones(2, 4)).sum(dim=1), torch.ones(2)
BackwardRoots(values=values, slopes=slopes, sums_parameter=carry.view(-1), sums=torch.arange(3.0)).backward()
assert carry.grad.tolist() == [0.0, 1.0, 2.0]
assert "sympy" not in sys.modules, "a step imported sympy"
with torch.device("meta"):
    torch.nn.Linear(2, 2)(torch.ones(1, 2))

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

divided = torch.nn.Linear(4, 4)
fully_shard(divided, mesh=init_device_mesh("cpu", (1,)))
steps(torch.optim.AdamW(divided.parameters(), 0.1), divided)
kept_out = torch._dynamo.disable(lambda x: torch.sin(x) if torch.compiler.is_compiling() else x)
assert "torch._dynamo.utils" not in sys.modules, "something imported the compiler"
"""
PLANNED = """
import sys, torch
from trainwright.planning.profiler import build_model

assert build_model(lambda: torch.nn.Embedding(4, 4)).weight.is_meta
assert "torch._dynamo.utils" not in sys.modules, "planning imported the compiler"
assert "_dynamo" in vars(torch), "torch looks for it at each use, which takes ten microseconds"
print("well")
"""
WHOLE = """
import torch._dynamo, torch._dynamo.utils
from torch._compile import _disable_dynamo
real = sys.modules["torch._dynamo"]
assert torch._dynamo is real and real.utils is sys.modules["torch._dynamo.utils"]
assert real.__spec__.origin == real.__file__ and real.utils.__spec__.origin == real.utils.__file__
for name, module in list(sys.modules.items()):
    parent, _, child = name.rpartition(".")
    if parent.startswith("torch._dynamo"):
        assert hasattr(sys.modules[parent], child), name
undisturbed = torch.optim.Optimizer.add_param_group.__wrapped__
assert undisturbed.__dynamo_disable is not undisturbed
assert undisturbed.__dynamo_disable._torchdynamo_disable, "the compiler does not know what to keep out of"
steps(torch.optim.AdamW(model.parameters(), 0.1))
assert torch.compile(lambda x: torch.sin(x) + x, backend="eager", fullgraph=True)(torch.zeros(2)).tolist() == [0, 0]
steps(torch.optim.AdamW(divided.parameters(), 0.1), divided)
assert torch.compile(lambda x: kept_out(x) + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2], "looked into"
destroy_process_group()
print("well")
"""


@pytest.mark.skipif(Version(torch.__version__) < Version("2.12"), reason="this torch imports it for FSDP2")
@pytest.mark.parametrize(
    "use",
    [
        "torch.compile(torch.nn.Linear(4, 4), backend='eager')(torch.ones(1, 4))",
        "from torch._dynamo.utils import counters; import torch._dynamo.utils as u; assert u.counters is counters",
        pytest.param(
            "import torch._dynamo.repro.after_aot as a; assert torch._dynamo.repro.after_aot is a",
            marks=pytest.mark.soak,
        ),
    ],
    ids=["compile", "from", "beneath"],
)
def test_the_compiler_comes_with_its_first_use_and_is_whole(use: str) -> None:
    found = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", f"{TRAINED}\n{use}\n{WHOLE}"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert found.stdout.splitlines()[-1:] == ["well"], found.stderr


def test_a_model_is_planned_without_it() -> None:
    found = subprocess.run([sys.executable, "-c", PLANNED], capture_output=True, text=True, timeout=120, check=False)
    assert found.stdout == "well\n", found.stderr
