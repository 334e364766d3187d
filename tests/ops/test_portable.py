"""Exported programs: taken apart they have none of our operators, and give their bits where this package is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.ops.registry import OPS
from fp8compile.testing.bits import difference, results
from fp8compile.testing.samples import samples_of

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec.*")  # torch.export uses what PyTorch deprecates

FEW = ("tensorwise", "rowwise", "mxfp8", "nvfp4")
OTHERS = tuple(name for name in f8.recipes.names() if name not in FEW)
MODULES = ("tensorwise", "nvfp4")  # of which a module of experts is exported too: two products and their routing
LOAD = """
import sys, torch
loaded = 0
for path in sys.argv[1:]:
    given, expected = torch.load(path + ".tensors")
    with torch.no_grad():
        found = torch.export.load(path).module()(*given)
    assert found.dtype == expected.dtype and torch.equal(found.isnan(), expected.isnan()), path
    assert torch.equal(found.nan_to_num(), expected.nan_to_num()), path
    loaded += 1
assert "fp8compile" not in sys.modules
print(loaded)
"""


class Groups(nn.Module):
    """A grouped layer."""

    def __init__(self, recipe, *, check_in_graph=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 40, 48).bfloat16())
        self.recipe, self.check = recipe, check_in_graph

    def forward(self, x, offsets):
        return f8.grouped_linear(x, self.weight, offsets, recipe=self.recipe, check_in_graph=self.check)


def experts_of_transformers(recipe):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=48, num_experts=4, num_experts_per_tok=2)
    model = nn.Sequential()
    model.experts = Qwen3MoeExperts(config)
    for each in model.parameters():
        nn.init.normal_(each, std=0.1)
    return f8.convert(model.bfloat16(), recipe, filter=lambda *_: True).experts


def programs(recipes):
    """Modules and what they are given, by name: linears and experts of these ready recipes."""
    torch.manual_seed(0)
    x, offsets = torch.randn(10, 48).bfloat16(), torch.tensor([3, 3, 9], dtype=torch.int32)
    x[9] = torch.nan  # behind the last group
    tokens = torch.randn(7, 32).bfloat16(), torch.randint(4, (7, 2)), torch.rand(7, 2).bfloat16()
    found = {}
    for name in recipes:
        recipe = f8.recipes.by_name(name)
        found[f"linear {name}"] = f8.Linear(48, 40, recipe=recipe, dtype=torch.bfloat16), (x[:9],)
        if not recipe.history():
            found[f"groups {name}"] = Groups(recipe, check_in_graph=name == "rowwise"), (x, offsets)
        if name in MODULES:
            found[f"experts {name}"] = experts_of_transformers(recipe), tokens
    found["groups in high precision"] = Groups(f8.Recipe()), (x, offsets)
    return found


def taken_apart(module, given, **options):
    with torch.no_grad():
        return torch.export.export(module, given, **options).run_decompositions(f8.ops.decompositions())


@pytest.mark.parametrize("recipes", [FEW, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["few", "others"])
def test_what_is_saved_loads_without_this_package_to_the_same_bits(tmp_path, recipes):
    paths = []
    for name, (module, given) in programs(recipes).items():
        program = taken_apart(module, given)
        ours = [str(node.target) for node in program.graph.nodes if "fp8compile" in str(node.target)]
        assert ours == [], name
        paths.append(str(tmp_path / f"{name}.pt2"))
        torch.export.save(program, paths[-1])
        with torch.no_grad():
            torch.save((given, module(*given)), f"{paths[-1]}.tensors")
    command = [sys.executable, "-c", LOAD, *paths]
    alone = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    finished = subprocess.run(command, cwd=tmp_path, env=alone, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert int(finished.stdout) == len(paths) >= 2 * len(recipes)


def test_a_program_takes_any_number_of_rows_and_any_groups():
    module = Groups(f8.recipes.tensorwise(), check_in_graph=True)
    x, offsets = torch.randn(12, 48).bfloat16(), torch.tensor([4, 4, 12], dtype=torch.int32)
    shapes = {"x": {0: torch.export.Dim("rows", min=2)}, "offsets": None}
    program = taken_apart(module, (x, offsets), dynamic_shapes=shapes).module()
    with torch.no_grad():
        for rows, ends in ((12, (4, 4, 12)), (5, (0, 5, 5)), (30, (1, 2, 3))):
            given = torch.randn(rows, 48).bfloat16(), torch.tensor(ends, dtype=torch.int32)
            assert difference(program(*given), module(*given)) is None
        with pytest.raises(RuntimeError, match="offsets must be the end of each group"):
            program(x, torch.tensor([4, 3, 12], dtype=torch.int32))


def refusal(op, given):
    """Why an op can't be taken apart for these arguments, or None."""
    try:
        op.portable(*given)
    except RuntimeError as error:
        return str(error).partition("can't be decomposed: ")[2]
    return None


WITH_PORTABLE = sorted(name for name, op in OPS.items() if callable(op.portable))


@pytest.mark.parametrize("name", WITH_PORTABLE)
def test_what_stands_in_the_place_of_an_op_has_its_bits(name):
    op, compared = OPS[name], 0
    for given in samples_of(op)():
        if refusal(op, given) is not None:
            continue
        found, expected = (each(*given) for each in (op.portable, op.impl))
        found, expected = results(found), results(expected)
        if name == "fp8compile::grouped_mm" and found[0].dtype == torch.float32:
            # a group of one row is a product of a matrix and a vector, which sums 24 products in another order
            a, b, offsets, _ = given
            bound = op.impl(a.nan_to_num().abs(), b.abs(), offsets, _) * 24 * 2.0**-24
            assert ((found[0] - expected[0]).abs() <= bound).all()
        else:
            assert [difference(a, b) for a, b in zip(found, expected, strict=True)] == [None] * len(expected), given
        compared += 1
    assert compared


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("group_cast", "it is part of a backward"),
        ("group_sum", "it is part of a backward"),
        ("group_quantize_rows", ". Export the model on a CPU"),
        ("exchange_rows", "rows sent between ranks"),
    ],
)
def test_what_cannot_leave_this_package_says_so(name, words):
    op = OPS[f"fp8compile::{name}"]
    with pytest.raises(RuntimeError, match=f"fp8compile::{name} can't be decomposed") as error:
        f8.ops.decompositions()[op.overload](*next(samples_of(op)()))
    assert words in str(error.value)


class Sent(nn.Module):
    """Rows that go to the ranks of their experts, of a group of one."""

    def forward(self, rows, counts):
        sizes = torch.stack((counts.sum(1), counts.sum(1)))
        return torch.ops.fp8compile.dispatch(rows, counts, counts, sizes, 12, "input", f8.Recipe(), "")


def test_a_program_that_cannot_leave_is_refused():
    given = torch.randn(12, 24).bfloat16(), torch.tensor([[5, 0, 7]])
    with pytest.raises(RuntimeError, match="exchange_rows can't be decomposed"):
        taken_apart(Sent(), given)
