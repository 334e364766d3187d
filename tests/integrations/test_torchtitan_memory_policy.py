"""The memory policy for torchtitan's GraphTrainer, by its own registry and its own pass that makes tensors again."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_torchtitan = pytest.mark.skipif(
    not find_spec("torchtitan"), reason="needs torchtitan 0.3.0 (the extra fp8compile[torchtitan] has it)"
)
PROGRAM = """
from types import SimpleNamespace

import pytest
import test_joint_graph
import torch
from torchtitan.experiments.graph_trainer.memory_policy import tag_with_memory_policy_pass
from torchtitan.experiments.graph_trainer.selective_activation_remat import selective_activation_remat_pass

import fp8compile as f8
from fp8compile.integrations.torchtitan import register_memory_policy

name = register_memory_policy(test_joint_graph.SAVED)
with pytest.raises(ValueError, match="there is a policy 'saved_as_codes' already"):
    register_memory_policy()
with pytest.raises(ValueError, match="base is 'none'"):
    register_memory_policy(name="other", base="none")
with pytest.raises(TypeError, match="saved is 'all'"):
    register_memory_policy("all", name="other")
found = {}
parallelism = SimpleNamespace(fsdp_reshard_after_forward="default", pipeline_parallel_degree=1)
for policy in ("default", name):
    config = SimpleNamespace(compile=SimpleNamespace(memory_policy=policy), parallelism=parallelism)
    graph = test_joint_graph.joint(test_joint_graph.all_saved)
    graph = selective_activation_remat_pass(tag_with_memory_policy_pass(graph, config=config))
    found[policy] = test_joint_graph.kept(graph), graph(*test_joint_graph.tensors())
(before, (loss, *exact)), (after, (same, *moved)) = found.values()
assert torch.equal(loss, same)
assert (before, after) == test_joint_graph.KEPT[test_joint_graph.products_saved], (before, after)
distances = [((a - b).float().norm() / b.float().norm()).item() for a, b in zip(moved, exact, strict=True)]
assert all(0 < each < 0.06 for each in distances[:3]), distances
print("done")
"""


@needs_torchtitan
def test_the_policy_saves_codes_of_what_the_default_saves():
    root = Path(__file__).parents[2]
    paths = [str(root / "tests" / "saved_tensors"), str(root), *sys.path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]  # torchtitan changes PyTorch where it is imported
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "done"
