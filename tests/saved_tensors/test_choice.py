"""SavedAsCodes, the value: what it refuses, what it chooses, and when two of them are the same for a cache."""

from __future__ import annotations

import pytest
import torch

import fp8compile as f8

LARGE = {"shape": (256, 512), "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("fields", "error", "text"),
    [
        ({"quantizer": "e4m3"}, TypeError, "quantizer is 'e4m3'; it is a quantizer"),
        ({"quantizer": f8.DelayedScaling()}, ValueError, "a saved tensor has no history"),
        ({"quantizer": f8.TwoLevelScaling(block=(16, 1), packed="columns")}, ValueError, "a tensor of three dims"),
        ({"filter": ["norm"]}, TypeError, r"filter is \['norm'\]; it is None, a tuple of kinds"),
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
