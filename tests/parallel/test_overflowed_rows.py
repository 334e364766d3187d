"""The counter of rows that did not fit: each forward counts once, and nobody else writes to it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile.parallel import ExpertParallel, overflowed_rows

HIDDEN, COUNT = 32, 4
FEW, MANY = 2, 8  # tokens; of the rows of MANY, all of which are for one rank, 12 of 16 do not fit
CAPACITY, DROPPED = 4, 12


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


class Mixture(nn.Module):
    """A linear and experts of transformers."""

    def __init__(self, how=None):
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

        super().__init__()
        config = Qwen3MoeConfig(hidden_size=HIDDEN, moe_intermediate_size=48, num_experts=COUNT, num_experts_per_tok=2)
        self.first, self.experts, self.how = nn.Linear(HIDDEN, HIDDEN), Qwen3MoeExperts(config), how

    def forward(self, x, *routing):
        x = self.first(x)
        return self.experts(x, *routing) if self.how is None else checkpoint(self.experts, x, *routing, **self.how)


def spread(how=None, device="cpu"):
    """The model with its experts over two ranks, and room for few rows."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu", mesh_dim_names=("ep",))
    with torch.device(device):
        model = Mixture(how).bfloat16()
    for each in model.parameters():
        nn.init.normal_(each, std=0.1)
    f8.convert(model, f8.recipes.rowwise(), filter=lambda _, name: name == "experts")
    return parallelize_module(model, mesh, {"experts": ExpertParallel(capacity=CAPACITY)})


def routed(*, many):
    """Tokens of which none, or most, have too many rows for the first rank."""
    index = torch.tensor([[0, 1]] * MANY if many else [[0, 2]] * FEW)
    return torch.randn(len(index), HIDDEN).bfloat16(), index, torch.ones(len(index), 2).bfloat16()


INSIDE = {"use_reentrant": False}


def counted(place, backend):
    """What is counted of three forwards of this rank: with a backward, without, and one where all rows fit."""
    torch._dynamo.reset()
    counters.clear()
    model, rank = spread(INSIDE if place == "inside" else None), dist.get_rank()
    call = compiled = torch.compile(model, fullgraph=True, backend=backend)
    if place.startswith("around"):

        def call(*given):
            return checkpoint(compiled, *given, use_reentrant="reentrant" in place)

    found = []
    for many in (bool(rank), False):
        x, *routing = routed(many=many)
        call(x.requires_grad_(), *routing).float().sum().backward()
        found.append(overflowed_rows(model)["experts"])
    with torch.no_grad():
        compiled(*routed(many=bool(rank)))
    return [*found, overflowed_rows(model)["experts"]], counters["graph_break"].total()


@pytest.mark.parametrize(
    ("place", "backend"),
    [
        ("nowhere", "aot_eager"),
        ("inside", "aot_eager"),
        ("around", "aot_eager"),
        ("around, reentrant", "aot_eager"),
        pytest.param("inside", "inductor", marks=pytest.mark.slow),
        pytest.param("around", "inductor", marks=pytest.mark.slow),
    ],
)
def test_a_forward_that_checkpointing_repeats_counts_once(ranks, place, backend):
    expected = [[0, 0, 0], [DROPPED, DROPPED, 2 * DROPPED]]
    for (found, breaks), numbers in zip(ranks.run(counted, place, backend, within="pair"), expected, strict=True):
        assert (found, breaks) == (numbers, 0)


def written_by_others():
    """The counter after all that writes to buffers."""
    model = spread(device="meta")
    memory = [torch.full((1,), 7, dtype=torch.int64) for _ in range(100)]
    del memory
    found = {"to_empty": overflowed_rows(model.to_empty(device="cpu"))["experts"]}
    model = spread(device="meta")
    model.load_state_dict(spread().state_dict(), assign=True)
    found["assigned"] = overflowed_rows(model)["experts"]
    model.experts.overflowed_rows += 5
    found["copied"] = overflowed_rows(copy.deepcopy(model))["experts"]
    found["cast"] = overflowed_rows(model.half().bfloat16())["experts"]
    found["in states"] = [name for name in (*model.state_dict(), *dict(model.named_buffers())) if "overflowed" in name]
    return found


def test_nobody_else_writes_to_the_counter(ranks):
    for found in ranks.run(written_by_others, within="pair"):
        assert found == {"to_empty": 0, "assigned": 0, "copied": 5, "cast": 5, "in states": []}


def beside_ddp():
    """What this rank counts under DistributedDataParallel, which sends the first rank's buffers to all."""
    torch._dynamo.reset()
    model, rank = spread(), dist.get_rank()
    model.register_buffer("of_all", torch.tensor(float(rank)))  # what DDP does send
    experts = [name for name, _ in model.named_parameters() if "experts" in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, experts)
    ddp = DistributedDataParallel(model, process_group=GROUPS["pair"])
    model.experts.compile(backend="aot_eager", fullgraph=True)
    for many in (bool(rank), False):
        ddp(*routed(many=many)).float().sum().backward()
    return overflowed_rows(model)["experts"], model.of_all.item()


def test_ranks_count_their_own_rows_under_ddp(ranks):
    assert ranks.run(beside_ddp, within="pair") == [(0, 0.0), (DROPPED, 0.0)]
