"""A mixture of experts in the place of a feed-forward layer.

    x_MD --router--> scores_ME --softmax, top k, renormalized--> which experts a row goes to, and their shares
      |
      +--rows, k times, sorted by expert--> rows_RD --gate_up--> silu(gate) * up --down--> y_RD
                                                                                            |
    out_MD <--sum over k-- share * y, in the order of x <-----------------------------------+

The experts multiply by a method called ``_grouped_mm``, as torchtitan's do, by which `fp8compile.convert` recognizes
them. The number of rows of an expert is data, so no graph depends on it.

With expert parallelism each rank has some of the experts, and rows travel to their experts' ranks:

    this rank's rows, sorted --dispatch--> rows of this rank's experts --> y --combine--> back, sorted as before

Letters: M rows of x, R = M * k rows in groups, D model width, F width of an expert, E experts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import fp8compile as f8


class _Experts(nn.Module):
    """The experts' SwiGLU layers. Each expert is applied to its group of rows."""

    def __init__(self, *, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        # a product in bfloat16; torch.nn.functional.grouped_mm, compiled for a CPU, gives gradients of 1e37 here
        return f8.grouped_mm(A, B_t, offs=offs, recipe=f8.Recipe())

    def forward(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        gate_up, down = (_of_this_rank(stack).transpose(-2, -1) for stack in (self.gate_up, self.down))
        gate, up = self._grouped_mm(A=rows_RD, B_t=gate_up, offs=offsets_E).chunk(2, dim=-1)
        return self._grouped_mm(A=F.silu(gate) * up, B_t=down, offs=offsets_E)


def _of_this_rank(stack: Tensor) -> Tensor:
    """The matrices of this rank's experts. Under graph_fsdp they are no tensor; the product gathers them."""
    is_whole = isinstance(stack, Tensor) and not isinstance(stack, DTensor)
    return stack if is_whole else stack.to_local()


class MixtureOfExperts(nn.Module):
    """A feed-forward layer whose rows each go to ``top_k`` of its experts.

    Attributes:
        ranks: The ranks that have all experts together; None if each rank has all experts.
        same_tokens: The ranks that have the same rows of x; each sends its share of them to the experts. None if each
            rank has other rows.
    """

    ranks: DeviceMesh | None = None
    same_tokens: DeviceMesh | None = None

    def __init__(self, *, dim: int, hidden: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = _Experts(dim=dim, hidden=hidden, experts=experts)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the chosen experts to each row of x, shape (..., D), and sum their results times their shares."""
        x_MD = x.flatten(0, -2)
        share_Mk, expert_Mk = F.softmax(self.router(x_MD), dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        share_Mk = share_Mk / share_Mk.sum(dim=-1, keepdim=True)
        if self.same_tokens is None:
            return self._mixed(x_MD, share_Mk, expert_Mk).view_as(x)
        shares = (_own_share(each, self.same_tokens) for each in (x_MD, share_Mk, expert_Mk))
        return _all_shares(self._mixed(*shares), self.same_tokens, x_MD.shape[0]).view_as(x)

    def _mixed(self, x_MD: Tensor, share_Mk: Tensor, expert_Mk: Tensor) -> Tensor:
        # a stable sort, so that an expert's rows have one order on every device; blocks along tokens depend on it
        expert_R, place_R = expert_Mk.flatten().sort(stable=True)
        every_E = torch.arange(self.router.out_features, device=x_MD.device)
        offsets_E = torch.searchsorted(expert_R, every_E, right=True, out_int32=True)
        y_RD = self._by_experts(x_MD[place_R // self.top_k], offsets_E)
        y_MkD = y_RD[place_R.argsort()].unflatten(0, (-1, self.top_k))
        return (y_MkD * share_Mk.unsqueeze(-1)).sum(dim=1).to(x_MD.dtype)

    def _by_experts(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """Apply the experts to their rows, on whatever ranks the experts are."""
        if self.ranks is None:
            return self.experts(rows_RD, offsets_E)
        counts_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))
        routes = f8.parallel.expert_routes(counts_E, group=self.ranks.get_group())
        recipe = getattr(self.experts, "recipe", None)  # if experts are converted, rows travel as the recipe's codes
        y_RD = self.experts(routes.dispatch(rows_RD, recipe=recipe), routes.offsets)
        return routes.combine(y_RD, rows_RD.shape[0], recipe=recipe)


def _own_share(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's share of the rows that all ranks have. If each rank sent all, gradients would count rows again."""
    return (
        DTensor.from_local(whole, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)]).to_local()
    )


def _all_shares(share: Tensor, mesh: DeviceMesh, rows: int) -> Tensor:
    """Gather the ranks' shares of rows to the whole tensor, on each rank."""
    shape = torch.Size((rows, share.shape[1]))
    parts = DTensor.from_local(share, mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1))
    return parts.redistribute(placements=[Replicate()]).to_local()


def mixtures(model: nn.Module) -> list[MixtureOfExperts]:
    """The mixtures of experts in a model."""
    return [layer for layer in model.modules() if isinstance(layer, MixtureOfExperts)]


def spread_over(model: nn.Module, ranks: DeviceMesh, same_tokens: DeviceMesh | None) -> None:
    """Give each rank some of the experts of every layer; `MixtureOfExperts` describes the two meshes."""
    for layer in mixtures(model):
        f8.parallel.spread_experts(layer.experts, ranks)
        layer.ranks, layer.same_tokens = ranks, same_tokens
