"""SavedAsCodes, the value: what it refuses, what it chooses, and when two of them are the same for a cache."""

from __future__ import annotations

import math
import os
import pickle
from dataclasses import dataclass
from fnmatch import fnmatch

import pytest
import torch

import fp8compile as f8
from fp8compile.saved_tensors.partitioner import partitioner

LARGE = {"shape": (256, 512), "dtype": torch.bfloat16}
LEAST, KINDS_AND_SIZES, CHOSEN = 1, (("norm", 1.5), ("gemm", None)), ["norm"]


@dataclass
class Unhashable:
    def __call__(self, tensor):
        return True


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"quantizer": "e4m3"}, TypeError, "`quantizer` is 'e4m3'; it must be a quantizer"),
        ({"quantizer": f8.DelayedScaling()}, ValueError, "a saved tensor has no history"),
        ({"quantizer": f8.TwoLevelScaling(block=(16, 1), packed="columns")}, ValueError, "a tensor with three dims"),
        ({"filter": ["norm"]}, TypeError, r"`filter` is \['norm'\]; it must be None, a tuple of kinds"),
        (
            {"filter": Unhashable()},
            TypeError,
            r"`filter` is Unhashable\(\); it must be None, .* or a hashable "
            r"function",
        ),
        ({"filter": ("norms",)}, ValueError, "filter has the kind 'norms'; the kinds are norm, activation"),
    ],
)
def test_what_can_not_be_done_is_refused_at_once(fields, error, text):
    with pytest.raises(error, match=text):
        f8.SavedAsCodes(**fields)


def test_the_default_takes_large_inputs_of_norms_activations_and_checkpoints():
    saved, small = f8.SavedAsCodes(), {**LARGE, "shape": (255, 257)}
    chosen = {kind: saved.chooses(f8.SavedTensor(kind=kind, **LARGE)) for kind in ("norm", "activation", "checkpoint")}
    assert all(chosen.values())
    assert not any(saved.chooses(f8.SavedTensor(kind=kind, **LARGE)) for kind in ("attention", "gemm", "other"))
    assert not saved.chooses(f8.SavedTensor(kind="norm", **small))
    assert f8.SavedAsCodes(filter=lambda tensor: True).chooses(f8.SavedTensor(kind="other", **small))


@pytest.mark.parametrize(
    ("beside", "block"), [(None, (1, 128)), ((-1, -1), (1, -1)), ((1, -1), (1, -1)), ((1, 32), (1, 32))]
)
def test_without_a_quantizer_it_is_e4m3_in_the_blocks_of_the_recipe(beside, block):
    assert f8.SavedAsCodes().quantizer_for(beside) == f8.CurrentScaling(block=block, scale="pow2")
    own = f8.CurrentScaling(format="e5m2")
    assert f8.SavedAsCodes(own).quantizer_for(beside) == own


def chooses_all(tensor):
    return True


def test_equal_values_have_one_text_for_caches_and_closures_have_their_own():
    assert f8.SavedAsCodes().uuid() == f8.SavedAsCodes().uuid() != f8.SavedAsCodes(filter=("norm",)).uuid()
    assert f8.SavedAsCodes(filter=chooses_all).uuid() == f8.SavedAsCodes(filter=chooses_all).uuid()
    texts = {f8.SavedAsCodes(filter=lambda tensor, least=least: tensor.nbytes > least).uuid() for least in (1, 2)}
    assert len(texts) == 2


def test_filters_that_differ_in_a_name_or_a_keyword_have_texts_of_their_own():
    """Hooks find a value by its text: with one text for two values, the first one saved nothing as codes."""
    by_kind = f8.SavedAsCodes(filter=lambda tensor: tensor.kind == "norm")
    by_module = f8.SavedAsCodes(filter=lambda tensor: tensor.module == "norm")
    assert by_kind.uuid() != by_module.uuid()
    texts = {f8.SavedAsCodes(filter=lambda tensor, *, least=least: tensor.nbytes > least).uuid() for least in (1, 2)}
    assert len(texts) == 2


def test_quantizers_whose_classes_share_a_name_have_texts_of_their_own():
    """Contexts of one text share their hooks, and so a compiled graph."""

    def made(element):
        @dataclass(frozen=True, kw_only=True)
        class Own(f8.CurrentScaling):
            def element_format(self):
                return f8.CurrentScaling(format=element).element_format()

        return f8.SavedAsCodes(Own())

    assert made("e4m3").uuid() != made("e5m2").uuid()
    assert f8.SavedAsCodes(f8.CurrentScaling()).uuid() == f8.SavedAsCodes(f8.CurrentScaling()).uuid()


def is_large(tensor):
    return tensor.nbytes >= LEAST


def asks_for_the_limit():
    from test_choice import LEAST

    return LEAST


def counts(tensor):
    return tensor.nbytes >= counts.least


counts.least = 1


def decorated(tensor):
    return tensor.nbytes > 1


decorated = torch.no_grad()(decorated)
reads = {
    "a number": lambda: lambda tensor: tensor.nbytes > LEAST,
    "a tuple": lambda: lambda tensor: (tensor.kind, None) in KINDS_AND_SIZES,
    "a number inside of another function": lambda: lambda tensor: any(size > LEAST for size in tensor.shape),
    "a function of this module": lambda: lambda tensor: is_large(tensor),
    "names of known modules": lambda: (
        lambda tensor: (
            isinstance(tensor, f8.SavedTensor) and fnmatch(tensor.module, "*.0") and tensor.nbytes < math.inf
        )
    ),
}
cant_be_compared = {
    "a list": lambda: lambda tensor: tensor.kind in CHOSEN,
    "a list inside of another function": lambda: lambda tensor: any(tensor.kind == each for each in CHOSEN),
    "another module": lambda: lambda tensor: tensor.kind in os.environ,
    "what it imports": lambda: lambda tensor: tensor.nbytes > asks_for_the_limit(),
    "an attribute of a function": lambda: lambda tensor: counts(tensor),
    "a function behind PyTorch's decorator": lambda: lambda tensor: decorated(tensor),
    "a name that nothing has": lambda: lambda tensor: not_yet(tensor),  # noqa: F821
}


@pytest.mark.parametrize("read", reads)
def test_functions_of_equal_code_and_equal_globals_have_one_text(read):
    """Two functions, as two processes have them: no text is kept from one to the other."""
    first, second = reads[read](), reads[read]()
    assert first is not second
    assert f8.SavedAsCodes(filter=first).uuid() == f8.SavedAsCodes(filter=second).uuid()


@pytest.mark.parametrize("read", cant_be_compared)
def test_a_function_that_reads_what_can_not_be_compared_has_a_text_of_its_own(read):
    first, second = (f8.SavedAsCodes(filter=cant_be_compared[read]()) for _ in range(2))
    assert first.uuid() == first.uuid() != second.uuid()


@pytest.mark.parametrize(
    ("read", "name", "value"),
    [
        ("a number", "LEAST", 2),
        ("a number", "LEAST", True),
        ("a tuple", "KINDS_AND_SIZES", (("norm", 1.5), ("gemm", 0))),
        ("a number inside of another function", "LEAST", 2),
        ("a function of this module", "LEAST", 2),
        ("a function of this module", "is_large", lambda tensor: tensor.nbytes > LEAST),
        ("names of known modules", "fnmatch", math.isclose),
    ],
)
def test_the_text_of_a_function_has_the_values_of_its_globals(read, name, value, monkeypatch):
    """Another process has another value there, and would run the graph that this one has compiled."""
    saved = f8.SavedAsCodes(filter=reads[read]())
    before = saved.uuid()
    monkeypatch.setitem(globals(), name, value)
    assert saved.uuid() != before
    monkeypatch.undo()
    assert saved.uuid() == before


def test_keys_of_compile_caches_have_the_values_of_now(monkeypatch):
    made = partitioner(f8.SavedAsCodes(filter=reads["a number"]()))
    key, file = made.uuid(), pickle.dumps(made)
    monkeypatch.setitem(globals(), "LEAST", 2)
    assert made.uuid() != key
    assert pickle.dumps(made) != file
    assert pickle.loads(file) is pickle.loads(pickle.dumps(made)) is made


def test_a_global_that_changes_compiles_calls_in_the_context_again(monkeypatch):
    model, x = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.SiLU()), torch.randn(8, 128, requires_grad=True)
    saved, compiled = f8.SavedAsCodes(filter=reads["a number"]()), torch.compile(model, backend="aot_eager")

    def gradient():
        with f8.saved_as_codes(saved):
            y = compiled(x)
        return torch.autograd.grad(y.sum(), x)[0]

    of_codes = gradient()
    monkeypatch.setitem(globals(), "LEAST", 1 << 30)
    exact = torch.autograd.grad(model(x).sum(), x)[0]
    assert torch.equal(gradient(), exact)
    assert not torch.equal(of_codes, exact)
