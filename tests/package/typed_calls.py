"""Calls of the public API, with the types that a checker has to give them; `make lint` has mypy look, nothing runs."""

from __future__ import annotations

from typing import assert_type

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh

import fp8compile as f8
from fp8compile import ops, parallel


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)


def a_model_stays_what_it_is(net: Net, mesh: DeviceMesh) -> None:
    assert_type(f8.convert(net, f8.recipes.rowwise()), Net)
    assert_type(f8.convert(net, {"layer": f8.recipes.mxfp8()}).layer, nn.Linear)
    assert_type(f8.revert(net), Net)
    assert_type(f8.compile(net), Net)
    assert_type(parallel.graph_fsdp(net, mesh), Net)
    assert_type(parallel.fsdp_float8_all_gather(net), Net)


def quantizers_and_recipes_are_values() -> None:
    quantizer = f8.CurrentScaling(format="e5m2", block=(1, -1))
    assert_type(quantizer.transposed(), f8.CurrentScaling)
    assert_type(quantizer.block, tuple[int, int])
    assert_type(f8.recipes.nvfp4(seed=1), f8.Recipe)
    f8.CurrentScaling(format=4)  # type: ignore[arg-type]
    f8.recipes.rowwise(scal="pow2")  # type: ignore[call-arg]


def views_of_codes_are_codes(x: Tensor) -> None:
    codes = f8.quantize(x, f8.CurrentScaling())
    assert_type(codes, f8.QuantizedTensor)
    assert_type(codes.t(), f8.QuantizedTensor)
    assert_type(codes.dequantize(), Tensor)
    assert_type(f8.scaled_mm(codes, codes.t(), out_dtype=torch.bfloat16), Tensor)
    f8.scaled_mm(x, codes, out_dtype=torch.bfloat16)  # type: ignore[arg-type]


def a_layer_gives_a_tensor(x: Tensor, weight: Tensor) -> None:
    assert_type(f8.linear(x, weight, recipe=f8.recipes.rowwise()), Tensor)
    assert_type(ops.cast, OpOverload)
