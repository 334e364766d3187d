"""Compile caches on disk: a fresh process hits them, and a changed rule misses them.

Every program here runs in a process of its own, most with a copy of the package that the test may edit, and with a
cache folder that the processes of one test share.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import fake_rank

import fp8compile as f8
from benchmarks.compile_time import compile_once

PACKAGE = Path(f8.__file__).parent

STEP = """
import json, torch, fp8compile as f8
from torch._dynamo.utils import counters
from mine import Mine

x = torch.linspace(-3, 3, 4 * 32).view(4, 32).to(torch.bfloat16).requires_grad_()
weight = torch.linspace(-1, 1, 16 * 32).view(16, 32).to(torch.bfloat16).requires_grad_()
recipe = f8.recipes.tensorwise()

def forward(x, weight):
    return f8.linear(x.relu(), weight, recipe=recipe)

def digest(*tensors):
    return [t.detach().view(torch.int16).long().sum().item() for t in tensors]

def step(fn):
    y = fn(x, weight)
    return digest(y, *torch.autograd.grad(y.float().square().sum(), (x, weight)))

def counted(fn):
    counters.clear()
    out = fn()
    return out, {k: v for group in ("aot_autograd", "inductor") for k, v in counters[group].items() if "cache" in k}

linear, linear_counters = counted(lambda: step(torch.compile(forward, fullgraph=True)))
mine_recipe = f8.Recipe(input=Mine(), weight=Mine())

def mine_forward(x, weight):
    return f8.linear(x, weight, recipe=mine_recipe)

with torch.no_grad():
    mine, mine_counters = counted(lambda: digest(torch.compile(mine_forward, fullgraph=True)(x, weight)))
    mine_eager = digest(mine_forward(x, weight))
print(json.dumps({
    "linear": linear, "linear eager": step(forward), "linear counters": linear_counters,
    "mine": mine, "mine eager": mine_eager, "mine counters": mine_counters,
}))
"""

READ = """
import json, torch, fp8compile as f8
from torch._dynamo.utils import counters

torch.manual_seed(0)
layers = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.SiLU(), torch.nn.Linear(64, 32)).bfloat16()
layers = f8.convert(layers, f8.recipes.rowwise(), filter=lambda *_: True)
step, monitor = torch.compile(layers, fullgraph=True), f8.Monitor(layers, every=2)
for index in range(4):
    step(torch.full((16, 32), index + 1.0, dtype=torch.bfloat16)).float().square().sum().backward()
    if monitor.is_reading:
        reading = {layer: roles["grad_output"] for layer, roles in monitor.read().items()}
    monitor.step()
found = {k: v for group in ("aot_autograd", "inductor") for k, v in counters[group].items() if "cache" in k}
print(json.dumps({"reading": reading, "graphs": counters["stats"]["unique_graphs"], "counters": found}))
"""

MINE = """
from dataclasses import dataclass
import torch, fp8compile as f8

@dataclass(frozen=True, repr=False)
class Mine(f8.Quantizer):
    def multiplier(self, amax):
        return torch.full_like(amax, 2.0)
"""

DECOMPOSED = """
import torch, fp8compile as f8
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.compile_fx import select_decomp_table

left = []

def compiler(graph, inputs):
    left.extend(str(n.target) for n in graph.graph.nodes if str(n.target).startswith("fp8compile"))
    return make_boxed_func(graph.forward)

fn = lambda x, w: f8.linear(x, w, recipe=f8.recipes.rowwise())
backend = aot_autograd(fw_compiler=compiler, decompositions=select_decomp_table())
torch.compile(fn, fullgraph=True, backend=backend)(torch.randn(4, 32), torch.randn(16, 32))
assert set(left) == {"fp8compile.stored.default"}, left
"""

COMPILE_ANOTHER = """
import torch
assert torch.compile(torch.mm, fullgraph=True)(torch.eye(2), torch.eye(2)).tolist() == [[1, 0], [0, 1]]
"""


def run(folder, program):
    """What a fresh process printed, last line, as JSON where there is one."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd=folder, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout) if result.stdout.strip() else None


def edit(file, old, new):
    text = file.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}: this test has to be told the new text"
    file.write_text(text.replace(old, new))


@pytest.fixture
def folder(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "fp8compile", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def assert_counted(counters, expected):
    found = {name: count for name, count in counters.items() if name in expected or "bypass" in name}
    assert found == expected, f"all counters: {counters}"


HIT = {"autograd_cache_hit": 1}
MISS = {"autograd_cache_miss": 1}


def assert_runs_as_eager(result, counters):
    """Both programs of STEP computed what they compute without a compiler, and met the cache as told."""
    for name, expected in counters.items():
        assert result[name] == result[f"{name} eager"], f"{name}: {result}"
        assert_counted(result[f"{name} counters"], expected)


def test_a_fresh_process_hits_the_cache_and_a_changed_rule_misses_it(folder):
    """One test, because what it shows is what one process leaves to the next."""
    cold = run(folder, STEP)
    assert_runs_as_eager(cold, {"linear": MISS, "mine": MISS})

    edit(folder / "mine.py", "2.0", "300.0")
    foreign = run(folder, STEP)
    assert_runs_as_eager(foreign, {"linear": HIT, "mine": MISS})
    assert foreign["linear counters"]["fxgraph_cache_hit"] == 2, foreign["linear counters"]  # forward and backward
    assert not foreign["linear counters"].get("fxgraph_cache_miss"), foreign["linear counters"]
    assert foreign["mine"] != cold["mine"], "the edit changes no result: it shows nothing"

    rules = folder / "fp8compile" / "quantizers" / "scale_rules.py"
    edit(rules, "_one_where_empty(amax, _quotient(amax, fmt, eps), eps)", "_quotient(amax, fmt, eps) * 0.7")
    own = run(folder, STEP)
    assert_runs_as_eager(own, {"linear": MISS, "mine": MISS})
    assert own["linear"] != cold["linear"], "the edit changes no result: it shows nothing"


@pytest.mark.slow
def test_a_reading_hits_a_warm_cache(folder):
    cold, warm = (run(folder, READ) for _ in range(2))
    assert warm["reading"] == cold["reading"]
    assert warm["graphs"] == 2  # of steps that are read, and of others
    assert_counted(cold["counters"], {"autograd_cache_miss": 2})
    assert_counted(warm["counters"], {"autograd_cache_hit": 2, "fxgraph_cache_hit": 4})
    assert not warm["counters"].get("autograd_cache_miss")


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="first"),
        pytest.param("import torch._inductor.decomposition", id="after_the_table"),
        pytest.param(COMPILE_ANOTHER, id="after_another_compile"),
        pytest.param("import fp8compile" + COMPILE_ANOTHER, id="before_another_compile"),
    ],
)
def test_inductor_has_the_decompositions_whenever_the_package_was_imported(folder, before):
    run(folder, before + DECOMPOSED)


@pytest.mark.parametrize("recipe", ["delayed", pytest.param("rowwise", marks=pytest.mark.slow)])
def test_a_warm_start_of_a_model_misses_nothing(tmp_path, recipe):
    """Attention and feed-forward, forward and backward: both of Inductor's and AOTAutograd's graphs come from disk."""
    cold, warm = (compile_once(recipe, 1, str(tmp_path)) for _ in range(2))
    assert cold["misses"] > 0
    assert warm["hits"] > 0
    assert warm["misses"] == warm["bypasses"] == 0, warm


# ---------------------------------------------------------------------------------- ranks


def cached_on_a_rank(folder, groups):
    """Counters of the cache after a layer over a mesh was compiled; that many groups were made before the mesh's."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    for _ in range(groups):
        torch.distributed.new_group([0, 1])
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("data", "tensor"))["tensor"]
    x, weight = (DTensor.from_local(torch.ones(size, 32), mesh, [Shard(1)]) for size in (4, 16))
    layer = torch.compile(partial(f8.linear, recipe=f8.recipes.tensorwise()), fullgraph=True)
    layer(x, weight)
    return dict(torch._dynamo.utils.counters["aot_autograd"])


def test_a_rank_hits_the_cache_and_neither_another_rank_nor_other_names_of_groups_do(tmp_path):
    """Graphs have the names of their groups, which PyTorch counts up as groups are made."""
    runs = [(0, 0, MISS), (0, 0, HIT), (2, 0, MISS), (0, 1, MISS)]
    for rank, groups, expected in runs:
        with fake_rank(rank, 4) as pool:
            counters = pool.submit(cached_on_a_rank, str(tmp_path), groups).result()
        assert_counted(counters, expected)
