"""Which modules each server loads in FP8, and under which names, with the file and line of its loader.

    layer of a checkpoint --module_of--> linear, experts, head, ... --the server's row--> parameters that it loads

`check` compares the names in a folder with this table, and docs/serving.md shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from fp8compile.export.scheme import Format

__all__ = ["MODULES", "SERVERS", "TABLE", "Row", "fused_problems", "missing_parameters", "module_of", "row_of"]

SERVERS = {"vllm": "vLLM 0.33.0", "sglang": "SGLang 0.5.23", "transformers": "transformers 5.24.0"}
MODULES = ("linear", "experts", "head", "router", "embedding")

# A section is a server, a format and the folder of its loader. A row is a module, the kinds of weights (see
# scheme.KINDS), the suffixes of the names that are loaded, and file and line. "-": in high precision only. Rows with
# classes of config.json hold for these instead of the others of the same module. A format "*" is every format.
TEXT = """
[vllm fine_grained_fp8 model_executor/layers/quantization]
linear | block* | weight weight_scale_inv | fp8.py:315,339
linear | tensor static_tensor | weight weight_scale input_scale | fp8.py:315,326,345
experts | block* | weight weight_scale_inv | fp8.py:612-638
experts | tensor | weight weight_scale | fp8.py:612-638
head | - | weight | fp8.py:177-208
linear Mistral3ForConditionalGeneration | tensor static_tensor | weight weight_scale_inv activation_scale | ../../models/mistral3.py:444-450
[vllm compressed-tensors model_executor/layers/quantization/compressed_tensors]
linear | tensor static_tensor channel block* | weight weight_scale input_scale | schemes/compressed_tensors_w8a8_fp8.py:120-135
linear | mx | weight weight_scale | schemes/compressed_tensors_w8a8_mxfp8.py:65-77
linear | nvfp4 | weight_packed weight_scale weight_global_scale | schemes/compressed_tensors_w4a4_nvfp4.py:63-84
experts | tensor channel block* | weight weight_scale | compressed_tensors_moe/compressed_tensors_moe_w8a8_fp8.py:152-232
experts | mx | weight weight_scale | compressed_tensors_moe/compressed_tensors_moe_w8a8_mxfp8.py:70-109
experts | nvfp4 | weight_packed weight_scale weight_global_scale | compressed_tensors_moe/compressed_tensors_moe_w4a4_nvfp4.py:100-164
head | - | weight | compressed_tensors.py:186-193
[vllm modelopt model_executor/layers/quantization]
linear | static_tensor | weight weight_scale input_scale | modelopt.py:2144-2173
linear | channel | weight weight_scale | modelopt.py:2220-2238
linear | mx | weight weight_scale | modelopt.py:2340-2353
linear | nvfp4 | weight weight_scale weight_scale_2 | modelopt.py:2031-2065
experts | mx | weight weight_scale | modelopt.py:1347-1388
experts | nvfp4 | weight weight_scale weight_scale_2 | modelopt.py:944-1003
head | static_tensor | weight weight_scale input_scale | modelopt.py:254-255
head | channel mx | weight weight_scale | modelopt.py:254-255
head | nvfp4 | weight weight_scale weight_scale_2 | modelopt.py:254-255
[vllm * model_executor/models]
experts GptOssForCausalLM | - | weight | gpt_oss.py:73-82,1258-1283
head GptOssForCausalLM | - | weight | gpt_oss.py:1417-1421
router | - | weight | qwen3_moe.py:170-175, deepseek_v2.py:321-326, gpt_oss.py:382-388
embedding | - | weight | ../layers/vocab_parallel_embedding.py:318-321
[sglang fine_grained_fp8 srt/layers/quantization]
linear | block* | weight weight_scale_inv | fp8.py:665,689
linear | tensor static_tensor | weight weight_scale input_scale | fp8.py:665,696,712
linear LlamaForCausalLM,MistralForCausalLM,Ministral3ForCausalLM,Phi3ForCausalLM | tensor static_tensor | weight weight_scale_inv activation_scale | ../../models/llama.py:721-724
experts | block* | weight weight_scale_inv | fp8.py:1720-1746
experts | tensor | weight weight_scale | fp8.py:1750-1761
head | - | weight | fp8.py:396-475
[sglang compressed-tensors srt/layers/quantization/compressed_tensors]
linear | tensor static_tensor channel block* | weight weight_scale input_scale | schemes/compressed_tensors_w8a8_fp8.py:104-145
linear | nvfp4 | weight_packed weight_scale weight_global_scale | schemes/compressed_tensors_w4a16_nvfp4.py:167-185
experts | tensor channel block* | weight weight_scale | schemes/compressed_tensors_w8a8_fp8_moe.py:144-212
experts | nvfp4 | weight_packed weight_scale weight_global_scale | schemes/compressed_tensors_w4a16_nvfp4_moe.py:86-142
head | - | weight | compressed_tensors.py:1095-1142
[sglang modelopt srt/layers/quantization]
linear | static_tensor | weight weight_scale input_scale | modelopt_quant.py:586-609
linear | mx | weight weight_scale | ../../model_loader/loader.py:1052-1060, fp8.py:665,689
linear | nvfp4 | weight weight_scale weight_scale_2 | modelopt_quant.py:2238-2257
experts | mx | weight weight_scale | ../../model_loader/loader.py:1052-1060, fp8.py:1720-1746
experts | nvfp4 | weight weight_scale weight_scale_2 | modelopt_quant.py:2520-2607
head | static_tensor | weight weight_scale input_scale | modelopt_quant.py:341-346
head | nvfp4 | weight weight_scale weight_scale_2 | modelopt_quant.py:341-346
[sglang * srt/models]
experts GptOssForCausalLM | - | weight | gpt_oss.py:1215-1268
head GptOssForCausalLM | - | weight | gpt_oss.py:768-774
router | - | weight | qwen3_moe.py:285-296, deepseek_v2.py:509-517
embedding | - | weight | ../layers/quantization/fp8.py:396-475
[transformers fine_grained_fp8 integrations]
linear | block* | weight weight_scale_inv | finegrained_fp8.py:408-420
linear | tensor static_tensor | weight weight_scale_inv activation_scale | finegrained_fp8.py:408-423
experts | block* tensor | weight weight_scale_inv | finegrained_fp8.py:962-980
head | block* | weight weight_scale_inv | finegrained_fp8.py:956-990
head | tensor static_tensor | weight weight_scale_inv activation_scale | finegrained_fp8.py:956-990
[transformers compressed-tensors quantizers]
linear | channel | weight weight_scale | quantizer_compressed_tensors.py:92-121
experts | - | weight | quantizer_compressed_tensors.py:92-121
head | channel | weight weight_scale | quantizer_compressed_tensors.py:92-121
[transformers modelopt quantizers]
linear | - | weight | auto.py:77-110
experts | - | weight | auto.py:77-110
head | - | weight | auto.py:77-110
[transformers * models]
experts GptOssForCausalLM | - | weight | gpt_oss/modeling_gpt_oss.py:69-78
router | - | weight | qwen3_moe/modeling_qwen3_moe.py:257
embedding | - | weight | ../integrations/finegrained_fp8.py:956-982
"""  # noqa: E501 - a row is one line


@dataclass(frozen=True, kw_only=True)
class Row:
    """The parameters that a server loads for a kind of module.

    Attributes:
        server: A key of `SERVERS`.
        format: Name of a format, or ``"*"`` for all.
        module: One of `MODULES`.
        architectures: Classes in config.json for which the row holds; () for all without a row of their own.
        kinds: Patterns of kinds of weights; ``("-",)`` if the server loads the module in high precision only.
        suffixes: Suffixes of the names in a checkpoint that the server loads.
        source: File and line in the server's package.
    """

    server: str
    format: str
    module: str
    architectures: tuple[str, ...]
    kinds: tuple[str, ...]
    suffixes: tuple[str, ...]
    source: str


def _rows() -> Iterator[Row]:
    server = format = folder = ""
    for line in TEXT.strip().splitlines():
        if line.startswith("["):
            server, format, folder = line.strip("[]").split()
            continue
        module, kinds, suffixes, source = line.split(" | ")
        name, _, architectures = module.partition(" ")
        yield Row(
            server=server,
            format=format,
            module=name,
            architectures=tuple(architectures.split(",")) if architectures else (),
            kinds=tuple(kinds.split()),
            suffixes=tuple(f".{each}" for each in suffixes.split()),
            source=f"{folder}/{source}",
        )


TABLE: tuple[Row, ...] = tuple(_rows())


def module_of(name: str) -> str:
    """Return which of `MODULES` a layer of a checkpoint is, from its name without ``.weight``."""
    last = name.rpartition(".")[2]
    if re.search(r"\.experts\.\d+\.", name):
        return "experts"
    return {"lm_head": "head", "embed_tokens": "embedding", "gate": "router", "router": "router"}.get(last, "linear")


def row_of(server: str, format: str, kind: str, module: str, architecture: str = "") -> Row | None:
    """Return the row for a module's quantized weights; None if the server loads no such weights.

    ``architecture`` is the class in config.json; empty if it is not known.
    """
    rows = [row for row in TABLE if row.server == server and row.format in ("*", format) and row.module == module]
    found = [row for row in rows if architecture in row.architectures] or [
        row for row in rows if not row.architectures
    ]
    return next((row for row in found if any(fnmatchcase(kind, each) for each in row.kinds)), None)


def missing_parameters(server: str, format: Format, kinds: Mapping[str, str], architecture: str = "") -> list[str]:
    """Describe the parameters of a checkpoint that a server does not have; an empty list if it has all.

    Args:
        server: A key of `SERVERS`.
        format: The checkpoint's format.
        kinds: Kind of each quantized layer, by the layer's name in the checkpoint.
        architecture: The class in config.json; empty if it is not known.
    """
    found: dict[str, list[str]] = {}
    for name, kind in kinds.items():
        module, scheme = module_of(name), format.scheme(kind)
        assert scheme is not None
        row = row_of(server, format.name, kind, module, architecture)
        if row is None:
            found.setdefault(f"does not load {module} modules as {scheme.name}", []).append(name)
        elif missing := [each for each in scheme.names() if each not in row.suffixes]:
            reason = f"does not read {' and '.join(missing)} for a {module}; it reads {', '.join(row.suffixes)}"
            found.setdefault(reason, []).append(name)
    return [f"{SERVERS[server]} {reason} ({len(names)} layers, such as {names[0]})" for reason, names in found.items()]


def fused_problems(kinds: Mapping[str, str], stored: Sequence[str], fused: Sequence[Sequence[str]]) -> list[str]:
    """Describe layers that vLLM and SGLang load as one matrix although they are not quantized alike.

    Args:
        kinds: Kind of each quantized layer, by name.
        stored: Names of all layers with a weight.
        fused: Groups of last parts of names.
    """
    groups: dict[tuple[str, ...], dict[str, str]] = {}
    for name in stored:
        above, _, last = name.rpartition(".")
        experts = re.match(r".*\.experts(?=\.\d+\.)", name)
        for key in [(experts[0],)] if experts else [(above, *group) for group in fused if last in group]:
            groups.setdefault(key, {})[name] = kinds.get(name, "high precision")
    differ = [own for own in groups.values() if len(set(own.values())) > 1]
    return [
        "vLLM and SGLang load these layers as one, but they are not quantized alike: "
        + ", ".join(f"{name} as {how}" for how, name in {how: name for name, how in reversed(own.items())}.items())
        for own in differ
    ]
