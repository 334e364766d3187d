"""F8Config: from_pretrained loads, converts, trains, compiles and saves, with values or codes as parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import serving_models as models
import torch
import transformers
from torch import nn

import fp8compile as f8
from fp8compile.integrations import transformers as f8transformers
from fp8compile.integrations.recipe_json import recipe_from_json, recipe_to_json
from fp8compile.integrations.transformers import F8Config

RECIPES = {"rowwise": f8.recipes.rowwise(), "blockwise": f8.recipes.blockwise(), "nvfp4": f8.recipes.nvfp4()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folders of small models in bfloat16, by their kind."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("llama", "qwen3_moe", "tied"):
        models.make(kind).save_pretrained(root / kind)
    return root


def loaded(path, config=None):
    given = {} if config is None else {"quantization_config": config}
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, output_loading_info=True, **given
    )
    assert not [name for name, found in info.items() if found]
    return model


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("llama", "rowwise"),
        ("llama", "nvfp4"),
        ("qwen3_moe", "blockwise"),
        ("qwen3_moe", "nvfp4"),
        ("tied", "rowwise"),
    ],
)
def test_a_loaded_model_is_the_converted_one_and_comes_back(kind, recipe, codes, folder, tmp_path, assert_bits_equal):
    recipe = RECIPES[recipe]
    model = loaded(folder / kind, F8Config(recipe, weight_lifetime="parameter" if codes else None))
    wanted = models.logits(models.converted(models.make(kind), recipe, weight_lifetime="parameter" if codes else None))
    assert_bits_equal(models.logits(model), wanted)
    model.save_pretrained(tmp_path / "x")
    back = loaded(tmp_path / "x")  # config.json says how
    assert_bits_equal(models.logits(back), wanted)
    assert back.config.quantization_config.recipe == recipe
    weights = [each for layer in (model, back) for each in layer.model.layers[0].parameters() if each.ndim > 1]
    assert any(isinstance(each, f8.QuantizedTensor) for each in weights) == codes


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, row):
        return {"input_ids": models.IDS[0], "labels": models.IDS[0]}


@pytest.mark.parametrize("codes", [False, True])
def test_a_trainer_trains_saves_and_compiles_it(codes, folder, tmp_path, assert_bits_equal):
    model = loaded(folder / "llama", F8Config("blockwise", weight_lifetime="parameter" if codes else None))
    arguments = transformers.TrainingArguments(
        output_dir=tmp_path,
        max_steps=3,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    made = {"optimizer_cls_and_kwargs": f8transformers.master_weights(arguments)} if codes else {}
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows(), **made)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert losses[-1] < losses[0]
    trainer.save_model(tmp_path / "x")
    back = loaded(tmp_path / "x")
    assert_bits_equal(models.logits(back), models.logits(model))
    compiled = torch.compile(back.model.layers[0].mlp, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 128).bfloat16()
    assert_bits_equal(compiled(x), model.model.layers[0].mlp(x))


def test_options_are_in_the_config(folder, tmp_path):
    config = F8Config(
        {"*.mlp.*": f8.recipes.nvfp4(), "*": "rowwise"},
        filter=["*", "!lm_head"],
        share_outer_scale=[("gate_proj", "up_proj")],
    )
    model = loaded(folder / "llama", config)
    model.save_pretrained(tmp_path / "x")
    saved = json.loads((tmp_path / "x" / "config.json").read_text())["quantization_config"]
    assert saved["quant_method"] == "fp8compile"
    back = loaded(tmp_path / "x")
    mlp, attention = back.model.layers[0].mlp, back.model.layers[0].self_attn
    assert mlp.up_proj.recipe == f8.recipes.nvfp4()
    assert attention.q_proj.recipe == f8.recipes.rowwise()
    assert mlp.up_proj.scale_group == (mlp.gate_proj, mlp.up_proj)
    assert type(back.lm_head) is nn.Linear


@pytest.mark.parametrize("name", f8.recipes.READY)
def test_recipes_survive_json(name):
    recipe = f8.recipes.by_name(name)
    assert recipe_from_json(json.loads(json.dumps(recipe_to_json(recipe)))) == recipe


@dataclass(frozen=True, repr=False)
class Own(f8.CurrentScaling):
    """A quantizer of another package."""


def test_what_it_can_not_do_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="uses delayed scaling"):
        F8Config("delayed")
    with pytest.raises(ValueError, match="before the others are available"):
        F8Config("nvfp4", weight_lifetime="parameter", share_outer_scale=True)
    with pytest.raises(ValueError, match="no recipe"):
        F8Config("rowise")
    with pytest.raises(TypeError, match="`recipe` is 3"):
        F8Config(3)
    with pytest.raises(
        TypeError, match="got quantised_parameters=True, keep_ends=1, but the options are recipe, filter"
    ):
        F8Config("rowwise", quantised_parameters=True, keep_ends=1)
    with pytest.raises(TypeError, match="got quant_method='gptq'"):
        F8Config("rowwise", quant_method="gptq")
    with pytest.raises(TypeError, match="Own can't be written as JSON"):
        F8Config(f8.recipes.of_quantizer(Own()))
    with pytest.raises(ValueError, match="class 'Constant'"):
        recipe_from_json({"class": "Constant"})
    with pytest.raises(ValueError, match="a Recipe in JSON has the unknown fields wieght;"):
        recipe_from_json({"class": "Recipe", "wieght": None})
    bf16_wgrad = f8.Recipe(input=f8.CurrentScaling(), weight=f8.CurrentScaling())
    with pytest.raises(ValueError, match="leaves a GEMM of the weight in high precision"):
        loaded(folder / "llama", F8Config(bf16_wgrad, weight_lifetime="parameter"))


def test_configurations_of_earlier_versions_load():
    recipe = recipe_to_json(f8.recipes.nvfp4())
    recipe = {key: each for key, each in recipe.items() if key != "weight_lifetime"}
    of_file = {"quant_method": "fp8compile"}
    flags = {"keep_weight_codes": True, "cache_weights": False}
    config = F8Config({**recipe, **flags}, quantized_parameters=False, **of_file)
    assert (config.recipe, config.weight_lifetime) == (f8.recipes.nvfp4(), None)
    config = F8Config({**recipe, **flags, "cache_weights": True}, quantized_parameters=True, **of_file)
    assert (config.recipe, config.weight_lifetime) == (f8.recipes.nvfp4(weight_lifetime="step"), "parameter")
    assert config.to_dict()["weight_lifetime"] == "parameter"


def test_flags_of_earlier_versions_in_a_call_say_the_new_spelling():
    with pytest.warns(FutureWarning, match="Pass weight_lifetime='parameter' instead"):
        assert F8Config(quantized_parameters=True).weight_lifetime == "parameter"
    with pytest.raises(TypeError, match="cache_weights=True was replaced"):
        F8Config(cache_weights=True)


def test_a_recipe_of_fp8_parameters_is_refused_because_all_layers_are_quantized_while_loading():
    with pytest.raises(ValueError, match=r"Pass F8Config\(weight_lifetime='parameter'\)"):
        F8Config(f8.recipes.rowwise(weight_lifetime="parameter"))
