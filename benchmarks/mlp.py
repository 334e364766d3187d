"""The block that FP8 libraries are compared on, and the libraries: RMSNorm, SwiGLU, residual, in bfloat16."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

import fp8compile as f8

__all__ = ["Mlp", "OURS", "PEERS", "VARIANTS", "contenders", "converted", "mlp", "peer_of"]


class Mlp(nn.Module):
    """``x + down(silu(gate(norm(x))) * up(norm(x)))``, the feed-forward block of a Llama."""

    def __init__(self, d: int, h: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d, dtype=dtype)
        self.gate = nn.Linear(d, h, bias=False, dtype=dtype)
        self.up = nn.Linear(d, h, bias=False, dtype=dtype)
        self.down = nn.Linear(h, d, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """X (..., d); the result the same shape."""
        normed = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(normed)) * self.up(normed))


def _torchao(recipe: str) -> Callable[[nn.Module], nn.Module]:
    def convert(model: nn.Module) -> nn.Module:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))

    return convert


def _ours(recipe: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: f8.convert(model, f8.recipes.by_name(recipe), filter="*")


def _quantized(recipe: str) -> Callable[[nn.Module], nn.Module]:
    return lambda model: f8.convert(model, f8.recipes.by_name(recipe), filter="*", weight_lifetime="parameter")


OURS = {name: _ours(name) for name in f8.recipes.names()}
PEERS = {f"torchao {name}": _torchao(name) for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")}
# recipes with the other choice of `weight_lifetime`, with FP8 parameters, which no forward casts, with other blocks
VARIANTS = {
    "tensorwise_keeping": lambda model: f8.convert(
        model, replace(f8.recipes.tensorwise(), weight_lifetime="pass"), filter="*"
    ),
    "delayed_freeing": lambda model: f8.convert(model, f8.recipes.delayed(weight_lifetime="call"), filter="*"),
    "tensorwise_parameters": _quantized("tensorwise"),
    "blockwise_parameters": _quantized("blockwise"),
    "mxfp8_32x32": lambda model: f8.convert(model, f8.recipes.mxfp8(weight_block=(32, 32)), filter="*"),
}
SAME_KIND = {"rowwise_bf16_wgrad": "rowwise_with_gw_hp"}  # where torchao's recipe has another name
CONTENDERS: dict[str, Callable[[nn.Module], nn.Module]] = {"bf16": lambda model: model, **OURS, **VARIANTS, **PEERS}


def contenders() -> list[str]:
    """Names of those that are installed: bfloat16, our recipes, and torchao's."""
    return ["bf16", *OURS, *(PEERS if importlib.util.find_spec("torchao") else ())]


def peer_of(contender: str) -> str:
    """Torchao's recipe of the same kind, whether there is one or not."""
    name = contender.removeprefix("torchao ")
    return f"torchao {SAME_KIND.get(name, name)}"


def converted(contender: str, model: nn.Module) -> nn.Module:
    """The model with its linears as the contender runs them."""
    return CONTENDERS[contender](model)


def mlp(contender: str, m: int, d: int, h: int, device: str = "cpu") -> tuple[nn.Module, Tensor]:
    """The block as the contender runs it, and an input (m, d) that requires grad; bfloat16."""
    with torch.device(device):
        model = Mlp(d, h)
        x = torch.randn(m, d, dtype=torch.bfloat16, requires_grad=True)
    return converted(contender, model), x
