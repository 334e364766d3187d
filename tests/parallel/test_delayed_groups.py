"""Delayed scaling over a group: all ranks go on with the largest amax of theirs, one message a layer and backward."""

from __future__ import annotations

import pytest
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch import nn

import fp8compile as f8
from fp8compile.testing import Recording

RECIPE = f8.recipes.delayed(history=4)
STEPS = 4


@pytest.fixture(scope="session")
def ranks():
    return shared_ranks()


def model_of(group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 16, bias=False)).bfloat16()
    return f8.convert(model, RECIPE, amax_group=group)


def own_batch(step, rank, bad=None):
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(10 * step + rank)).bfloat16() * 2.0**rank
    if bad is not None and rank == 1 and step == 1:
        x[0, 0] = bad
    return x


def amaxes_of(step, ranks, bad, model):
    """Amaxes of the first layer's input and weight over these ranks, by hand."""
    xs = torch.stack([own_batch(step, rank, bad) for rank in ranks])
    return xs.abs().amax().float(), model[0].weight.detach().abs().amax().float()


def trained(name, backend, bad):
    """The states after some steps, as lists; whether the first layer's history is that of all ranks' inputs."""
    group, rank = GROUPS[name], torch.distributed.get_rank()
    model = model_of(group)
    recording = Recording(backend) if backend == "aot_eager" else None  # what Inductor has on disk, it records not
    run = model if backend is None else torch.compile(model, backend=recording or backend, fullgraph=True)
    for step in range(STEPS):
        run(own_batch(step, rank, bad)).float().sum().backward()
    members = torch.distributed.get_process_group_ranks(group)
    seen = torch.stack([torch.stack(amaxes_of(step, members, bad, model)) for step in range(1, STEPS)], 1)
    found = model[0].amax_history[:2, 1:]
    right = torch.equal(found.nan_to_num(-1), seen.nan_to_num(-1))
    messages = None
    if recording is not None:
        backward = [str(node.target) for graph in recording.graphs for node in graph.backward.graph.nodes]
        messages = sum("all_reduce" in target for target in backward)
    bits = [buffer.view(torch.int32).tolist() for buffer in model.buffers()]
    return right, bits, messages, torch._dynamo.utils.counters["stats"]["unique_graphs"]


BAD = (None, torch.nan, torch.inf)
WAYS = [(name, backend, bad) for name in ("pair", "all") for backend in (None, "aot_eager") for bad in BAD]
WAYS += [("pair", "inductor", bad) for bad in BAD[:2]]  # its code does not depend on how many ranks there are


@pytest.mark.parametrize(("name", "backend", "bad"), WAYS, ids=str)
def test_every_rank_goes_on_with_the_largest_amax(ranks, name, backend, bad):
    answers = ranks.run(trained, name, backend, bad, within="pair" if backend == "inductor" else "all")
    assert all(right for right, *_ in answers)
    first, same = answers[0][1], [True] * 4 if name == "all" else [True, True, False, False]
    assert [bits == first for _, bits, *_ in answers] == same[: len(answers)]
    assert {graphs for *_, graphs in answers} == {0 if backend is None else 1}
    if backend == "aot_eager":
        assert {messages for *_, messages, _ in answers} == {2}  # one for each layer


def without_a_group(backend):
    model, rank = model_of(None), torch.distributed.get_rank()
    run = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    run(own_batch(0, rank)).float().sum().backward()
    return model[0].amax_history[0, -1].item() == own_batch(0, rank).abs().amax().item()


@pytest.mark.parametrize("backend", [None, "aot_eager"], ids=str)
def test_without_a_group_each_rank_has_its_own(ranks, backend):
    assert ranks.run(without_a_group, backend) == [True] * 4


def refused():
    messages = []
    for make in (
        lambda: f8.convert(nn.Sequential(nn.Linear(32, 16)), f8.recipes.rowwise(), amax_group=GROUPS["all"]),
        lambda: f8.Linear(32, 16, recipe=f8.recipes.rowwise(), amax_group=GROUPS["all"]),
    ):
        try:
            make()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_a_group_for_a_recipe_without_delayed_scaling_raises(ranks):
    for messages in ranks.run(refused):
        assert [m.partition(":")[0] for m in messages] == ["convert", "Linear"]
        assert "`amax_group` was passed, but no layer gets delayed scaling" in messages[0]
        assert "`amax_group` was passed, but the recipe has no delayed scaling" in messages[1]


def converted_again():
    model, alone, said = model_of(GROUPS["all"]), model_of(None), []
    f8.convert(model, RECIPE, amax_group=GROUPS["all"])
    for given, group in ((model, "pair"), (alone, "all")):
        try:
            f8.convert(given, RECIPE, amax_group=GROUPS[group])
        except ValueError as error:
            said.append(str(error))
    return model[0].amax_group == GROUPS["all"].group_name, said


def test_convert_again_takes_the_same_group_and_no_other(ranks):
    words = "convert: 0 is already converted, and does not reduce amaxes over this amax_group. Call"
    for is_kept, said in ranks.run(converted_again):
        assert is_kept
        assert [each[: len(words)] for each in said] == [words] * 2
