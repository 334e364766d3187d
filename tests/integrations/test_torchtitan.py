"""torchtitan, unedited, as a client: `fp8compile.integrations.torchtitan` with its own Trainer, on a CPU.

All of it runs in a process of its own, for torchtitan changes PyTorch where it is imported.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from cheap_compiles import make_compiles_cheap
from gloo_ranks import shared_ranks
from processes import process_context
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan_on_cpu import CASES, MODELS, debug_config, import_torchtitan, losses_of, train

import fp8compile as f8
from benchmarks.torchtitan_losses import row_of
from fp8compile._compat import TORCH_VERSION

needs_torchtitan = pytest.mark.skipif(
    not find_spec("torchtitan"), reason="needs torchtitan 0.3.0 (the extra fp8compile[torchtitan] has it)"
)
INTEGRATION = "fp8compile.integrations.torchtitan"
# of losses in FP8 from those in bf16: less than twice the most in docs/results/torchtitan.md, 0.15 %
APART = 2.5e-3


def integration():
    return import_module(INTEGRATION)


# ------------------------------------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("installed", "text"),
    [
        (None, r"supports torchtitan 0\.3\.0, but torchtitan is not installed\. Install torchtitan==0\.3\.0"),
        ("0.2.1", r"supports torchtitan 0\.3\.0, but 0\.2\.1 is installed"),
        ("0.4.0.dev20261101", r"0\.4\.0\.dev20261101 is installed"),
    ],
)
def test_a_torchtitan_that_is_not_known_is_refused_by_its_version(monkeypatch, installed, text):
    def version(name):
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr("importlib.metadata.version", version)
    for name in [name for name in sys.modules if name.startswith(INTEGRATION)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=text):
        import_module(INTEGRATION)


# ------------------------------------------------------------------------------------------------- one rank


@pytest.fixture(scope="module")
def own_process():
    """Calls a function in a process that is the only rank of its group."""
    with ProcessPoolExecutor(1, mp_context=process_context()) as pool:
        pool.submit(start_group).result()
        yield lambda function, *arguments: pool.submit(function, *arguments).result(timeout=400)


def start_group():
    import_torchtitan()  # before anything imports it without
    torch.set_num_threads(1)
    make_compiles_cheap()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def config_of(model, recipe=None, *, case="one", folder=None, **options):
    """A debug model's config, in bf16 or in FP8; eager, for two steps."""
    folder = tempfile.mkdtemp() if folder is None else folder
    gather = options.pop("gather", False)
    config = debug_config(model, CASES[case], folder, **{"steps": 2, "backend": None, **options})
    return config if recipe is None else integration().convert(config, recipe, fsdp_float8_all_gather=gather)


def built(config):
    """The model of a config, on the meta device, as the Trainer builds it."""
    config.model_spec.model.update_from_config(config=config)
    with torch.device("meta"):
        return config.model_spec.model.build()


def what_is_converted(model):
    plain = config_of(model)
    config = integration().convert(plain, f8.recipes.rowwise())
    assert type(plain.model_spec.model) is not type(config.model_spec.model)
    assert not any(row.converted for row in f8.conversion_report(built(plain)).rows)
    module = built(config)
    module.verify_module_protocol()
    rows = f8.conversion_report(module).rows
    assert config.to_dict()["model_spec"]["model"]["float8"]["recipe"] == "rowwise"
    return [row.fqn for row in rows if not row.converted], sum(row.converted and bool(row.experts) for row in rows)


@needs_torchtitan
@pytest.mark.parametrize(
    ("model", "left", "experts"),
    [
        ("llama3", [], 0),
        ("qwen3_moe", ["layers.0.moe.router.gate", "layers.1.moe.router.gate"], 2),
        ("deepseek_v3", ["layers.1.moe.router.gate"], 1),
    ],
)
def test_all_linears_and_experts_of_a_model_are_converted_but_routers(own_process, model, left, experts):
    assert own_process(what_is_converted, model) == (left, experts)


def where_states_are():
    from torchtitan.distributed.parallel_dims import MeshAxisName

    model = built(config_of("llama3", f8.recipes.delayed()))
    layers = [module for module in model.modules() if isinstance(module, f8.Linear)]
    found = [layer._sharding_config.state_shardings for layer in layers if layer._sharding_config is not None]
    assert found
    return {
        (name, shardings[name].axis_types[axis].name)
        for shardings in found
        for name, axis in product(("amax_history", "multiplier"), (MeshAxisName.DP, MeshAxisName.TP))
    }


class Products(TorchDispatchMode):
    """Counts the products of FP8 layers in forwards, repeated ones too."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in f8.ops.GEMM_OPS
        return func(*args, **(kwargs or {}))


def products_with_selective_checkpointing(policy_of):
    from torch import nn
    from torchtitan.distributed.activation_checkpoint import SelectiveAC

    layers = nn.ModuleDict({name: nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64)) for name in "01"})
    model = f8.convert(nn.ModuleDict({"layers": layers}).bfloat16(), f8.recipes.rowwise())
    policy = SelectiveAC.Config()
    if policy_of == "fp8compile":
        policy = import_module(f"{INTEGRATION}.parallelize").CheckpointingConfig(policy)
    policy.build(dump_folder="").apply(model)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    with Products() as products:
        model["layers"]["1"](model["layers"]["0"](x)).sum().backward()
    return products.count


@needs_torchtitan
def test_selective_checkpointing_keeps_the_products_of_float8_layers(own_process):
    assert own_process(products_with_selective_checkpointing, "torchtitan") == 8  # its own list has none of them
    assert own_process(products_with_selective_checkpointing, "fp8compile") == 4


@needs_torchtitan
def test_every_rank_has_the_state_of_delayed_scaling(own_process):
    assert {name for name, _ in own_process(where_states_are)} == {"amax_history", "multiplier"}
    assert {kind for _, kind in own_process(where_states_are)} == {"R"}


def refused():
    f8titan = integration()
    config = config_of("llama3", f8.recipes.rowwise())
    with pytest.raises(ValueError, match="this config is already converted"):
        f8titan.convert(config, f8.recipes.rowwise())
    config.model_spec = None
    with pytest.raises(ValueError, match="has no model_spec"):
        f8titan.convert(config, f8.recipes.rowwise())


def refused_gather():
    ranks = SimpleNamespace(spmd_backend="spmd_types", fsdp_enabled=True)
    parallelize = integration().Float8Parallelize(lambda model, **kwargs: model, fsdp_float8_all_gather=True)
    with pytest.raises(ValueError, match=r"spmd_backend='spmd_types' hands FSDP2 a mesh.*Take 'partial_dtensor'"):
        parallelize(torch.nn.Linear(32, 32), parallel_dims=ranks, ac_config=None)


@needs_torchtitan
def test_codes_are_gathered_where_fsdp_has_a_mesh_of_its_own_only(own_process):
    own_process(refused_gather)


@needs_torchtitan
def test_a_config_that_cannot_be_converted_is_refused(own_process):
    own_process(refused)


def from_the_command_line(tmp_path):
    from torchtitan.config import ConfigManager

    registry = ModuleType("registry_of_a_test")
    registry.in_float8 = lambda: config_of("qwen3_moe", f8.recipes.rowwise(), folder=tmp_path)
    sys.modules[registry.__name__] = registry
    options = ["--training.steps", "7", "--metrics.log_freq", "3"]
    config = ConfigManager().parse_args(["--module", registry.__name__, "--config", "in_float8", *options])
    assert (config.training.steps, config.metrics.log_freq) == (7, 3)
    assert config.metrics.float8.to_dict() == {"has_quantization": True}
    assert config.model_spec.model.float8.to_dict()["recipe"] == "rowwise"
    ConfigManager().parse_args(["--module", registry.__name__, "--config", "in_float8", "activation_checkpoint:none"])


@needs_torchtitan
def test_torchtitans_command_line_takes_a_converted_config(own_process, tmp_path):
    own_process(from_the_command_line, str(tmp_path))


def losses(model, recipe, options):
    trainer = train(config_of(model, recipe, **options))
    assert trainer.metrics_processor.has_quantization is (recipe is not None)
    return losses_of(trainer)


@needs_torchtitan
def test_a_recipe_without_quantizers_trains_to_the_bits_of_bf16(own_process):
    assert own_process(losses, "llama3", f8.Recipe(), {}) == own_process(losses, "llama3", None, {})


@needs_torchtitan
def test_experts_train_in_float8_near_bf16(own_process):
    in_float8, in_bf16 = (own_process(losses, "deepseek_v3", recipe, {}) for recipe in (f8.recipes.rowwise(), None))
    assert in_float8 != in_bf16
    assert in_float8 == pytest.approx(in_bf16, rel=APART)


def saved_and_loaded(model, folder, case="one"):
    """Names of parameters that are others in a bf16 model that loaded what one in FP8 saved."""
    config = config_of(model, f8.recipes.rowwise(), case=case, folder=folder)
    config.checkpoint.enable, config.checkpoint.last_save_model_only = True, True
    config.checkpoint.export_dtype = "float32"  # that of qwen3_moe's own config is float16, which rounds
    trainer = train(config)
    trainer.checkpointer.close()
    other = config_of(model, case=case)
    other.training.steps, other.checkpoint.enable = 0, True
    other.checkpoint.initial_load_path = f"{folder}/checkpoint/step-2"
    saved, loaded = trainer.model_parts[0].state_dict(), train(other).model_parts[0].state_dict()
    assert saved.keys() == loaded.keys()
    return [name for name in saved if not torch.equal(saved[name].full_tensor(), loaded[name].full_tensor())]


@needs_torchtitan
def test_a_checkpoint_of_a_float8_model_loads_into_that_in_bf16(own_process, tmp_path):
    assert own_process(saved_and_loaded, "llama3", str(tmp_path)) == []


# ------------------------------------------------------------------------------------------------- ranks


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_models_train_with_fsdp_and_tensor_parallel(model):
    in_float8 = shared_ranks().run(losses, model, f8.recipes.rowwise(), {"case": "fsdp2_tp2"}, seconds=900)
    in_bf16 = shared_ranks().run(losses, model, None, {"case": "fsdp2_tp2"}, seconds=900)
    assert in_float8[0] == pytest.approx(in_bf16[0], rel=APART)


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_of_ranks_in_float8_loads_into_those_in_bf16(model, tmp_path):
    found = shared_ranks().run(saved_and_loaded, model, str(tmp_path), "fsdp2_tp2", seconds=900)
    assert found == [[]] * 4


@needs_torchtitan
@pytest.mark.slow
@pytest.mark.skipif(TORCH_VERSION < (2, 15), reason="torchtitan 0.3.0 goes with spmd_types on PyTorch 2.15")
def test_experts_spread_over_ranks_train_and_are_typechecked_under_spmd_types():
    options = {"steps": 2, "backend": None, "spmd_backend": "spmd_types", "typechecked": True}
    args = {"options": options, "gather": False, "without_checkpointing": False}
    in_bf16, in_float8 = (row_of("ep2", "qwen3_moe", recipe, args) for recipe in ("bf16", "rowwise"))
    assert [in_float8[step] for step in "12"] == pytest.approx([in_bf16[step] for step in "12"], rel=APART)
    assert in_float8["1"] != in_bf16["1"]
