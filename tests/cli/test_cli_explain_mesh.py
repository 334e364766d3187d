"""`fp8compile explain --mesh`: one rank of a mesh that is not there."""

from __future__ import annotations

import json

import pytest
import torch
from commands import started

from fp8compile._compat import TORCH_VERSION

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"FSDP in the graph of experts needs PyTorch 2.12, this is {torch.__version__}"
)
TARGET = """
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
import fp8compile as f8

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 32, 64, 96, 8, 2


def block(mesh, recipe, capacity=64):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=WIDTH, moe_intermediate_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=TOP_K
    )
    with torch.device("meta"):
        model = Qwen3MoeSparseMoeBlock(config).bfloat16()
    f8.convert(model, f8.Recipe() if recipe is None else recipe)
    parallelize_module(model, mesh["ep"], {"experts": f8.parallel.ExpertParallel(capacity=capacity)})
    f8.parallel.graph_fsdp(model, mesh["fsdp"])
    model.to_empty(device="cpu")
    return model, torch.empty(1, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def sizes_are_data(mesh):
    return block(mesh, f8.recipes.rowwise(), capacity=None)


def unconverted(mesh):
    model = nn.Sequential(nn.Linear(64, 96, bias=False)).bfloat16()
    return parallelize_module(model, mesh, {"0": ColwiseParallel()}), torch.zeros(32, 64).bfloat16()


def patched(mesh):
    model = f8.convert(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).bfloat16(), f8.recipes.rowwise())
    model[1].forward = lambda x: nn.functional.linear(x, model[1].weight)
    return model, torch.zeros(32, 64, requires_grad=True).bfloat16()


def rows_apart(mesh, recipe):
    model = nn.Sequential(nn.Linear(64, 128, bias=False)).bfloat16()
    model = f8.convert(model, f8.Recipe() if recipe is None else recipe)
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    return model, torch.zeros(32, 64, dtype=torch.bfloat16, requires_grad=True)


def nothing():
    return None


table = {"not": "a function"}
"""


IN_CODES = {
    "rowwise": ("rowwise", "h200", "aten::_scaled_mm", 8),
    "nvfp4": ("nvfp4", "b200", "fp8compile::nvfp4_mm", 4),
}


def explained(tmp_path, name, *flags):
    """Exit code and what was printed."""
    file, printed = tmp_path / "target.py", tmp_path / "printed"
    file.write_text(TARGET)
    process = started(["explain", f"{file}:{name}", *flags], printed)
    process.join(200)
    return process.exitcode, printed.read_text()


def test_a_rank_sends_codes_of_rows_and_of_weights(tmp_path):
    code, printed = explained(tmp_path, "block", "--mesh", "fsdp=2,ep=4", "--recipe", "rowwise", "--json")
    assert code == 0, printed
    found = json.loads(printed.splitlines()[-1])
    fp8, plain = found["rowwise"], found["without FP8"]
    assert (fp8["graphs"], plain["graphs"]) == (2, 2)
    assert (fp8["fp8"], fp8["expected_fp8"], plain["fp8"]) == (6, 6, 0)
    sent = {}
    for name, each in (("fp8", fp8), ("plain", plain)):
        for message in each["messages"]:
            key = name, message["op"], message["dtype"], message["ranks"]
            sent[key] = sent.get(key, 0) + message["bytes"]
    # of two matrices of 2 experts (8 over 4 ranks), 3 * 96 * 64 elements each; half of them comes from the other rank
    elements = 2 * 3 * 96 * 64
    assert sent["fp8", "all_gather_into_tensor", "uint8", 2] == 2 * elements // 2  # each pass, a byte each
    router = 8 * 64 * 2
    assert sent["fp8", "all_gather_into_tensor", "bfloat16", 2] == router
    assert sent["plain", "all_gather_into_tensor", "bfloat16", 2] == 2 * 2 * elements // 2 + router
    # places for 64 rows to each of 4 ranks; three quarters leave; a scale of 4 bytes beside 64 codes
    rows = 64 * 3
    assert sent["fp8", "all_to_all_single", "uint8", 4] == 2 * rows * (64 + 4)
    assert sent["plain", "all_to_all_single", "bfloat16", 4] == 4 * rows * 64 * 2


@pytest.mark.parametrize(("recipe", "gpu", "op", "bits"), IN_CODES.values(), ids=IN_CODES)
def test_products_of_a_dense_layer_over_ranks_are_counted_by_what_they_multiply(recipe, gpu, op, bits, tmp_path):
    code, printed = explained(tmp_path, "rows_apart", "--mesh", "tp=2", "--recipe", recipe, "--gpu", gpu, "--json")
    assert code == 0, printed
    found = json.loads(printed.splitlines()[-1])
    products, plain = found[recipe]["products"], found["without FP8"]["products"]
    assert [(each["op"], each["code_bits"]) for each in products] == [(op, bits)] * 3
    assert [each["flops"] for each in products] == [each["flops"] for each in plain] == [2 * 32 * 64 * 64] * 3


def test_the_terminal_shows_both_columns(tmp_path):
    code, printed = explained(tmp_path, "block", "--mesh", "fsdp=2,ep=4", "--recipe", "rowwise")
    assert code == 0, printed
    assert "one rank of fsdp 2 x ep 4" in printed
    assert "without FP8" in printed
    assert "all_to_all_single" in printed


REFUSED = {
    "a size that is data": ("sizes_are_data", ["--mesh", "fsdp=2,ep=4"], 2, "Set a capacity for experts"),
    "no FP8": ("unconverted", ["--mesh", "tp=2"], 1, "no GEMM runs in FP8"),
    "a layer that fell back": ("patched", ["--mesh", "tp=2"], 1, "1: output fell back to bfloat16"),
    "no name": ("block", ["--mesh", "8"], 2, "such as --mesh fsdp=8,ep=8."),
    "a name twice": ("block", ["--mesh", "ep=2,ep=2"], 2, "NAME=SIZE with different names"),
    "one rank": ("block", ["--mesh", "ep=1"], 2, "2 ranks"),
    "no recipe": ("block", ["--mesh", "fsdp=2,ep=4"], 2, "requires a recipe. Add --recipe"),
    "a recipe too many": (
        "unconverted",
        ["--mesh", "tp=2", "--recipe", "rowwise"],
        2,
        "has no parameter for a recipe",
    ),
    "no argument": ("nothing", ["--mesh", "tp=2"], 2, "has 0 parameters"),
    "no function": ("table", ["--mesh", "tp=2"], 2, "is a dict"),
    "another flag": ("block", ["--mesh", "tp=2", "--tp", "2"], 2, "--mesh can't be combined with --tp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_answer_is_never_green(tmp_path, case):
    name, flags, expected, words = REFUSED[case]
    code, printed = explained(tmp_path, name, *flags, "--json")
    assert code == expected, printed
    assert words in printed
