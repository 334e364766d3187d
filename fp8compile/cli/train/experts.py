"""A mixture of experts, in the place of the feed-forward of `fp8compile train`'s model.

    x_MD --router--> scores_ME --softmax, top k, renormalized--> which experts a row goes to, and their shares
      |
      +--rows, k times, sorted by expert--> rows_RD --gate_up--> silu(gate) * up --down--> y_RD
                                                                                            |
    out_MD <--sum over k-- share * y, in the order of x <-----------------------------------+

The experts multiply by a method ``_grouped_mm``, as torchtitan's do, by which `fp8compile.convert` knows them. How
many rows an expert gets is data: the host never waits for it, and no graph depends on it.

Letters: M rows of x, R = M * k rows in groups, D model width, F width of an expert, E experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8compile import Recipe, grouped_mm
from fp8compile.nn.experts.placed import group_of_experts, local_stack
from fp8compile.nn.experts.token_shares import all_shares, own_share
from fp8compile.nn.routes import expert_routes
from fp8compile.ops.groups.layout import sizes_of_groups

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["MixtureOfExperts"]


class _Experts(nn.Module):
    """SwiGLU by each expert of the rows of its group."""

    def __init__(self, *, dim: int, hidden: int, experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))

    def _grouped_mm(self, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
        # in bfloat16; torch.nn.functional.grouped_mm compiled by Inductor for a CPU gives gradients of 1e37 here
        return grouped_mm(A, B_t, offs=offs, recipe=Recipe())

    def forward(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        gate_up, down = (local_stack(self, name).transpose(-2, -1) for name in ("gate_up", "down"))
        gate, up = self._grouped_mm(A=rows_RD, B_t=gate_up, offs=offsets_E).chunk(2, dim=-1)
        return self._grouped_mm(A=F.silu(gate) * up, B_t=down, offs=offsets_E)


class MixtureOfExperts(nn.Module):
    """A feed-forward layer whose rows each go to a few of its experts.

    Args:
        dim: Width of the model.
        hidden: Width of each expert.
        experts: How many there are.
        top_k: How many of them each row goes to.

    Attributes:
        same_tokens: The ranks that have the same rows of x, of which each sends a share to the experts; None if this
            one's are its own.
    """

    same_tokens: DeviceMesh | None = None

    def __init__(self, *, dim: int, hidden: int, experts: int, top_k: int) -> None:
        """Make the router and the experts, whose weights are not drawn yet."""
        super().__init__()
        self.top_k = top_k
        self.router = nn.Linear(dim, experts, bias=False)
        self.experts = _Experts(dim=dim, hidden=hidden, experts=experts)

    def _by_experts(self, rows_RD: Tensor, offsets_E: Tensor) -> Tensor:
        """What the experts make of rows, on whatever ranks they are."""
        group = group_of_experts(self.experts.down)
        if group is None:
            return self.experts(rows_RD, offsets_E)
        routes = expert_routes(sizes_of_groups(offsets_E), group=group)
        recipe = getattr(self.experts, "recipe", None)  # that of converted experts: its codes travel
        y_RD = self.experts(routes.dispatch(rows_RD, recipe=recipe), routes.offsets)
        return routes.combine(y_RD, rows_RD.shape[0], recipe=recipe)

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of what the chosen experts make of each row, each times its share.

        Args:
            x: Shape (..., D).

        Returns:
            Shape and dtype of ``x``.
        """
        x_MD = x.flatten(0, -2)
        share_Mk, expert_Mk = F.softmax(self.router(x_MD), dim=-1, dtype=torch.float32).topk(self.top_k, dim=-1)
        share_Mk = share_Mk / share_Mk.sum(dim=-1, keepdim=True)
        if self.same_tokens is None:
            return self._mixed(x_MD, share_Mk, expert_Mk).view_as(x)
        shares = (own_share(each, self.same_tokens) for each in (x_MD, share_Mk, expert_Mk))
        return all_shares(self._mixed(*shares), self.same_tokens, x_MD.shape[0]).view_as(x)

    def _mixed(self, x_MD: Tensor, share_Mk: Tensor, expert_Mk: Tensor) -> Tensor:
        # stable, so that rows of an expert are in one order wherever this runs: blocks along tokens depend on it
        expert_R, place_R = expert_Mk.flatten().sort(stable=True)
        every_E = torch.arange(self.router.out_features, device=x_MD.device)
        offsets_E = torch.searchsorted(expert_R, every_E, right=True, out_int32=True)
        y_RD = self._by_experts(x_MD[place_R // self.top_k], offsets_E)
        y_MkD = y_RD[place_R.argsort()].unflatten(0, (-1, self.top_k))
        return (y_MkD * share_Mk.unsqueeze(-1)).sum(dim=1).to(x_MD.dtype)
