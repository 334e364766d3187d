"""Models and digests shared by what writes tests/checkpoints_before and by the tests that load it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import fp8compile as f8
from fp8compile.tensor import QuantizedTensor

__all__ = [
    "FOLDER",
    "OTHER_RECIPES",
    "RECIPES",
    "SHARDED",
    "attributes_of",
    "digests",
    "digests_of_model",
    "digests_of_parameter",
    "flat",
    "masters_of",
    "model_of",
    "quantizers",
]

FOLDER = Path(__file__).parents[1] / "checkpoints_before"
FOUR_BITS_TWICE = "nvfp4_1x16"  # the products of a weight read different codes, two of them in a byte
RECIPES = {
    **{
        name: f8.recipes.by_name(name)
        for name in f8.recipes.names()
        if name not in ("delayed", "blockwise_bf16_wgrad")
    },
    "delayed": f8.recipes.delayed(history=4),
    FOUR_BITS_TWICE: f8.recipes.nvfp4(weight_block=(1, 16)),
}
OTHER_RECIPES = {
    "stochastic": f8.recipes.rowwise(grad_rounding="stochastic", scale="pow2"),
    "dequantized": f8.recipes.nvfp4(backward="dequantized"),
    "mixed": replace(f8.recipes.tensorwise(), grad_output=None, weight_for_grad_input=None, emulate=True),
}
# written by two ranks of FSDP2, and whether with experts
SHARDED = {"tensorwise": True, "mxfp8": False, FOUR_BITS_TWICE: True}
# in, out: no multiples of a block, and more than one block along each; of 128 along one, to be small
SIZES = {"blockwise": (24, 132)}
EXPERTS = {"blockwise": (12, 132)}


class Experts(nn.Module):
    """As torchtitan writes them: ``convert`` knows them by the method."""

    def __init__(self, dim, inner):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, inner, dim) / 6)
        self.down = nn.Parameter(torch.randn(2, dim, inner) / 6)

    def _grouped_mm(self, *, A, B_t, offs):
        raise AssertionError("experts were not converted")

    def forward(self, rows, offsets):
        rows = self._grouped_mm(A=rows, B_t=self.up.transpose(-2, -1), offs=offsets)
        return self._grouped_mm(A=rows, B_t=self.down.transpose(-2, -1), offs=offsets)


class Model(nn.Module):
    """A linear layer, and experts beside it."""

    def __init__(self, sizes, expert_sizes):
        super().__init__()
        self.linear = nn.Linear(*sizes)
        if expert_sizes is not None:
            self.experts = Experts(*expert_sizes)


def model_of(name, *, seed, experts=True, **options):
    """A model in bfloat16 whose weights are codes; experts have no delayed scaling."""
    torch.manual_seed(seed)
    expert_sizes = EXPERTS.get(name, (36, 20)) if experts and name != "delayed" else None
    model = Model(SIZES.get(name, (36, 36)), expert_sizes).bfloat16()
    options = {"weight_lifetime": "parameter", **options}
    return f8.convert(model, RECIPES[name], filter=lambda *_: True, **options)


def masters_of(model):
    """AdamW with master weights, after a step by made-up gradients, so that all of its state is there."""
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def quantizers():
    """Quantizers of all ready recipes that pickle with a tensor, by what a file calls them."""
    found = {}
    for name, recipe in RECIPES.items():
        if name == "delayed":
            continue  # a quantizer whose scale is given makes no QuantizedTensor
        for role in ("input", "weight", "grad_output", "weight_for_grad_input", "input_for_grad_weight"):
            quantizer = getattr(recipe, role)
            if quantizer is not None and quantizer not in found.values():
                found[f"{name}.{role}"] = quantizer
    current = f8.CurrentScaling(format="e5m2", block=(1, -1), scale="pow2", eps=1e-6)
    return found | {"e5m2 pow2 eps": current, "stochastic": replace(current, rounding="stochastic", seed=3)}


def alone(weight, own):
    """A quantized tensor of one set of codes of a weight."""
    return QuantizedTensor.of_sets([own], weight.dtype, batch=weight.batch)


def parts_of(weight):
    """What a quantized tensor is made of and stands for, by name: of each of its sets of codes."""
    return {
        f"{index}.{name}": part
        for index, own in enumerate(weight.sets())
        for name, part in (
            ("codes", own.codes),
            ("scale", own.scale),
            ("outer_scale", own.outer_scale),
            ("values", alone(weight, own).dequantize()),
        )
        if part is not None
    }


def digest(tensor):
    """The first 64 bits of the SHA-256 of a tensor's dtype, shape and bytes."""
    tensor = tensor.detach().contiguous()
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
    found.update(bytes(tensor.flatten().view(torch.uint8).tolist()))
    return found.hexdigest()[:16]


def digests(tensors):
    """`digest` of each tensor, by name."""
    return {name: digest(tensor) for name, tensor in sorted(tensors.items())}


def digests_of_model(model):
    """Digests of a model's state, and of what its quantized parameters stand for."""
    found = digests(dict(model.state_dict()))
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "sets"):
            found |= {f"{name}:{key}": value for key, value in digests(parts_of(parameter)).items()}
    return found


def digests_of_parameter(parameter):
    """Digests of a quantized tensor's parts, and of the values that its codes were made of, if they are kept."""
    initial = getattr(parameter, "initial", None)
    return digests(parts_of(parameter) | ({} if initial is None else {"initial": initial}))


def attributes_of(tensor):
    """What else a file has of a quantized tensor, beside its quantizer."""
    extent = getattr(tensor, "extent", None) if len(tensor.sets()) == 1 else None  # of two sets, files have none
    kept = extent, getattr(tensor, "written", None)
    return [str(tensor.dtype), tensor.requires_grad, isinstance(tensor, nn.Parameter), *kept]


def flat(value, key=""):
    """Tensors of nested dicts and lists, by their path."""
    if isinstance(value, torch.Tensor):
        return {key: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {path: tensor for name, each in items for path, tensor in flat(each, f"{key}.{name}").items()}
