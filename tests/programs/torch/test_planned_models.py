"""Models that planning could not follow, or cut where nothing of them is trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.torch_profile import profile_model
from trainwright.core.cluster import Cluster
from trainwright.core.errors import JobError
from trainwright.core.plan import Plan
from trainwright.strategies.cost_model.machine_model import MachineModel
from trainwright.strategies.cost_model.plan_constraints import invalid_staging
from trainwright.strategies.search.plan_ranking import section_entries, stage_sizes
from trainwright.strategies.torch.pipeline.split import SplitModel

ROW = {"x": np.ones((1, 8), np.float32)}


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def test_a_batch_norm_of_vectors_is_traced_with_two_rows_and_can_be_cut() -> None:
    profile = profile_model(normed, ROW, ("x",))
    assert not profile.untraced
    assert profile.flops == 2.0 * (8 * 16 + 16 * 2)
    alike = profile_model(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.GroupNorm(1, 16), nn.ReLU(), nn.Linear(16, 2)), ROW, ("x",)
    )
    assert profile.layers[0].kept_numbers == alike.layers[0].kept_numbers
    torch.manual_seed(0)
    whole, inputs = normed(), torch.randn(6, 8)
    expected = whole(inputs)
    parts = [
        SplitModel(_same(whole), ["3"], {own}, [torch.ones(1, 8)], lambda model, given: model(*given), "here")
        for own in (0, 1)
    ]
    between = parts[0].run(0, [], rows=6, inputs=[inputs])
    torch.testing.assert_close(parts[1].run(1, between, rows=6), expected)


def _same(model: nn.Module) -> nn.Module:
    made = normed()
    made.load_state_dict(model.state_dict())
    return made


class Graph(nn.Module):
    """A network over the nodes of a graph."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 2)
        self.register_buffer("adjacency", torch.eye(10, device="cpu").to_sparse(), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("persistent", [True, False])
def test_a_sparse_buffer_is_refused_when_the_job_is_planned(persistent: bool) -> None:
    with pytest.raises(
        JobError, match=r"'adjacency' of the model is sparse_coo, which cannot be saved.*plain attribute"
    ):
        profile_model(lambda: Graph(persistent), ROW, ("x",))


class Adapted(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(64, 64), nn.Linear(64, 64)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.frozen(x)) + 0.1 * self.adapter(x)


def adapted() -> nn.Module:
    model = nn.Sequential(Adapted(), Adapted(), nn.Linear(64, 4096))
    model[2].requires_grad_(False)
    return model


def test_a_model_most_of_which_is_frozen_is_cut_so_that_each_stage_trains() -> None:
    profile = profile_model(adapted, {"x": np.ones((1, 64), np.float32)}, ("x",))
    assert profile.most_stages == 2
    plan = replace(Plan.parse("pp=2,accumulation=4"), batch_size=16)
    sizes = stage_sizes(profile, MachineModel.of(Cluster.parse("2xcpu")), plan, room_bytes=2**34)
    (entry,) = section_entries(profile, sizes)
    names = [layer.name for layer in profile.layers]
    assert all(any("adapter" in name for name in part) for part in (names[: sizes[0]], names[sizes[0] :])), entry
    refused = invalid_staging(profile, replace(plan, stages=(len(names) - 1, 1)))
    assert refused is not None and "stage 1 of stages=" in refused[0] and "no layer that is trained" in refused[0]


class Masked(nn.Module):
    """Torch's own encoder, which compares its mask with the causal one; the mask is made of constants."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.log(torch.tril(torch.ones(tokens.shape[1], tokens.shape[1])))
        return self.head(self.encoder(self.embed(tokens), mask=mask))


class Padded(Masked):
    """Looks at the mask that it is given, as Hugging Face's models do."""

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        padding = tokens == 0
        return self.head(self.encoder(hidden) if padding.any() else hidden)


TOKENS = {"tokens": np.arange(12).reshape(1, 12)}


def test_an_encoder_with_a_mask_of_constants_runs_in_sections_and_is_divided() -> None:
    profile = profile_model(Masked, TOKENS, ("tokens",))
    assert not profile.uncut and not profile.untraced and not profile.indivisible
    torch.manual_seed(0)
    whole, tokens = Masked(), torch.from_numpy(np.random.default_rng(0).integers(0, 50, (4, 12)))
    expected = whole(tokens)
    parts = []
    for own in (0, 1):
        model = Masked()
        model.load_state_dict(whole.state_dict())
        cut = SplitModel(model, ["encoder.layers.1"], {own}, [tokens[:1]], lambda model, given: model(*given), "here")
        parts.append(cut)
    between = parts[0].run(0, [], rows=4, inputs=[tokens])
    torch.testing.assert_close(parts[1].run(1, between, rows=4), expected)


def test_a_flow_that_depends_on_the_inputs_is_no_pipeline_and_that_is_planned() -> None:
    profile = profile_model(Padded, TOKENS, ("tokens",))
    assert not profile.untraced and not profile.indivisible
    assert "it must not read values of its inputs" in profile.uncut
    assert 'attn_implementation="eager"' in profile.uncut
