"""Models that are compiled: what is refused, and what an error of the compiler says."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

from tests.support.torch_engines import one_device, plan, spec
from tests.support.torch_profile import profile_model
from trainwright.core.errors import JobError
from trainwright.core.topology import Capabilities
from trainwright.strategies.cost_model.plan_constraints import invalid_compile
from trainwright.strategies.torch.torch_errors import TorchUserCode


class InductorError(RuntimeError):
    """As torch's own."""

    __module__ = "torch._inductor.exc"


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("InvalidCxxCompiler: No working C++ compiler found", "install one, such as g[+][+], or leave compile= out"),
        ("KeyError: 7", "the model cannot be compiled: InductorError: KeyError: 7: leave compile= out"),
    ],
)
def test_an_error_of_the_compiler_says_what_to_do_without_it(text: str, words: str) -> None:
    with pytest.raises(JobError, match=words), TorchUserCode("the model", "rank 0"):
        raise InductorError(text)


def test_what_a_compiled_model_cannot_be_is_refused_before_a_step() -> None:
    job = spec(compile="inductor")
    with pytest.raises(JobError, match="leave recompute=selective out"):
        one_device(job, plan(recompute="selective"))
    known = profile_model(normed, {"x": np.zeros((2, 4), np.float32)}, ("x",)).recounted
    with pytest.raises(JobError, match=r"buffer '1\.running_mean' is in the model's state") as caught:
        one_device(spec(model=normed, compile="inductor"), plan(recompute="full"))
    told = invalid_compile("full", known)
    assert told and caught.value.problems == (": ".join(told),), "the planner says the same"
    with pytest.raises(JobError, match="is for torch models"):
        job.check(Capabilities())
