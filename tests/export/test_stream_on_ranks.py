"""The stream from a model over ranks has the bytes of one process, each tensor once, one tensor at a time."""

from __future__ import annotations

from itertools import product

import pytest
import serving_models as models
import torch
from gloo_ranks import GROUPS, shared_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION

pytestmark = pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups of ranks in a subclass need PyTorch 2.12")

DENSE = {
    "blockwise": ("fine_grained_fp8", lambda: f8.recipes.blockwise()),
    "tensorwise": ("compressed-tensors", lambda: f8.recipes.tensorwise()),
    "mxfp8": ("modelopt", lambda: f8.recipes.mxfp8()),
    "nvfp4": ("modelopt", lambda: f8.recipes.nvfp4()),
}


# rows that FSDP2 cuts within blocks; the sizes are multiples of those that the formats take
SIZES = {"blockwise": 640, "tensorwise": 648, "mxfp8": 352, "nvfp4": 336}


def dense(recipe, **options):
    torch.manual_seed(0)
    inner = SIZES[recipe]
    parts = nn.Linear(256, inner, bias=False), nn.ReLU(), nn.Linear(inner, 256), nn.LayerNorm(256)
    model = nn.Sequential(*parts).bfloat16()
    return f8.convert(model, DENSE[recipe][1](), filter="*", **options)


def spread(model, way):
    """Spread a model over this rank's pair, or both ways over the four ranks."""
    if way == "fsdp":  # the rows of a rank end within a block
        return fully_shard(model, mesh=DeviceMesh.from_group(GROUPS["pair"], "cpu"))
    if way == "graph_fsdp":
        return f8.parallel.graph_fsdp(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "dp")))
    if way == "tp, graph_fsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return f8.parallel.graph_fsdp(parallelize_module(model, mesh["tp"], plan), mesh["dp"])
    if way == "fsdp gathers codes":
        f8.parallel.fsdp_float8_all_gather(model)
        return spread(model, "fsdp")
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    if way == "tp":
        return parallelize_module(model, DeviceMesh.from_group(GROUPS["pair"], "cpu"), plan)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fully_shard(parallelize_module(model, mesh["tp"], plan), mesh=mesh["dp"])


def as_bytes(tensor):
    return tensor if tensor.element_size() > 1 else tensor.view(torch.uint8)


def difference(found, whole):
    """What differs between a stream over ranks and that of one process, in words."""
    names = [name for name, _ in found]
    if names != list(whole):
        return f"names {names}"
    wrong = [
        name
        for name, each in found
        if each.dtype != whole[name].dtype or not torch.equal(as_bytes(each), as_bytes(whole[name]))
    ]
    return f"{wrong} differ" if wrong else ""


def streams_of_a_dense_model(recipes, ways):
    found = {}
    for recipe, way in product(recipes, ways):
        options = {"quantized_parameters": True} if way.startswith("codes") else {}
        whole = dict(f8.export.tensors(dense(recipe, **options), DENSE[recipe][0]))
        model = spread(dense(recipe, **options), way.removeprefix("codes, "))
        found[f"{recipe} {way}"] = difference(list(f8.export.tensors(model, DENSE[recipe][0])), whole)
    return {case: words for case, words in found.items() if words}


@pytest.mark.parametrize("recipe", DENSE)
def test_a_dense_model_gives_the_bytes_of_one_process(recipe):
    ways = ("fsdp", "fsdp gathers codes", "tp", "codes, fsdp")
    assert shared_ranks().run(streams_of_a_dense_model, (recipe,), ways, within="pair") == [{}] * 2


def in_float32():
    model = dense("blockwise").float()
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1.001)  # no longer a bfloat16
    return model


def stream_of_parameters_that_the_forward_casts():
    whole = dict(f8.export.tensors(in_float32(), "fine_grained_fp8", forward_dtype=torch.bfloat16))
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = fully_shard(in_float32(), mesh=mesh, mp_policy=policy)
    return difference(list(f8.export.tensors(model, "fine_grained_fp8")), whole)


def test_fsdp_tells_the_dtype_of_the_forward():
    assert shared_ranks().run(stream_of_parameters_that_the_forward_casts, within="pair") == [""] * 2


def test_a_model_cut_both_ways_gives_the_bytes_of_one_process():
    ways = ("tp, fsdp", "tp, graph_fsdp", "graph_fsdp")
    assert shared_ranks().run(streams_of_a_dense_model, ("blockwise", "tensorwise"), ways) == [{}] * 4


def experts():
    return models.converted(models.make("qwen3_moe_4"), f8.recipes.blockwise())


def streams_of_experts(folder):
    whole, model, found = dict(f8.export.tensors(experts(), "fine_grained_fp8")), experts(), {}
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    parallelize_module(model, mesh, {"model.layers.*.mlp.experts": f8.parallel.ExpertParallel()})
    found["ep"] = difference(list(f8.export.tensors(model, "fine_grained_fp8")), whole)
    f8.export.save_pretrained(model, folder, "fine_grained_fp8")
    torch.distributed.barrier(GROUPS["pair"])
    found["check"] = "" if f8.export.check(folder).layers == 4 + 12 else "another number of layers"
    try:
        f8.export.save_pretrained(model, folder, "fine_grained_fp8")
    except (FileExistsError, RuntimeError) as error:
        found["again"] = "" if "is not empty" in str(error) else str(error)
    else:
        found["again"] = "overwritten"
    return {case: words for case, words in found.items() if words}


def test_experts_over_ranks_are_written_once(tmp_path):
    assert shared_ranks().run(streams_of_experts, str(tmp_path / "x"), within="pair", seconds=60) == [{}] * 2


def streams_of_experts_and_attention():
    """Experts over one dim of the mesh, and attention over the other, as values and as codes; then FSDP2 beside EP."""
    whole, found = dict(f8.export.tensors(experts(), "fine_grained_fp8")), {}
    attention = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel()) | {"o_proj": RowwiseParallel()}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    for case, options in (("values", {}), ("codes", {"quantized_parameters": True})):
        model = models.converted(models.make("qwen3_moe_4"), f8.recipes.blockwise(), **options)
        parallelize_module(model, mesh["ep"], {"model.layers.*.mlp.experts": f8.parallel.ExpertParallel()})
        if case == "values":
            names = {f"model.layers.*.self_attn.{name}": style for name, style in attention.items()}
            parallelize_module(model, mesh["tp"], names)
        else:
            fully_shard(model, mesh=mesh["tp"])
        found[case] = difference(list(f8.export.tensors(model, "fine_grained_fp8")), whole)
    return {case: words for case, words in found.items() if words}


def test_tensor_parallel_attention_and_experts_over_ranks_give_the_bytes_of_one_process():
    assert shared_ranks().run(streams_of_experts_and_attention, seconds=90) == [{}] * 4


def most_held(layers):
    """The most bytes that this rank allocates while it takes the stream of so many layers."""
    model = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(layers))).bfloat16()
    model = spread(f8.convert(model, f8.recipes.blockwise()), "fsdp")
    return most_held_by_stream(model)


def most_held_of_experts():
    """The most for 16 experts, of which this rank has eight; a stack's codes are 8 MiB and 4 MiB."""
    import transformers

    sizes = {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 16, "head_dim": 64}
    config = transformers.Qwen3MoeConfig(**{**models.SMALL, **sizes}, num_experts_per_tok=2)
    model = transformers.Qwen3MoeForCausalLM._from_config(config, dtype=torch.bfloat16)
    models.converted(model, f8.recipes.blockwise())
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    parallelize_module(model, mesh, {"model.layers.*.mlp.experts": f8.parallel.ExpertParallel()})
    return most_held_by_stream(model)


def most_held_by_stream(model):
    """The most bytes that this rank allocates while it takes a model's stream."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        stream = f8.export.tensors(model, "fine_grained_fp8")
        while next(stream, None) is not None:  # holds no tensor while the next one is made
            torch.distributed.barrier(GROUPS["pair"])  # gloo's thread has freed the message before
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_a_rank_holds_one_tensor_at_a_time_beside_its_shards():
    """What a rank allocates does not grow with the number of matrices.

    The codes of one are 2 MiB: those of all ranks, the half of this rank, and what gloo copies.
    """
    codes = 2**21
    few, many = (shared_ranks().run(most_held, layers, within="pair") for layers in (2, 8))
    for before, after in zip(few, many, strict=True):
        assert codes < before <= 2.75 * codes
        assert after <= before + 2 * codes  # all 8 are 16 MiB; gloo may hold a message a little longer


def test_a_rank_holds_no_stack_of_all_experts():
    """Its own experts have codes of 4 MiB, and slices in float32 about 3; a gather would hold 20 MiB."""
    for most in shared_ranks().run(most_held_of_experts, within="pair"):
        assert 4 * 2**20 < most < 12 * 2**20
