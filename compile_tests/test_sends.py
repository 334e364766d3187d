"""What `fp8compile.testing.sends` says of each layer, against the messages in the graphs and against the table."""

from __future__ import annotations

import pytest
import torch
from test_tensor_parallel_graphs import BATCH, DIM, HIDDEN, SEQUENCE, Block, local_input, mesh_of, model_of, report_of
from test_tensor_parallel_graphs import elsewhere as _elsewhere

import fp8compile as f8
from fp8compile.testing import sends

elsewhere = _elsewhere
RANKS = (4,)
WHOLE = BATCH * SEQUENCE * DIM


def rows_of(recipe):
    mesh = mesh_of(RANKS)
    return sends(model_of(recipe, mesh), local_input(mesh)).rows


def stock_rows(input_layout, output_layout):
    """Of PyTorch's own styles, which move tensors before and behind the layers."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    layouts = {"tokens": Shard(1), "everywhere": Replicate()}
    mesh = mesh_of(RANKS)
    model = f8.convert(
        torch.nn.Sequential(torch.nn.Linear(DIM, HIDDEN), torch.nn.Linear(HIDDEN, DIM)).bfloat16(), PAIR
    )
    up = parallel.ColwiseParallel(input_layouts=layouts[input_layout])
    down = parallel.RowwiseParallel(output_layouts=layouts[output_layout])
    parallel.parallelize_module(model, mesh, {"0": up, "1": down})
    length = SEQUENCE // 4 if input_layout == "tokens" else SEQUENCE
    return sends(model, torch.randn(BATCH, length, DIM, dtype=torch.bfloat16, requires_grad=True)).rows


PAIR = f8.recipes.mxfp8()  # no block of it spans ranks: no amax among the messages


def short(rows):
    return [(row.layer, row.gemm, row.what, row.op, row.dtype, row.bytes, row.backward, row.times) for row in rows]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_bf16_wgrad", "blockwise", "mxfp8"])
def test_the_messages_are_those_of_the_graphs(elsewhere, recipe):
    """As a set: compiled code sends once what several layers send alike, and keeps codes for the backward."""
    in_graphs = {
        (c.op.split(".")[1].removesuffix("_into_tensor").removesuffix("_tensor"), c.dtype, c.bytes)
        for c in elsewhere(report_of, recipe, RANKS).collectives
    }
    assert {(row.op.split()[0], row.dtype, row.bytes) for row in elsewhere(rows_of, recipe)} == in_graphs


def test_codes_of_the_input_and_of_grad_output_are_gathered(elsewhere):
    rows = short(elsewhere(rows_of, "mxfp8"))
    scales = WHOLE // 32
    for layer in ("gate", "up"):
        assert [row for row in rows if row[0] == layer] == [
            (layer, "output", "quantized data of input", "all_gather", "uint8", WHOLE, False, 1),
            (layer, "output", "scales of input", "all_gather", "uint8", scales, False, 1),
            (layer, "grad_weight", "quantized data of input", "all_gather", "uint8", WHOLE, True, 1),
            (layer, "grad_weight", "scales of input", "all_gather", "uint8", scales, True, 1),
        ]
    assert [row for row in rows if row[0] == "down"] == [
        ("down", "plan", "output", "reduce_scatter sum", "bfloat16", 2 * WHOLE, False, 1),
        ("down", "grad_input", "quantized data of grad_output", "all_gather", "uint8", WHOLE, True, 1),
        ("down", "grad_input", "scales of grad_output", "all_gather", "uint8", scales, True, 1),
        ("down", "grad_weight", "quantized data of grad_output", "all_gather", "uint8", WHOLE, True, 1),
        ("down", "grad_weight", "scales of grad_output", "all_gather", "uint8", scales, True, 1),
    ]


def test_a_product_in_high_precision_gathers_its_operands_dtype(elsewhere):
    rows = short(elsewhere(rows_of, "rowwise_bf16_wgrad"))
    assert ("gate", "grad_weight", "input", "all_gather", "bfloat16", 2 * WHOLE, True, 1) in rows
    assert ("down", "grad_weight", "grad_output", "all_gather", "bfloat16", 2 * WHOLE, True, 1) in rows


def test_stock_styles_move_the_tensors_in_their_own_dtype(elsewhere):
    assert short(elsewhere(stock_rows, "tokens", "tokens")) == [
        ("0", "plan", "input", "all_gather", "bfloat16", 2 * WHOLE, False, 1),
        ("1", "plan", "output", "reduce_scatter sum", "bfloat16", 2 * WHOLE, False, 1),
        ("1", "plan", "grad_output", "all_gather", "bfloat16", 2 * WHOLE, True, 1),
        ("0", "plan", "grad_input", "reduce_scatter sum", "bfloat16", 2 * WHOLE, True, 1),
    ]
    assert short(elsewhere(stock_rows, "everywhere", "everywhere")) == [
        ("1", "plan", "output", "all_reduce sum", "bfloat16", 2 * WHOLE, False, 1),
        ("0", "plan", "grad_input", "all_reduce sum", "bfloat16", 2 * WHOLE, True, 1),
    ]


def test_what_sends_nothing_or_is_no_model_is_refused():
    with pytest.raises(TypeError, match="`model` is a int"):
        sends(3)
    model = f8.convert(Block().bfloat16(), f8.recipes.rowwise())
    with pytest.raises(ValueError, match=r"no fp8compile\.Linear .*parallelize_module"):
        sends(model, torch.randn(2, DIM, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"no fp8compile\.Linear .*parallelize_module"):
        sends(torch.compile(model), torch.randn(2, DIM, dtype=torch.bfloat16))
