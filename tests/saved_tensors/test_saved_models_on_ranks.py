"""Models of transformers sharded by FSDP2 over two ranks, whose layers save codes, with and without checkpointing."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import GROUPS, shared_ranks
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8compile as f8
from benchmarks.memory_report import real_peaks
from fp8compile.testing.bits import difference

SYMBOLS, HIDDEN, TOKENS = 32, 64, 256


def chosen(tensor):
    """What the default chooses, and small tensors too."""
    return tensor.kind in ("norm", "activation", "checkpoint")


SAVED = f8.SavedAsCodes(filter=chosen)


def model_of(kind):
    """A small model of transformers in float32, that returns its loss."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": SYMBOLS, "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
    experts = {"moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))


def sharded(kind, *, fp8, checkpointed):
    """The model with each layer compiled and sharded; with FP8, its layers save codes."""
    model = model_of(kind)
    if fp8:
        f8.convert(model, f8.recipes.rowwise(), filter=lambda _, fqn: fqn != "lm_head")
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layer = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT) if checkpointed else layer
        layers[index] = f8.compile(layer, blocks=(), saved=SAVED if fp8 else None)
        fully_shard(layers[index], mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def batch(step):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank() % 2)
    return torch.randint(SYMBOLS, (2, TOKENS), generator=generator)


def steps(model, optimizer, numbers):
    losses = []
    for step in numbers:
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def peak(model):
    """Bytes of the largest moment of forward and backward beyond what was there before."""
    given = batch(0)
    loss, _, forward, left = real_peaks(lambda: model(input_ids=given, labels=given).loss)
    _, _, backward, _ = real_peaks(loss.backward)
    return max(forward, left + backward)


def trained(kind, checkpointed):
    """What there is to compare, in plain values."""
    counters.clear()
    model = sharded(kind, fp8=True, checkpointed=checkpointed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = steps(model, optimizer, range(2))
    graphs = counters["stats"]["unique_graphs"]
    states = get_state_dict(model, optimizer)
    kept = [torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, each) for each in states]
    losses += steps(model, optimizer, range(2, 4))
    torch._dynamo.reset()
    counters.clear()
    again = sharded(kind, fp8=True, checkpointed=checkpointed)
    other = torch.optim.AdamW(again.parameters(), lr=1e-3)
    set_state_dict(again, other, model_state_dict=kept[0], optim_state_dict=kept[1])
    resumed = steps(again, other, range(2, 4))
    cached = dict(counters["aot_autograd"])
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    differ = [text for one, two in pairs if (text := difference(one.to_local(), two.to_local()))]
    found = {"graphs": graphs, "resumed": resumed == losses[2:], "differ": differ, "losses": losses}
    found["hits"] = {name: count for name, count in cached.items() if name.startswith("autograd_cache")}
    found["peak"] = peak(again)
    torch._dynamo.reset()
    bf16 = sharded(kind, fp8=False, checkpointed=checkpointed)
    found["bf16 losses"] = steps(bf16, torch.optim.AdamW(bf16.parameters(), lr=1e-3), range(4))
    found["bf16 peak"] = peak(bf16)
    return found


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_models_of_transformers_over_two_ranks(kind, checkpointed):
    for found in shared_ranks().run(trained, kind, checkpointed, within="pair"):
        print(kind, checkpointed, found)
        assert (found["graphs"], found["hits"]) == (1, {"autograd_cache_hit": 1})
        assert (found["resumed"], found["differ"]) == (True, [])
        # with checkpointing two layers keep so little that what the backward of one makes is the largest moment
        assert checkpointed or found["peak"] < 0.8 * found["bf16 peak"]
