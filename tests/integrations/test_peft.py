"""LoRA over codes by PEFT: merged and unmerged exactly, DoRA, experts, saved and loaded, one graph."""

from __future__ import annotations

import copy

import pytest
import torch
from gloo_ranks import shared_ranks
from torch._dynamo.testing import CompileCounterWithBackend

import fp8compile as f8
from fp8compile._compat import TORCH_VERSION

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from fp8compile.integrations import peft as f8peft  # noqa: E402
from fp8compile.tensor import QuantizedParameter  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*", "ignore:Already following adapters")

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "use_cache": False}
LLAMA = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=96)
MOE = transformers.Qwen3MoeConfig(
    **SIZES, num_key_value_heads=2, intermediate_size=96, moe_intermediate_size=48, num_experts=4, head_dim=32,
    num_experts_per_tok=2, mlp_only_layers=[],
)  # fmt: skip
TARGETS = ["q_proj", "down_proj"]
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def tokens():
    return torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(3))


def base_of(recipe, config=LLAMA, *, frozen=True):
    torch.manual_seed(0)
    kind = transformers.LlamaForCausalLM if config is LLAMA else transformers.Qwen3MoeForCausalLM
    model = kind(config).bfloat16()
    if recipe is None:
        return model
    f8.convert(model, recipe, filter=["model.layers.*"])
    if recipe.history():
        f8.calibrate(model, lambda given: given(input_ids=tokens()))
    return f8.freeze_weights(model) if frozen else model


def adapted(base, merge_to="codes", **options):
    torch.manual_seed(1)
    given = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False, **options}
    return peft.get_peft_model(base, f8peft.register(peft.LoraConfig(**given), merge_to=merge_to))


def trained(model, steps=3, run=None):
    run = model if run is None else run
    own = [each for each in model.parameters() if each.requires_grad]
    optimizer, losses = torch.optim.AdamW(own, lr=1e-3), []
    for _ in range(steps):
        loss = run(input_ids=tokens(), labels=tokens()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=tokens()).logits


def layer_of(model):
    return model.base_model.model.model.layers[0].self_attn.q_proj


def parts(weight):
    return [each.clone() for each in (weight.parts() if hasattr(weight, "parts") else (weight.detach(),))]


def are_equal(ones, others):
    return all(torch.equal(*each) for each in zip(ones, others, strict=True))


BASES = {
    "blockwise": (f8.recipes.blockwise(), True),
    "rowwise": (f8.recipes.rowwise(), True),
    "delayed": (f8.recipes.delayed(), True),
    "nvfp4": (f8.recipes.nvfp4(), True),
    "values": (f8.recipes.rowwise(), False),
}


@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
@pytest.mark.parametrize("name", BASES)
def test_adapters_are_merged_and_the_old_codes_are_put_back(name, use_dora):
    recipe, frozen = BASES[name]
    model = adapted(base_of(recipe, frozen=frozen), use_dora=use_dora)
    trained(model)
    layer, apart = layer_of(model), logits(model)
    weight = layer.base_layer.weight
    before = parts(weight)
    model.merge_adapter()
    made = layer.base_layer.weight
    assert isinstance(made, QuantizedParameter) is frozen
    assert made.requires_grad is weight.requires_grad
    merged = logits(model)
    assert not are_equal(before, parts(made))
    # rounded once more, to 3 bits of mantissa of each weight, or to 1 bit
    assert (merged - apart).float().norm() < (0.3 if name == "nvfp4" else 2**-4) * apart.float().norm()
    model.unmerge_adapter()
    assert layer.base_layer.weight is weight
    assert are_equal(before, parts(weight))
    assert torch.equal(logits(model), apart)
    assert torch.equal(logits(model.merge_and_unload()), merged)


def test_codes_are_merged_to_values_if_asked_for():
    model = adapted(base_of(f8.recipes.blockwise()), merge_to="values")
    layer = layer_of(model)
    values = layer.base_layer.weight.dequantize() + layer.get_delta_weight("default").bfloat16()
    plain = model.merge_and_unload(safe_merge=True)
    weight = plain.model.layers[0].self_attn.q_proj.weight
    assert type(weight) is torch.nn.Parameter
    assert torch.equal(weight, values)


def test_several_adapters_are_merged_from_the_base_itself():
    model = adapted(base_of(f8.recipes.blockwise()))
    model.add_adapter("other", f8peft.register(peft.LoraConfig(r=2, target_modules=TARGETS, init_lora_weights=False)))
    layer = layer_of(model)
    before, both = parts(layer.base_layer.weight), copy.deepcopy(model)
    for each in ("default", "other"):
        model.merge_adapter([each])
    both.merge_adapter(["default", "other"])
    assert are_equal(parts(layer.base_layer.weight), parts(layer_of(both).base_layer.weight))
    model.unmerge_adapter()
    assert are_equal(before, parts(layer.base_layer.weight))


def test_a_merge_that_fails_changes_nothing():
    model = adapted(base_of(f8.recipes.blockwise()))
    layer = layer_of(model)
    weight = layer.base_layer.weight
    with torch.no_grad():
        layer.lora_B["default"].weight.fill_(torch.inf)
    with pytest.raises(ValueError, match="NaNs detected"):
        layer.merge(safe_merge=True)
    assert layer.base_layer.weight is weight
    assert not layer.merged


def test_an_adapter_is_saved_and_loaded(tmp_path):
    model = adapted(base_of(f8.recipes.blockwise()), use_dora=True)
    trained(model)
    expected = logits(model)
    model.save_pretrained(tmp_path)
    config = f8peft.register(peft.LoraConfig.from_pretrained(tmp_path))
    loaded = peft.PeftModel.from_pretrained(base_of(f8.recipes.blockwise()), tmp_path, config=config)
    assert torch.equal(logits(loaded), expected)


def test_an_initialization_that_changes_the_base_changes_its_codes():
    base = base_of(f8.recipes.blockwise())
    before = parts(base.model.layers[0].self_attn.q_proj.weight)
    model = adapted(base, init_lora_weights="pissa")
    weight = layer_of(model).base_layer.weight
    assert isinstance(weight, QuantizedParameter)
    assert not are_equal(before, parts(weight))
    logits(model)


@pytest.mark.parametrize("name", ["rowwise", "nvfp4"])
def test_experts_have_adapters_beside_their_codes(name, tmp_path):
    model = adapted(base_of(f8.recipes.by_name(name), MOE), target_modules=["q_proj"], target_parameters=STACKS)
    losses = trained(model)
    assert losses[-1] < losses[0]
    experts = model.base_model.model.model.layers[0].mlp.experts.get_base_layer()
    before, apart = parts(experts.gate_up_proj), logits(model)
    model.save_pretrained(tmp_path)
    config = f8peft.register(peft.LoraConfig.from_pretrained(tmp_path))
    loaded = peft.PeftModel.from_pretrained(base_of(f8.recipes.by_name(name), MOE), tmp_path, config=config)
    assert torch.equal(logits(loaded), apart)
    with model.disable_adapter():
        assert torch.equal(logits(model), logits(base_of(f8.recipes.by_name(name), MOE)))
    model.merge_adapter()
    merged = logits(model)
    assert not are_equal(before, parts(experts.gate_up_proj))
    assert (merged - apart).float().norm() < (0.3 if name == "nvfp4" else 2**-4) * apart.float().norm()
    model.unmerge_adapter()
    assert are_equal(before, parts(experts.gate_up_proj))
    assert torch.equal(logits(model), apart)
    assert torch.equal(logits(model.merge_and_unload()), merged)


def test_adapters_over_experts_in_values_have_the_gradients_of_pefts_own():
    own = adapted(base_of(f8.Recipe(), MOE, frozen=False), target_modules=[], target_parameters=STACKS)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=4, target_modules=[], target_parameters=STACKS, init_lora_weights=False)
    theirs = peft.get_peft_model(base_of(None, MOE), config)
    adapters = {name: each for name, each in own.state_dict().items() if "lora" in name}
    theirs.load_state_dict(adapters, strict=False)
    for model in (own, theirs):
        model.float()  # low rank and full product differ by rounding only
        model(input_ids=tokens(), labels=tokens()).loss.backward()
    found = {name: each.grad for name, each in own.named_parameters() if each.grad is not None}
    wanted = {name: each.grad for name, each in theirs.named_parameters() if each.grad is not None}
    assert found.keys() == wanted.keys()
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=1e-3, atol=1e-6)  # sums of float32 in another order


@pytest.mark.parametrize("config", [LLAMA, MOE], ids=["linears", "experts"])
def test_a_step_is_one_graph_that_stays(config):
    stacks = {"target_parameters": STACKS, "target_modules": ["q_proj"]} if config is MOE else {}
    model = adapted(base_of(f8.recipes.blockwise(), config), **stacks)
    graphs = CompileCounterWithBackend("aot_eager")
    losses = trained(model, run=torch.compile(model, fullgraph=True, backend=graphs))
    assert graphs.frame_count == 1
    assert losses[-1] < losses[0]


def test_what_is_not_taken_is_said():
    with pytest.raises(TypeError, match="register: `config` is a int"):
        f8peft.register(1)
    with pytest.raises(ValueError, match="`merge_to` is 'bf16'; it must be 'codes' or 'values'"):
        f8peft.register(peft.LoraConfig(), merge_to="bf16")


# ------------------------------------------------------------------------------------------------- ranks


def losses_under_fsdp2(name, use_dora):
    """On a rank: whether training over a base in codes that FSDP2 shards has the losses of one process."""
    from gloo_ranks import GROUPS
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model = adapted(base_of(f8.recipes.by_name(name)), use_dora=use_dora)
    expected = trained(adapted(base_of(f8.recipes.by_name(name)), use_dora=use_dora))
    mesh = DeviceMesh.from_group(GROUPS["pair"], "cpu")
    for layer in model.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    found = trained(model)
    with pytest.raises(RuntimeError, match="is sharded over ranks"):
        model.merge_adapter()
    return found == expected or (found, expected)


@pytest.mark.skipif(TORCH_VERSION < (2, 12), reason="groups of ranks in a subclass need PyTorch 2.12")
@pytest.mark.parametrize("use_dora", [False, True], ids=["LoRA", "DoRA"])
def test_fsdp2_shards_a_base_in_codes(use_dora):
    # all ranks have the same rows, so that the mean of their gradients is each rank's
    assert shared_ranks().run(losses_under_fsdp2, "blockwise", use_dora) == [True] * 4
