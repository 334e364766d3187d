"""Stock FSDP2 with an FP8 all-gather, compiled: each block one graph, for good, with the group in its parameter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "parallel"))
import fsdp_models as models
from compiles import Compiles
from gloo_ranks import shared_ranks
from test_fsdp import data_rank, differing, recipe_of, sharded

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION
from fp8compile.tensor import QuantizedTensor

pytestmark = pytest.mark.skipif(
    TORCH_VERSION < (2, 12), reason=f"a group as a part of a tensor needs PyTorch 2.12, this is {torch.__version__}"
)


@pytest.fixture(scope="module")
def ranks():
    return shared_ranks()


class Recorder:
    """A backend, and what each graph that it compiles is given."""

    def __init__(self, backend):
        self.backend = backend
        self.graphs = []

    def __call__(self, graph, inputs):
        weights = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
        self.graphs.append([w for w in weights if isinstance(w, QuantizedTensor)])
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)


def compiled(recipe, mesh, sizes, backend):
    """What is wrong with the graphs, and what differs from gathering in ``param_dtype``."""
    found, trained = [], {}
    for on in (False, True):
        torch._dynamo.reset()
        counters.clear()
        recorder = Recorder(backend)
        model = models.model_of(sizes, recipe_of(recipe))
        if (model := sharded(model, mesh, models.BF16, on=on, backend=recorder)) is None:
            return []
        trained[on] = models.trained(model, 4, data_rank(mesh)), models.weights_of(model)
        if on and (len(recorder.graphs) != 1 or counters["graph_break"]):  # the blocks have one code: they share it
            found.append(f"{len(recorder.graphs)} graphs, because\n{Compiles.why()}")
    if mesh != "FSDP + TP":  # there the parameter is a DTensor around it
        weights = recorder.graphs[0]
        found += [] if len(weights) == 3 else [f"{len(weights)} quantized weights in the graph"]
        found += [f"no group on {weight}" for weight in weights if weight.group is None]
    (losses, weights), (plain_losses, plain_weights) = trained[True], trained[False]
    return found + differing(plain_weights, weights) + ([] if losses == plain_losses else [f"{plain_losses} {losses}"])


CASES = [
    ("tensorwise", "1-D", "uneven", "aot_eager"),
    ("blockwise", "three", "even", "aot_eager"),
    ("tensorwise", "HSDP", "even", "aot_eager"),
    ("blockwise", "FSDP + TP", "uneven", "aot_eager"),
    ("tensorwise", "1-D", "even", "inductor"),
]


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_each_block_is_one_graph(ranks, case):
    assert not any(ranks.run(compiled, *case, within=models.WITHIN[case[1]]))


def cache_keys():
    """Of two tensors that differ in what a rank has of them alone."""
    weight = torch.randn(32, 32)
    codes = f8.quantize(weight, f8.recipes.tensorwise().weight)
    mesh = models.mesh_1d("pair")
    made = [DTensor.from_local(each, mesh, [Shard(0)], run_check=False) for each in (weight, codes)]
    return [each._stable_hash_for_caching() for each in made]


def test_weights_of_codes_and_of_values_have_different_keys_in_the_cache(ranks):
    """With PyTorch's own key, a block whose weights travel as codes ran the code of one whose don't, and died."""
    for values, codes in ranks.run(cache_keys):
        assert values != codes
