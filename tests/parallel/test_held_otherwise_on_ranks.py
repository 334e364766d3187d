"""Modules with a ModuleSpec, on ranks: experts whose matrices are a child's, and linears by another name."""

from __future__ import annotations

import fsdp_models as models
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import shared_ranks
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.parallel import ColwiseParallel, ExpertParallel, RowwiseParallel, graph_fsdp
from fp8compile.testing.bits import bits

WIDTH, COUNT = 32, 4


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


class Dbrx(nn.Module):
    """A router and experts of DBRX, repeated in the backward."""

    def __init__(self):
        from transformers import DbrxConfig
        from transformers.models.dbrx.modeling_dbrx import DbrxExperts

        super().__init__()
        sizes = {"ffn_hidden_size": 48, "hidden_size": WIDTH, "moe_num_experts": COUNT, "moe_top_k": 2}
        config = DbrxConfig(d_model=WIDTH, ffn_config=sizes).ffn_config
        config.hidden_size = WIDTH
        self.router, self.experts = nn.Linear(WIDTH, COUNT, bias=False), DbrxExperts(config)
        for each in self.experts.parameters():
            nn.init.normal_(each, std=0.1)

    def _mix(self, x):
        rows = x.flatten(0, -2)
        shares, chosen = self.router(rows).softmax(-1).topk(2)
        return x + self.experts(rows, chosen, shares).view_as(x)

    def forward(self, x):
        return checkpoint(self._mix, x, use_reentrant=False)


def with_dbrx():
    torch.manual_seed(0)
    model = models.Model(WIDTH, 48, blocks=0)
    model.blocks.append(Dbrx())
    return f8.convert(model, f8.recipes.rowwise(), filter="*.experts")


def trained_in_graph_fsdp():
    """What differs from one process: losses, or a weight."""
    losses, weights = models.one_process(with_dbrx(), "bf16", 3)
    model = graph_fsdp(with_dbrx(), models.mesh_1d("pair"), mp_policy=models.BF16)
    own = models.trained(model, 3, dist.get_rank() % 2)
    after = models.weights_of(model)
    return [name for name in weights if not torch.equal(bits(weights[name]), bits(after[name]))], own == losses


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="a group as a part of a tensor needs PyTorch 2.12")
def test_graph_fsdp_has_whole_weights_of_a_child_where_a_forward_is_repeated(ranks):
    """DbrxExperts reads those of its ``mlp``, whose forward doesn't run: it was given shards."""
    assert ranks.run(trained_in_graph_fsdp, within="pair") == [([], True)] * 2


def refusals():
    """Texts of the styles that do not take these modules."""
    from transformers.pytorch_utils import Conv1D

    mesh, texts = models.mesh_1d("pair"), []
    conv = f8.convert(nn.Sequential(Conv1D(64, 64)), f8.recipes.rowwise(), filter=lambda *_: True)
    for model, name, style in (
        (with_dbrx(), "blocks.0.experts", ExpertParallel()),
        (conv, "0", ColwiseParallel()),
        (conv, "0", RowwiseParallel()),
    ):
        with pytest.raises(TypeError) as raised:
            parallelize_module(model, mesh, {name: style})
        texts.append(str(raised.value))
    return texts


def test_styles_that_do_not_take_them_say_why(ranks):
    experts, *linears = ranks.run(refusals, within="pair")[0]
    assert experts.startswith("ExpertParallel: got a DbrxExperts, which does not store its experts as 3-D parameters")
    assert all(
        "got a Conv1D, a linear layer of another library, for which tensor parallelism has no" in t for t in linears
    )
