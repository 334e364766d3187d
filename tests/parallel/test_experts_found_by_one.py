"""Experts without tokens, and what one rank alone finds wrong: nobody waits for a rank that raised."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

import fp8compile as f8
from fp8compile.parallel import ExpertParallel

COMPILED = ("tensorwise", "nvfp4")  # on ranks: a message of amaxes, and rows that travel as they are
COUNT, HIDDEN, INNER, TOP_K = 4, 32, 48, 2
SOON = 30  # seconds: a bound on a hang, however busy the machine; gloo would wait for half an hour


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def experts(recipe, *, dtype=torch.bfloat16):
    """Experts as transformers writes them, converted."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INNER, num_experts=COUNT, num_experts_per_tok=TOP_K
    )
    model = nn.Sequential()
    model.experts = Qwen3MoeExperts(config)
    for each in model.parameters():
        nn.init.normal_(each, std=0.1)
    return f8.convert(model.to(dtype), recipe, filter=lambda *_: True)


def routed(tokens, *, dtype=torch.bfloat16):
    """Tokens, the experts of each, and their weights."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, HIDDEN, generator=generator).to(dtype).requires_grad_()
    index = torch.randint(COUNT, (tokens, TOP_K), generator=generator)
    return x, index, torch.ones(tokens, TOP_K, dtype=dtype, requires_grad=True)


def recipes():
    """Ready recipes that experts take; a CPU emulates what it has no product for."""
    made = [f8.recipes.by_name(name) for name in f8.recipes.names()]
    return [(name, each) for name, each in zip(f8.recipes.names(), made, strict=True) if not each.history()]


def assert_nothing(model, given, y):
    """Nothing comes of no tokens, nor do gradients but zeros."""
    assert (y.shape, y.dtype) == ((0, HIDDEN), given[0].dtype)
    y.sum().backward()
    assert given[0].grad.shape == (0, HIDDEN)
    assert given[2].grad.shape == (0, TOP_K)
    assert all(torch.equal(each.grad, torch.zeros_like(each)) for each in model.parameters())


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(("name", "recipe"), recipes())
def test_no_tokens_give_no_rows_and_zeros_for_gradients(name, recipe, backend):
    model, given = experts(recipe), routed(0)
    call = torch.compile(model.experts, fullgraph=True, backend=backend) if backend else model.experts
    assert_nothing(model, given, call(*given))


def test_inputs_that_do_not_fit_the_experts_are_refused():
    model, (x, index, weights) = experts(f8.recipes.rowwise()).experts, routed(3)
    for given, error, words in (
        ((x[:, :8], index, weights), ValueError, "hidden_states must be (tokens, 32), got (3, 8)"),
        ((x.long(), index, weights), TypeError, "hidden_states is torch.int64"),
        ((x, index[:2], weights), ValueError, "top_k_index has shape (2, 2) and hidden_states has shape (3, 32)"),
        ((x, index, weights[:2]), ValueError, "top_k_weights has shape (2, 2) and top_k_index has shape (3, 2)"),
        ((x.to("meta"), index, weights), ValueError, "hidden_states is on meta, but the experts are on cpu"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            model(*given)


# ---------------------------------------------------------------------------------- on ranks


def spread(recipe, **options):
    """Experts over two ranks."""
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu", mesh_dim_names=("ep",))
    if options.pop("same_tokens", False):
        options["same_tokens"] = mesh
    return parallelize_module(experts(recipe), mesh, {"experts": ExpertParallel(**options)})


def without_tokens(options, backend):
    """Whether y is that of one process: of ranks with 3 and no tokens, or with one in common, fewer than ranks."""
    rank, shared = dist.get_rank(), "same_tokens" in options
    for name, recipe in recipes():
        if backend and name not in COMPILED:
            continue
        torch._dynamo.reset()
        model = spread(recipe, **options)
        call = torch.compile(model.experts, fullgraph=True, backend=backend) if backend else model.experts
        for tokens in (1, 0) if shared else (0 if rank else 3,):
            given = routed(tokens)
            y = call(*given)
            expected = experts(recipe).experts(*(each.detach() for each in given))
            assert torch.equal(y, expected), (name, tokens)
            y.float().sum().backward()
            assert all(given[place].grad.shape == given[place].shape for place in (0, 2)), (name, tokens)
            assert all(each.grad is not None for each in model.parameters()), (name, tokens)
    return True


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("options", [{}, {"capacity": 8}, {"same_tokens": True}], ids=str)
def test_a_rank_without_tokens_takes_part(ranks, options, backend):
    assert ranks.run(without_tokens, options, backend, within="pair") == [True, True]


def wrong(kind):
    """Input that only one rank has."""
    x, index, weights = routed(3)
    x, weights = x.detach(), weights.detach()
    return {
        "features": (x[:, :8], index, weights),
        "index": (x, index[:2], weights),
        "weights": (x, index, weights[:1]),
        "dtype": (x.long(), index, weights),
        "no tensor": (None, index, weights),
    }[kind]


def found_by_one(kind, options):
    """The error of each rank, the second of which has wrong input; the next call of all is as ever."""
    model, rank = spread(f8.recipes.rowwise(), **options).experts, dist.get_rank()
    given = tuple(each.detach() for each in routed(3))
    with pytest.raises(RuntimeError) as error:
        model(*(wrong(kind) if rank else given))
    return str(error.value), model(*given).isfinite().all().item()


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("features", {}, "ValueError: Qwen3MoeExperts: hidden_states must be (tokens, 32), got (3, 8)"),
        ("index", {"capacity": 8}, "ValueError: Qwen3MoeExperts: top_k_index has shape (2, 2)"),
        ("weights", {"same_tokens": True}, "ValueError: Qwen3MoeExperts: top_k_weights has shape (1, 2)"),
        ("dtype", {}, "TypeError: Qwen3MoeExperts: hidden_states is torch.int64"),
        ("no tensor", {}, "AttributeError: 'NoneType' object has no attribute 'ndim'"),
    ],
)
def test_what_one_rank_finds_all_raise_soon_and_go_on(ranks, kind, options, words):
    started = time.monotonic()
    found = ranks.run(found_by_one, kind, options, within="pair")
    assert time.monotonic() - started < SOON
    (first, goes_on), (second, also) = found
    assert first == second
    assert f"1 of 2 ranks found an error before sending any rows, so all ranks stop. rank 1: {words}" in first
    assert (goes_on, also) == (True, True)


def found_by_all():
    """The error of an input that is wrong on all ranks: it is what one process raises."""
    model = spread(f8.recipes.rowwise()).experts
    with pytest.raises(ValueError, match="top_k_index has shape") as error:
        model(*wrong("index"))
    return str(error.value)


def test_what_all_ranks_find_is_the_error_of_one_process(ranks):
    first, second = ranks.run(found_by_all, within="pair")
    assert first == second == ranks.run(found_by_all, within="pair")[0]


def found_in_between():
    """What is said of an error that comes after the first message, which travels with none."""
    model = spread(f8.recipes.rowwise()).experts

    def fails(_):
        raise ValueError("out of something")

    model._apply_gate = fails
    with pytest.raises(ValueError, match="out of something") as error:
        model(*routed(3))
    return error.value.__notes__


def test_an_error_between_messages_says_that_other_ranks_wait(ranks):
    for notes in ranks.run(found_in_between, within="pair"):
        assert len(notes) == 1
        assert "the other ranks wait for this one until it exits or" in notes[0]
