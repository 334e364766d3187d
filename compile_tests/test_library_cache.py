"""The compile cache on disk and an op of another package: a changed implementation misses it.

The op takes a built-in quantizer, whose own class never changes with that package: the key has to know of the op.
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
from fp8compile.library import Quantizer, register_op

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
"""
STEP = """
import json, torch, fp8compile as f8
import timeslib
from torch._dynamo.utils import counters

x = torch.ones(8, requires_grad=True)
quantizer = f8.CurrentScaling()

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

print(json.dumps([result(timeslib.apart), result(timeslib.opaque)]))
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


def test_a_changed_op_of_another_package_misses_the_cache(tmp_path):
    (tmp_path / "timeslib.py").write_text(PACKAGE)
    cold = {"compiled": [4.0, 2.0], "eager": [4.0, 2.0], "hits": 0}
    assert run(tmp_path) == [cold, cold]
    assert run(tmp_path) == [cold | {"hits": 1}] * 2
    (tmp_path / "timeslib.py").write_text(PACKAGE.replace("FACTOR = 2.0", "FACTOR = 3.0"))
    assert run(tmp_path) == [{"compiled": [6.0, 3.0], "eager": [6.0, 3.0], "hits": 0}] * 2
