"""Which recipe runs where: GPU x recipe, and recipe x placement x PyTorch, asked of the code.

    python -m benchmarks.support --python PYTHON_OF_211 --python PYTHON_OF_215

writes docs/results/support.md. For GPUs it asks the tables of GEMMs (`fp8compile.ops.gemms`), which need no GPU; a
placement is tried on one rank of a CPU, forward and backward. Each other Python tries the placements on its own
PyTorch. `tests/package/test_support.py` compares the page with what the PyTorch of the tests answers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import fp8compile as f8
from fp8compile.ops.gemms.gpu_support import AMD_NAMES, GPU_NAMES, PRODUCTS, Gate, gates_of
from fp8compile.target import Build, Target, pretend_target
from fp8compile.testing.explain.recipe_support import recipe_support
from fp8compile.testing.gpu.gpus import GPUS as GPUS_KNOWN

__all__ = ["BUILDS", "GPUS", "PLACES", "RECIPES", "TRIED", "build_section", "gpu_section", "main", "placement_section"]

PAGE = Path(__file__).parents[1] / "docs" / "results" / "support.md"
TRIED = ("2.11", "2.13", "2.15")
AMD = {"mi300x": "MI300X", "mi355x": "MI355X", "rx9070": "RX 9070"}
GPUS = {
    "8.0 (A100)": Target("cuda", (8, 0)),
    **{f"{major}.{minor} ({name})": Target("cuda", (major, minor)) for (major, minor), name in GPU_NAMES.items()},
    **{f"{GPUS_KNOWN[name].gcnArchName} ({card})": GPUS_KNOWN[name].target for name, card in AMD.items()},
}
BUILDS = {
    "2.11, CUDA 12.6": Build((2, 11), (12, 6)),
    "2.11, CUDA 13.0": Build((2, 11), (13, 0)),
    "2.13, CUDA 12.6": Build((2, 13), (12, 6)),
    "2.13, CUDA 13.0": Build((2, 13), (13, 0)),
    "2.13, CUDA 13.0, Windows": Build((2, 13), (13, 0), is_windows=True),
    "2.15, CUDA 13.0": Build((2, 15), (13, 0)),
    "2.15, CUDA 13.0, without MSLK": Build((2, 15), (13, 0), has_mslk=False),
    "2.13, ROCm 7.0": Build((2, 13), None, rocm=(7, 0)),
}
RECIPES = {
    "tensorwise": f8.recipes.tensorwise(),
    "tensorwise, gradients e4m3": f8.recipes.tensorwise(grad_format="e4m3"),
    "rowwise": f8.recipes.rowwise(),
    "rowwise_bf16_wgrad": f8.recipes.rowwise_bf16_wgrad(),
    "blockwise": f8.recipes.blockwise(),
    "blockwise_bf16_wgrad": f8.recipes.blockwise_bf16_wgrad(),
    "mxfp8": f8.recipes.mxfp8(),
    "nvfp4": f8.recipes.nvfp4(),
    "delayed": f8.recipes.delayed(),
}
OPTIONS = {  # for the tables of GPUs alone: each placement treats them as the recipes above
    "blockwise, powers of two": f8.recipes.blockwise(scale="pow2"),
    "rowwise, `by_mx=True`": f8.recipes.rowwise(by_mx=True),
}
HEAD = """# Support matrix

Written by `python -m benchmarks.support`, from the tables of GEMMs and by trying each placement on
one rank. A GPU's column shows what the code selects for it; [an H200](h200.md) ran its column."""
GEMMS_OF = """- A word names the kernel of all three GEMMs of a layer; several words are those of output,
  grad_input and grad_weight, where `-` is a GEMM that the recipe leaves in bf16.
- *no (n)*: the GEMM raises an error, for the reason n. With `emulate=True`, a linear layer is
  emulated in float64, which is correct but slow."""
TRIALS = """- *yes*: forward and backward run. Under FSDP2 the cell says what is gathered.
- *no (n)*: an error is raised, for the reason n.

On PyTorch 2.11, tests cover a single process. Several ranks are supported from 2.13 on."""


# ---------------------------------------------------------------------------------- GPU x recipe


class Notes:
    """Reasons, numbered in the order in which they are first given."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def no(self, reason: str) -> str:
        """A cell that points to a reason."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return f"no ({self.reasons.index(reason) + 1})"

    def lines(self) -> list[str]:
        """The reasons, for below a table."""
        return [f"{number}. {reason}" for number, reason in enumerate(self.reasons, 1)]


def _reason(text: str) -> str:
    """What an error says, without the operands, layers and versions that it names."""
    text = re.sub(r"^convert: .*experts do not support this recipe: (.*?)\)\. See .*$", r"\1", text)
    text = re.sub(r", this is \d[^ ]*\. ", ". ", text)
    text = re.sub(r"^.*? by .*? with block \([^)]*\) ", "", text)
    text = re.sub(r"(this GPU supports(?: for experts)?) \(.*?\), or ", r"\1, or ", text)
    return re.sub(r" This (GPU has compute capability|is (gfx\w+, )?ROCm) [\d.]+$", "", text).strip()


def _cell(recipe: f8.Recipe, target: Target, notes: Notes, *, grouped: bool) -> str:
    with pretend_target(target):
        found = recipe_support(recipe, torch.device("cpu"), grouped=grouped)
    lacking = [gemm for gemm in found if gemm.kind == "none"]
    if lacking:
        return notes.no(_reason(lacking[0].detail))
    kinds = ["-" if gemm.kind == "high_precision" else gemm.kind for gemm in found]
    return kinds[0] if len(set(kinds)) == 1 else ", ".join(kinds)


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (heads, ["---"] * len(heads), *rows)]


def gpu_section(title: str, *, grouped: bool) -> str:
    """The table of GPUs, for linear layers or for experts."""
    notes = Notes()
    rows = [
        [f"`{name}`" if "," not in name else name]
        + [_cell(recipe, target, notes, grouped=grouped) for target in GPUS.values()]
        for name, recipe in (RECIPES | OPTIONS).items()
    ]
    return "\n".join([f"## {title}", "", *_table(["recipe", *GPUS], rows), "", *notes.lines()])


# ---------------------------------------------------------------------------------- product x build of PyTorch

BUILT = """## GEMMs, by the build of PyTorch

The compute capabilities that support each GEMM. The result may be bf16, fp16 or fp32 unless a cell
says otherwise. The table comes from `fp8compile/ops/gemms/gpu_support.py`, which names its sources.
If a GPU does not support `rowwise`, rowwise recipes use the tensorwise GEMM and apply the scales
after it."""
DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def _running(product: str, build: Build) -> str:
    """The capabilities that run a product, or AMD's names, those with the same dtypes together."""
    of_dtypes: dict[str, list[str]] = {}
    targets = {f"{major}.{minor}": Target("cuda", (major, minor), None, build) for major, minor in GPU_NAMES}
    if build.rocm is not None:
        targets = {gcn: Target("cuda", (9, 0), "7.0", build, gcn) for gcn in AMD_NAMES}
    for name, target in targets.items():
        gates: tuple[Gate, ...] = gates_of(product, target)
        dtypes = [short for dtype, short in DTYPES.items() if any(dtype in gate.out_dtypes for gate in gates)]
        if dtypes:
            of_dtypes.setdefault(", ".join(dtypes), []).append(name)
    every = ", ".join(DTYPES.values())
    return "; ".join(
        _between(where) + ("" if dtypes == every else f" ({dtypes} only)") for dtypes, where in of_dtypes.items()
    ) or "-"  # fmt: skip


def _between(capabilities: list[str]) -> str:
    """Capabilities as a reader names them: all of them, those from one on, or each."""
    known = [f"{major}.{minor}" for major, minor in GPU_NAMES]
    if len(capabilities) > 2 and capabilities[0] in known and capabilities == known[known.index(capabilities[0]) :]:
        return f"{capabilities[0]} to {capabilities[-1]}"
    return ", ".join(capabilities)


def build_section() -> str:
    """The table of products and builds of PyTorch."""
    rows = [[f"{product}", *(_running(product, build) for build in BUILDS.values())] for product in PRODUCTS]
    return "\n".join([BUILT, "", *_table(["GEMM", *BUILDS], rows)])


# ---------------------------------------------------------------------------------- recipe x placement


class _Experts(nn.Module):
    """Experts that `f8.library.register_experts` knows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 32) / 6)

    def multiply(self, rows: Tensor, ends: Tensor) -> Tensor:
        return nn.functional.grouped_mm(rows, self.up.transpose(-2, -1), offs=ends)

    def forward(self, rows: Tensor) -> Tensor:
        return self.multiply(rows, torch.tensor([8, 8, 16, 32], dtype=torch.int32))


def _multiplied(self: nn.Module, rows: Tensor, ends: Tensor) -> Tensor:
    return f8.grouped_linear(rows, self.up, ends, recipe=self.recipe)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def _linears(recipe: f8.Recipe, **options: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)).bfloat16()
    return f8.convert(model, recipe, filter=lambda *_: True, strict=True, **options)


def _experts(recipe: f8.Recipe, **options: bool) -> nn.Module:
    return f8.convert(nn.Sequential(_Experts()).bfloat16(), recipe, filter=lambda *_: True, strict=True, **options)


def _trained(model: nn.Module, features: int, *shape: int) -> str:
    model(torch.randn(*shape, features, dtype=torch.bfloat16, requires_grad=True)).float().square().mean().backward()
    return "yes"


def _one_process(recipe: f8.Recipe) -> str:
    return _trained(_linears(recipe), 64, 32)


def _grouped(recipe: f8.Recipe) -> str:
    return _trained(_experts(recipe), 32, 32)


def _styles(recipe: f8.Recipe) -> str:
    plan = {
        "0": f8.parallel.ColwiseParallel(input_layouts=Shard(1)),
        "1": f8.parallel.RowwiseParallel(output_layouts=Shard(1)),
    }
    return _trained(parallelize_module(_linears(recipe), _mesh(), plan), 64, 2, 32)


def _functions(recipe: f8.Recipe) -> str:
    x, weight = torch.randn(32, 64).bfloat16().requires_grad_(), torch.randn(128, 64).bfloat16().requires_grad_()
    f8.parallel.column_parallel_linear(x, weight, recipe=recipe, group=dist.group.WORLD).float().sum().backward()
    return "yes"


def _expert_parallel(recipe: f8.Recipe) -> str:
    x, weight = torch.randn(32, 32).bfloat16().requires_grad_(), torch.randn(4, 64, 32).bfloat16().requires_grad_()
    routes = f8.parallel.expert_routes(torch.tensor([8, 0, 8, 16]), group=dist.group.WORLD)
    grouped = routes.dispatch(x, recipe=recipe)
    y = f8.grouped_linear(grouped, weight, routes.offsets, recipe=recipe)
    routes.combine(y, 32, recipe=recipe).float().sum().backward()
    return "yes"


def _fully_sharded(model: nn.Module) -> None:
    for each in (*model, model):  # the root keeps its weights after the forward
        fully_shard(each, mesh=_mesh())


def _sharded(model: nn.Module, features: int) -> str:
    f8.parallel.fsdp_float8_all_gather(model)
    _fully_sharded(model)
    _trained(model, features, 32)
    gathered = {row.gathered.split(":")[0] for row in f8.conversion_report(model).rows if row.converted}
    return ", ".join(sorted(gathered))


def _fsdp2(recipe: f8.Recipe) -> str:
    return _sharded(_linears(recipe), 64)


def _fsdp2_experts(recipe: f8.Recipe) -> str:
    return _sharded(_experts(recipe), 32)


def _in_graph(recipe: f8.Recipe) -> str:
    return _trained(f8.parallel.graph_fsdp(_linears(recipe), _mesh()), 64, 32)


def _in_graph_experts(recipe: f8.Recipe) -> str:
    return _trained(f8.parallel.graph_fsdp(_experts(recipe), _mesh()), 32, 32)


def _parameters(recipe: f8.Recipe) -> str:
    model = _linears(recipe, weight_lifetime="parameter")
    optimizer = f8.MasterWeights(torch.optim.AdamW, model.parameters(), lr=1e-3)
    _trained(model, 64, 32)
    optimizer.step()
    return "yes"


def _parameters_of_experts(recipe: f8.Recipe) -> str:
    return _trained(_experts(recipe, weight_lifetime="parameter"), 32, 32)


def _parameters_sharded(recipe: f8.Recipe) -> str:
    model = _linears(recipe, weight_lifetime="parameter")
    _fully_sharded(model)
    return _trained(model, 64, 32)


PLACES: dict[str, Callable[[f8.Recipe], str]] = {
    "a layer in one process": _one_process,
    "experts": _grouped,
    "tensor and sequence parallel: styles": _styles,
    "tensor and sequence parallel: functions": _functions,
    "expert parallel": _expert_parallel,
    "FSDP2, `fsdp_float8_all_gather`": _fsdp2,
    "experts under it": _fsdp2_experts,
    "FSDP in the graph": _in_graph,
    "experts in it": _in_graph_experts,
    "FP8 parameters": _parameters,
    "experts with FP8 parameters": _parameters_of_experts,
    "FP8 parameters, under FSDP2": _parameters_sharded,
}


def _tried(place: str, recipe: f8.Recipe, notes: Notes) -> str:
    torch.manual_seed(0)
    try:
        return PLACES[place](recipe)
    except (RuntimeError, TypeError, ValueError) as error:
        return notes.no(_reason(" ".join(str(error).split())))


def placement_section() -> str:
    """The table of placements on the PyTorch that runs this."""
    f8.library.register_experts(_Experts, method="multiply", replacement=_multiplied)
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    notes = Notes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rows = [[place, *(_tried(place, recipe, notes) for recipe in RECIPES.values())] for place in PLACES]
        cpu = ["a CPU multiplies"]
        for recipe in RECIPES.values():
            kinds = {gemm.kind for gemm in recipe_support(recipe, torch.device("cpu"))} - {"high_precision"}
            cpu.append("emulated" if "emulated" in kinds else "natively")
    if made:
        dist.destroy_process_group()
    version = ".".join(torch.__version__.split(".")[:2])
    table = _table([f"PyTorch {version}", *RECIPES], [*rows, cpu])
    return "\n".join([f"## Placements, PyTorch {version}", "", *table, "", *notes.lines()])


# ---------------------------------------------------------------------------------- the page


def main(argv: list[str] | None = None) -> int:
    """Write the page, or print the placements of this PyTorch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="a Python with another PyTorch; may be repeated")
    parser.add_argument("--placements", action="store_true", help="print the placements of this PyTorch alone")
    arguments = parser.parse_args(argv)
    if arguments.placements:
        print(placement_section())
        return 0
    command, root = ["-m", "benchmarks.support", "--placements"], str(PAGE.parents[2])
    sections = [placement_section()]
    for python in arguments.python:
        environment = os.environ | {"PYTHONPATH": root}
        shown = subprocess.check_output([python, *command], cwd=root, env=environment, text=True)
        sections.append(shown.strip())
    linear, experts = gpu_section("Linear layers", grouped=False), gpu_section("Experts", grouped=True)
    PAGE.write_text("\n\n".join([HEAD, GEMMS_OF, linear, experts, build_section(), TRIALS, *sorted(sections)]) + "\n")
    print(f"wrote {PAGE.relative_to(PAGE.parents[2])}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
