"""The compile cache on disk and an op or a GEMM of another package: a changed implementation misses it.

Both take a built-in quantizer, whose own class never changes with that package: the key has to know of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fp8compile

PACKAGE = """
import torch
from torch import Tensor
from fp8compile.library import Quantizer, register_gemm, register_op

FACTOR = 2.0

def times(x: Tensor, quantizer: Quantizer) -> Tensor:
    return x * FACTOR

def backward(ctx, grad):
    return grad * FACTOR, None

def register(name, decompose):
    return register_op(
        name,
        times,
        fake=lambda x, quantizer: torch.empty_like(x),
        backward=backward,
        setup_context=lambda ctx, inputs, output: None,
        decompose=decompose,
        sharding=None,
        samples=lambda: [],
    )

apart = register("timeslib::apart", times)
opaque = register("timeslib::opaque", None)  # its backward is compiled all the same

def takes(a, b):
    return (a.block, b.block) == ((1, 16), (16, 1))

def lacks(problem):
    return None if problem.target.type == "cpu" else "needs a CPU."

def multiply(a, b, out_dtype, config):
    left, right = (each.quantizer.dequantize(each.codes, each.scale) for each in (a, b))
    return ((left @ right) * FACTOR).to(out_dtype)

register_gemm("timeslib::gemm", takes=takes, lacks=lacks, multiply=multiply, detail="times a number")
"""
STEP = """
import json, torch, fp8compile as f8
import timeslib
from torch._dynamo.utils import counters

x = torch.ones(8, requires_grad=True)
quantizer = f8.CurrentScaling()
recipe, weight = f8.library.recipe(f8.CurrentScaling(block=(1, 16), scale="pow2")), torch.eye(8)

def product(x, quantizer):
    return f8.linear(x.view(1, 8), weight, recipe=recipe).view(8)

def step(fn):
    y = fn(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    return [y[0].item(), grad[0].item()]

def result(op):
    def forward(x):
        return op(x + 1, quantizer)

    counters.clear()
    compiled = step(torch.compile(forward, fullgraph=True))
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    return {"compiled": compiled, "eager": step(forward), "hits": hits}

print(json.dumps([result(timeslib.apart), result(timeslib.opaque), result(product)]))
"""


def run(folder):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), str(Path(fp8compile.__file__).parents[1])]),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", STEP]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_a_changed_op_or_gemm_of_another_package_misses_the_cache(tmp_path):
    (tmp_path / "timeslib.py").write_text(PACKAGE)
    cold = {"compiled": [4.0, 2.0], "eager": [4.0, 2.0], "hits": 0}
    assert run(tmp_path) == [cold] * 3
    assert run(tmp_path) == [cold | {"hits": 1}] * 3
    (tmp_path / "timeslib.py").write_text(PACKAGE.replace("FACTOR = 2.0", "FACTOR = 3.0"))
    assert run(tmp_path) == [{"compiled": [6.0, 3.0], "eager": [6.0, 3.0], "hits": 0}] * 3
