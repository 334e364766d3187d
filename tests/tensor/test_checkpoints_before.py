"""Files that were written before the classes of quantized tensors were rebuilt load, with the same bits."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
from checkpoint_cases import (
    FOLDER,
    OTHER_RECIPES,
    RECIPES,
    SHARDED,
    attributes_of,
    digests,
    digests_of_model,
    digests_of_parameter,
    flat,
    masters_of,
    model_of,
    quantizers,
)
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

EXPECTED = json.loads((FOLDER / "expected.json").read_text())
NO_RANKS = pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled:UserWarning")
MATCHED = "<All keys matched successfully>"
QUANTIZERS = quantizers() | {
    "a view": RECIPES["rowwise"].input,
    "transposed": RECIPES["mxfp8"].weight_for_grad_input,
    "float32": RECIPES["tensorwise"].input,
}
WRITTEN = [name for name in EXPECTED["parameters"] if name.partition(".")[2] and "delayed" not in name]


def read_by_dcp(model, folder):
    """A state in the memory of a model's, with what a folder has."""
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


READERS = {
    ".safetensors": lambda path, model: load_file(path),
    ".pt": lambda path, model: torch.load(path, weights_only=True),
    ".dcp": lambda path, model: read_by_dcp(model, path),
}
STATES = [
    pytest.param(path, id=path.name)
    for path in sorted(FOLDER.iterdir())
    if path.suffix in READERS and path.stem in RECIPES
]


def test_every_kind_of_file_is_here():
    found = {path.values[0].name for path in STATES}
    assert {path.rpartition(".")[0] for path in found} == RECIPES.keys() - {"rowwise_bf16_wgrad"}
    assert {path.rpartition(".")[2] for path in found} == {"safetensors", "pt", "dcp"}
    assert all((FOLDER / f"{name}_two_ranks.dcp" / "__1_0.distcp").exists() for name in SHARDED)


@NO_RANKS
@pytest.mark.parametrize("path", STATES)
def test_states_load(path):
    model = model_of(path.stem, seed=11)
    own = {name: (each.shape, each.dtype) for name, each in model.state_dict().items()}
    state = READERS[path.suffix](path, model_of(path.stem, seed=12))
    assert {name: (each.shape, each.dtype) for name, each in state.items()} == own
    assert str(model.load_state_dict(state)) == MATCHED
    assert digests_of_model(model) == EXPECTED["states"][path.stem]


def test_state_of_delayed_scaling_beside_values_loads():
    model = model_of("delayed", seed=11, weight_lifetime=None)
    model.load_state_dict(torch.load(FOLDER / "delayed_values.pt", weights_only=True))
    assert digests(model.state_dict()) == EXPECTED["states"]["delayed_values"]
    assert model.linear.delayed_state().amax_history.count_nonzero()


@pytest.mark.parametrize("name", EXPECTED["values"])
def test_values_become_the_codes_that_they_became(name):
    model = model_of(name, seed=11)
    assert str(model.load_state_dict(load_file(FOLDER / "values.safetensors"))) == MATCHED
    assert digests_of_model(model) == EXPECTED["values"][name]


def test_master_weights_load():
    model = model_of("mxfp8", seed=11, experts=False, keep_initial=True)
    optimizer = masters_of(model)
    states = torch.load(FOLDER / "masters.pt", weights_only=True)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    found = digests_of_model(model) | digests(flat(optimizer.state_dict(), "optimizer"))
    assert found == EXPECTED["masters"]


@NO_RANKS
@pytest.mark.parametrize("name", SHARDED)
def test_what_two_ranks_wrote_loads_in_one_process(name):
    model = model_of(name, seed=11, experts=SHARDED[name])
    model.load_state_dict(read_by_dcp(model, FOLDER / f"{name}_two_ranks.dcp"))
    assert digests_of_model(model) == EXPECTED["two ranks"][name]


@pytest.mark.parametrize("name", EXPECTED["tensors"])
def test_quantized_tensors_load_with_weights_only(name):
    found = torch.load(FOLDER / "tensors.pt", weights_only=True)[name]
    assert found.quantizer == QUANTIZERS[name]
    assert digests_of_parameter(found) == EXPECTED["tensors"][name]
    assert attributes_of(found) == EXPECTED["attributes"][name]


def test_quantized_tensors_in_a_pickle_load():
    found = pickle.loads((FOLDER / "tensors.pickle").read_bytes())
    assert len(found) == 3
    for name, each in found.items():
        assert digests_of_parameter(each) == EXPECTED["tensors"][name]


@pytest.mark.parametrize("name", EXPECTED["parameters"])
def test_parameters_load_with_weights_only(name):
    found = torch.load(FOLDER / "parameters.pt", weights_only=True)[name]
    assert digests_of_parameter(found) == EXPECTED["parameters"][name]
    assert attributes_of(found) == EXPECTED["attributes"][name]


@pytest.mark.parametrize("name", WRITTEN)
def test_parameters_that_were_loaded_are_written_to(name):
    recipe, _, path = name.partition(".")
    own = dict(model_of(recipe, seed=6).named_parameters())[path]
    found = torch.load(FOLDER / "parameters.pt", weights_only=True)[name]
    values = torch.randn(own.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    with torch.no_grad():
        for each in (own, found):
            each.copy_(values)
            each.mul_(0.5)
    assert digests_of_parameter(own).items() <= digests_of_parameter(found).items()  # this has initial values, too


def test_recipes_and_quantizers_load_with_weights_only():
    found = torch.load(FOLDER / "recipes.pt", weights_only=True)
    assert found == {"recipes": RECIPES | OTHER_RECIPES, "quantizers": quantizers()}
