"""Rules for modules by name: what they mean, what is refused before anything is spent, and what readers are told."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_targets

from tasks import preflight, ruled_modules
from tasks.formats.gguf_plan import make_plan
from tasks.job import QuantizationJob
from tasks.models.source import SourceModel
from tasks.module_rules import ModuleConfigs
from tasks.quantization import AWQConfig, BitsAndBytesConfig, FP8Config, GGUFConfig, GPTQConfig, Quantization, RTNConfig
from tasks.schemes import decoder_of, scheme_of
from tests.flow_jobs import LAYERS, tiny_job
from tests.tiny_families import write_tiny
from tests.tiny_models import write_tiny_llama

ATTENTION, MLP = r".*self_attn\.[qkv]_proj", r".*mlp\.(gate|up)_proj"
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", layers=LAYERS)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3_moe", tmp_path_factory.mktemp("model") / "tiny")


def problems(model: Path, place: Path, quantization: Quantization) -> list[str]:
    with pytest.raises(preflight.PreflightError) as refused:
        preflight.check(tiny_job(model, place, quantization=quantization))
    return list(refused.value.problems)


def described(model: Path, quantization: Quantization) -> dict[str, Any]:
    """`quantization_config` of an export."""
    source = SourceModel.open(str(model))
    decoder, scheme = decoder_of(quantization, source), scheme_of(quantization, source)
    told = ruled_modules.tell(scheme.quantization_config(), quantization, decoder)
    return scheme.leave_out(told, decoder.kept_modules)


# What rules mean ------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_matches_at_the_start_of_the_full_name_decides():
    rules = {
        r"-:model\.layers\.1\.": {},
        r"+:model\.layers\.(1|2)\.mlp\.down": {"bits": 8, "group_size": 32},
        r".*down_proj": {"sym": False},
        r"down_proj": {"bits": 2},
    }
    configs = ModuleConfigs(GPTQConfig(dynamic=rules, damp_percent=0.1))
    base = GPTQConfig(damp_percent=0.1)
    assert configs.of(DOWN) is None
    assert configs.of("model.layers.2.mlp.down_proj") == base.model_copy(update={"bits": 8, "group_size": 32})
    assert configs.of("model.layers.12.mlp.down_proj") == base.model_copy(update={"sym": False})
    assert configs.of("model.layers.12.mlp.up_proj") == base


def test_an_order_of_columns_that_a_rule_asks_for_replaces_the_default_order():
    config = ModuleConfigs(GPTQConfig(dynamic={".*": {"desc_act": True}})).of(DOWN)
    assert config.desc_act and not config.act_group_aware


def test_a_mapping_and_a_list_are_one_and_the_order_outlives_json():
    mapping = {"-:b": {}, "a": {"bits": 8}, "c": {"group_size": 64}}
    listed = [{"pattern": "-:b"}, {"pattern": "a", "bits": 8}, {"pattern": "c", "group_size": 64}]
    assert GPTQConfig(dynamic=mapping) == GPTQConfig(dynamic=listed)
    assert GPTQConfig(dynamic=None) == GPTQConfig(dynamic={}) == GPTQConfig()
    job = QuantizationJob(model="a", output="b", quantization=RTNConfig(dynamic=mapping))
    assert QuantizationJob.model_validate_json(json.dumps(job.model_dump(mode="json"), sort_keys=True)) == job


@pytest.mark.parametrize(
    ("config", "rules", "reason"),
    [
        (GPTQConfig, {"-:a": {"bits": 8}}, "leaves modules as they are, and gives them bits"),
        (GPTQConfig, {"(": {}}, "no regular expression"),
        (GPTQConfig, {"+:": {}}, "no expression after its sign"),
        (GPTQConfig, {"a": 8}, "write a mapping"),
        (GPTQConfig, {"a": {"bits": 5}}, "2, 3, 4 or 8"),
        (GPTQConfig, {"a": {"group_size": 0}}, "rule `a`: group_size 0"),
        (GPTQConfig, {"a": {"desc_act": True, "act_group_aware": True}}, "rule `a`: desc_act and act_group_aware"),
        (
            RTNConfig,
            {"a": {"desc_act": True}},
            "rule `a` has desc_act; rules of this method may give modules bits, group_size",
        ),
        (AWQConfig, {"a": {"bits": 8}}, "rule `a` has bits; rules of this method may only leave modules as they are"),
        (GGUFConfig, {"a": {"bits": 8}}, "may give modules quant_type, or leave them as they are, with `-:` before"),
        (lambda dynamic: RTNConfig(checkpoint_format="awq", dynamic=dynamic), {"a": {"bits": 8}}, "one grid for all"),
        (AWQConfig, {"a": {}}, "only rules with `-:`"),
        (FP8Config, {"a": {}}, "only rules with `-:`"),
        (BitsAndBytesConfig, {"a": {}}, "only rules with `-:`"),
        (GGUFConfig, {"a": {"quant_type": "q4_k_m"}}, "'q2_k'"),
    ],
)
def test_rules_that_can_not_be_are_refused_with_the_job(config: Any, rules: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        config(dynamic=rules)


# What preflight tells -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ({"-:model.embed_tokens": {}}, "rule `-:model.embed_tokens` matches no linear in a layer"),
        ({"-:down_proj": {}}, "matched at the start of full names, such as `model.layers.0.self_attn.q_proj`"),
        ({".*down_proj": {"bits": 8}, r"-:.*\.1\.mlp\.down": {}}, "earlier rules match all that it matches"),
        ({"-:.*": {}}, "leave every module as it is"),
        ({r"-:.*v_proj": {}}, "model.layers.0.self_attn.qkv_proj, model.layers.1.self_attn.qkv_proj, "),
        ({r"-:.*v_proj": {}}, "`q_proj` has 4 bits, group_size 32, symmetric, `v_proj` is left as it is"),
        ({r".*0\.mlp\.up_proj": {"bits": 8}}, "model.layers.0.mlp.gate_up_proj: `gate_proj` has 4 bits"),
        ({r".*down_proj": {"group_size": 48}}, "in_features 128 is not a multiple of group_size 48"),
        ({r".*[12]\.mlp\.down": {"group_size": 48}}, "`mlp.down_proj (layers 1-2)`: in_features 128"),
    ],
)
def test_rules_that_do_not_fit_the_model_are_refused_before_anything_is_spent(
    rules: dict[str, Any], reason: str, model: Path, tmp_path: Path
) -> None:
    (problem,) = problems(model, tmp_path, GPTQConfig(group_size=32, dynamic=rules))
    assert reason in problem


@pytest.mark.parametrize("rule", [{r".*experts\.3\.": {"bits": 8}}, {r"-:.*experts\.\d+\.down_proj": {}}])
def test_experts_of_one_layer_that_differ_are_refused(rule: dict[str, Any], mixture: Path, tmp_path: Path) -> None:
    (problem,) = problems(mixture, tmp_path, RTNConfig(group_size=32, dynamic=rule))
    assert "fuse into one, model.layers.0.mlp.experts, model.layers.2.mlp.experts: `" in problem


def test_what_loaders_do_not_see_may_differ_among_fused_modules(model: Path, tmp_path: Path) -> None:
    rules = {".*v_proj": {"damp_percent": 0.2}, ".*q_proj": {"mse": 2.4}}
    preflight.check(tiny_job(model, tmp_path, quantization=GPTQConfig(group_size=32, dynamic=rules)))


def test_the_plan_counts_what_each_rule_makes_of_its_modules(model: Path, tmp_path: Path) -> None:
    rules = {r"-:model\.layers\.0\.": {}, r".*\.1\.mlp\.down_proj": {"bits": 8}}
    plan = preflight.check(tiny_job(model, tmp_path, quantization=RTNConfig(group_size=32, dynamic=rules)))
    kinds = {kind.name: (kind.count, round(kind.bits_per_weight)) for kind in plan.modules}
    assert kinds["mlp.down_proj (layer 1)"][0] == kinds["mlp.down_proj (layer 2)"][0] == 1
    assert kinds["mlp.down_proj (layer 1)"][1] - kinds["mlp.down_proj (layer 2)"][1] == 4
    assert kinds["mlp.up_proj"][0] == 2
    assert plan.bytes_before == sum(info.size_bytes for info in SourceModel.open(str(model)).tensors.values())
    assert "2 rules for modules" in plan.summary
    assert any("transformers takes one width" in note for note in plan.notes)


# What readers are told ------------------------------------------------------------------------------------------------


def test_a_gptq_file_has_the_rules_and_before_them_one_for_each_fused_name(model: Path) -> None:
    rules = {rf"-:{ATTENTION}": {}, r".*0\.mlp\.(gate|up)_proj": {"bits": 8, "sym": False}}
    told = described(model, GPTQConfig(group_size=32, dynamic=rules))
    eight = {"bits": 8, "group_size": 32, "sym": False, "desc_act": False}
    assert list(told["dynamic"].items()) == [
        (r"-:model\.layers\.\d+\.self_attn\.qkv_proj$", {}),
        (r"model\.layers\.(0)\.mlp\.gate_up_proj$", eight),
        (rf"-:{ATTENTION}", {}),
        (r".*0\.mlp\.(gate|up)_proj", {"bits": 8, "sym": False}),
    ]
    assert "gptqmodel:0.9.0" in told["meta"]["quantizer"]
    assert told["modules_in_block_to_quantize"] == [
        ["self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    ]
    assert described(model, GPTQConfig(group_size=32)).keys().isdisjoint({"dynamic", "modules_in_block_to_quantize"})


def test_a_file_with_a_quantized_head_lists_no_modules_for_transformers_which_does_not_load_it(model: Path) -> None:
    rules = {r"-:.*down_proj": {}, "lm_head": {"bits": 8}}
    told = described(model, GPTQConfig(group_size=32, lm_head=True, dynamic=rules))
    assert told["lm_head"] and "modules_in_block_to_quantize" not in told


def test_a_rule_that_knows_fused_names_needs_no_other_and_experts_have_theirs(mixture: Path) -> None:
    rules = {r"-:model\.layers\.\d+\.self_attn": {}, r".*mlp\.experts\.\d+\.": {"bits": 8}}
    told = described(mixture, RTNConfig(group_size=32, dynamic=rules))
    assert list(told["dynamic"]) == [r"model\.layers\.(0|2)\.mlp\.experts$", *rules]
    assert "modules_in_block_to_quantize" not in told, "vLLM would look for fused experts in it"


def test_readers_are_told_the_order_that_they_have_to_follow(model: Path) -> None:
    rules = {".*o_proj": {"desc_act": True}, ".*down_proj": {"desc_act": True, "static_groups": True}}
    told = described(model, GPTQConfig(group_size=32, dynamic=rules))["dynamic"]
    assert told[".*o_proj"]["desc_act"] and not told[".*down_proj"]["desc_act"]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_compressed_tensors_finds_the_scheme_of_every_module(family: str, tmp_path: Path) -> None:
    model = write_tiny(family, tmp_path / "model")
    rules = {r"-:.*0\.self_attn": {}, r".*mlp\.experts": {"bits": 8}, r".*down_proj": {"sym": False, "group_size": -1}}
    quantization = RTNConfig(group_size=32, checkpoint_format="compressed-tensors", dynamic=rules)
    if family == "llama":
        quantization = RTNConfig.model_validate(quantization.model_dump() | {"dynamic": quantization.dynamic[::2]})
    told = described(model, quantization)
    read = QuantizationConfig.model_validate(told)
    assert "dequantize" not in told and len(read.config_groups) == (2 if family == "llama" else 3)
    groups = {target: group.weights for group in read.config_groups.values() for target in group.targets}
    decoder, configs = decoder_of(quantization, SourceModel.open(str(model))), ModuleConfigs(quantization)
    for i in range(decoder.layer_count):
        for name in (name for subset in decoder.linears_by_input(i) for name in subset):
            full = f"{decoder.layer_name(i)}.{name}"
            config, matched = configs.of(full), match_targets(full, None, groups)
            assert (full in read.ignore) == (config is None) == (not matched), full
            if config is not None:
                (target,) = matched
                weights = groups[target]
                assert (weights.num_bits, weights.symmetric) == (config.bits, config.sym), full
                assert (weights.group_size or -1) == config.group_size, full


def test_a_file_of_one_scheme_says_what_it_would_say_without_rules(model: Path) -> None:
    plain = RTNConfig(sym=False, group_size=32, checkpoint_format="compressed-tensors")
    ruled = RTNConfig.model_validate(plain.model_dump() | {"dynamic": {rf"-:{ATTENTION}": {}}})
    told, without = described(model, ruled), described(model, plain)
    assert told | {"ignore": without["ignore"]} == without
    assert len(told["ignore"]) == 1 + 3 * LAYERS


@pytest.mark.parametrize(
    ("quantization", "key"),
    [
        (AWQConfig(group_size=32, dynamic={rf"-:{ATTENTION}": {}}), "modules_to_not_convert"),
        (FP8Config(dynamic={rf"-:{ATTENTION}": {}}), "ignore"),
        (BitsAndBytesConfig(dynamic={rf"-:{ATTENTION}": {}}), "llm_int8_skip_modules"),
    ],
)
def test_layouts_without_rules_list_what_is_left_as_it_is(quantization: Quantization, key: str, model: Path) -> None:
    told = described(model, quantization)
    left = [f"model.layers.{i}.self_attn.{name}_proj" for i in range(LAYERS) for name in "qkv"]
    assert [name for name in told[key] if name != "lm_head"] == left
    assert "dynamic" not in told


# GGUF -----------------------------------------------------------------------------------------------------------------


def test_a_gguf_file_gives_matrices_the_types_of_their_rules() -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}
    names = [*(f"model.layers.{i}.mlp.{name}_proj" for i in range(2) for name in ("up", "down")), "lm_head"]
    shapes = {f"{name}.weight": (256, 256) for name in [*names, "model.embed_tokens"]} | {"model.norm.weight": (256,)}
    rules = {
        r"-:.*0\.mlp\.up": {},
        r".*down": {"quant_type": "q6_k"},
        "lm_head": {"quant_type": "q8_0"},
        "model.embed": {"quant_type": "f32"},
    }
    plan = make_plan(GGUFConfig(quant_type="q4_0", dynamic=rules), config, shapes)
    types = {tensor.source: tensor.actual for tensor in plan.tensors}
    assert types == {
        "model.embed_tokens.weight": "f32", "model.layers.0.mlp.up_proj.weight": "f16",
        "model.layers.1.mlp.up_proj.weight": "q4_0", "model.layers.0.mlp.down_proj.weight": "q6_k",
        "model.layers.1.mlp.down_proj.weight": "q6_k", "lm_head.weight": "q8_0", "model.norm.weight": "f32",
    }  # fmt: skip
    with pytest.raises(ValueError, match=r"rule `-:model\.norm` matches no matrix"):
        make_plan(GGUFConfig(dynamic={"-:model.norm": {}}), config, shapes)
