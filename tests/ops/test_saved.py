"""Quantized tensors and recipes in files that may come from anywhere: what loads, and that nothing else runs."""

from __future__ import annotations

import collections
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import fp8compile as f8
from fp8compile.tensor import QuantizedParameter
from fp8compile.tensor.saved import load_parameter, load_tensor


@dataclass(frozen=True, repr=False)
class Halving(f8.CurrentScaling):
    """A quantizer of another package: its class was defined, and nothing else was done for it."""

    halvings: int = 1


QUANTIZERS = [
    f8.CurrentScaling(),
    f8.CurrentScaling(format="e5m2", block=(1, -1), scale="pow2", eps=1e-6),
    f8.recipes.mxfp8().input,
    f8.recipes.blockwise().weight,
    Halving(halvings=3),
]
CODES, SCALE = torch.zeros(4, 4, dtype=torch.uint8), torch.ones(1, 1)
WHOLE = ("whole", False, None)


class Reduced:
    """An object whose pickle is what a file could say: call this, with these, and give the result that state."""

    def __init__(self, *reduced):
        self.reduced = reduced

    def __reduce__(self):
        return self.reduced


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def loaded(value):
    return torch.load(saved(value), weights_only=True)


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=repr)
def test_a_quantized_tensor_loads_with_weights_only(quantizer, assert_bits_equal):
    q = f8.quantize(torch.randn(160, 64), quantizer)
    again = loaded({"x": q})["x"]
    assert type(again) is f8.QuantizedTensor
    assert (again.quantizer, again.dtype) == (quantizer, q.dtype)
    assert_bits_equal(again.codes, q.codes)
    assert_bits_equal(again.scale, q.scale)


def test_parameters_and_what_they_were_made_of_load_with_weights_only(assert_bits_equal):
    model = f8.convert(
        nn.Sequential(nn.Linear(32, 16)), f8.recipes.tensorwise(), weight_lifetime="parameter", keep_initial=True
    )
    again = loaded(dict(model.named_parameters()))
    weight, own = again["0.weight"], model[0].weight
    assert type(weight) is QuantizedParameter
    assert isinstance(weight, nn.Parameter)
    for mine, other in ((weight.codes, own.codes), (weight.scale, own.scale), (weight.initial, own.initial)):
        assert_bits_equal(mine, other)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"])
def test_a_recipe_loads_with_weights_only(name):
    recipe = f8.recipes.by_name(name)
    assert loaded({"recipe": recipe})["recipe"] == recipe


def test_a_class_that_was_not_imported_is_named():
    unknown = saved(f8.quantize(torch.ones(4, 4), Halving())).getvalue().replace(b"Halving", b"Hxlving")
    with pytest.raises(pickle.UnpicklingError, match="Hxlving"):
        torch.load(io.BytesIO(unknown), weights_only=True)


RAN = []


def run():
    RAN.append("run")


RUNS = Reduced(run, ())
FORGED = {
    "a call in place of codes": Reduced(load_tensor, (RUNS, SCALE, f8.CurrentScaling(), torch.float32)),
    "a call in place of a field": Reduced(f8.CurrentScaling, (RUNS,)),
    "a method for an attribute": Reduced(f8.CurrentScaling, (), {"cast": load_tensor}),
    "a field of another type": Reduced(f8.CurrentScaling, (), {"format": collections.OrderedDict()}),
    "a field without meaning": Reduced(f8.CurrentScaling, (), {"block": (1, 2, 3)}),
    "a dict in place of a quantizer": Reduced(load_tensor, (CODES, SCALE, {}, torch.float32)),
    "a quantizer in place of codes": Reduced(
        load_tensor, (f8.CurrentScaling(), SCALE, f8.CurrentScaling(), torch.float32)
    ),
    "attributes of a tensor": Reduced(
        load_tensor, (CODES, SCALE, f8.CurrentScaling(), torch.float32), {"dequantize": load_tensor}
    ),
    "the class of tensors": Reduced(f8.QuantizedTensor, (CODES, SCALE, f8.CurrentScaling(), torch.float32)),
    "a scale of another shape": Reduced(load_tensor, (CODES, torch.ones(2, 1), f8.CurrentScaling(), torch.float32)),
    "codes of another dtype": Reduced(load_tensor, (CODES.float(), SCALE, f8.CurrentScaling(), torch.float32)),
    "another extent": Reduced(
        load_parameter,
        (CODES, SCALE, f8.CurrentScaling(), torch.float32, ("all", False, None), (True, True)),
    ),
    "a call in place of what is kept": Reduced(
        load_parameter, (CODES, SCALE, f8.CurrentScaling(), torch.float32, RUNS, (True, True))
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_refused_and_runs_nothing(name):
    RAN.clear()
    with pytest.raises((pickle.UnpicklingError, TypeError, ValueError)):
        loaded(FORGED[name])
    assert RAN == []


def test_the_call_in_those_files_would_run():
    RAN.clear()
    torch.load(saved(RUNS), weights_only=False)
    assert RAN == ["run"]


def test_what_is_right_in_a_forgery_loads():
    parts = (CODES, SCALE, f8.CurrentScaling(), torch.float32)
    assert type(loaded(Reduced(load_tensor, parts))) is f8.QuantizedTensor
    assert type(loaded(Reduced(load_parameter, (*parts, WHOLE, (True, True))))) is QuantizedParameter
    assert loaded(Reduced(f8.CurrentScaling, (), {"format": "e5m2"})) == f8.CurrentScaling(format="e5m2")
