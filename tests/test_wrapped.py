"""Models that wrap a text model: its layers as every other family's, all else carried through, and told to readers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from flows.quantize_model import quantize_model
from tasks import preflight, ruled_modules
from tasks.calibration import CalibrationError
from tasks.evaluate import dense_model
from tasks.formats import gptq as gptq_layout
from tasks.formats import peft
from tasks.models.decoder import Decoder
from tasks.models.families import WRAPPERS
from tasks.models.replay import ReplayError, check_replay
from tasks.models.source import SourceError, SourceModel
from tasks.quantization import (
    AWQConfig,
    BitsAndBytesConfig,
    EoRAConfig,
    FP8Config,
    GGUFConfig,
    GPTQConfig,
    Quantization,
    RTNConfig,
)
from tasks.schemes import decoder_of as decoder_of_config
from tasks.schemes import scheme_of
from tests.flow_jobs import tiny_job
from tests.layer_runs import finished_layer
from tests.test_calibration import calibrate
from tests.test_families import change_config, change_tensors
from tests.test_family_flow import EIGHT_BITS, IDS, LOGITS_TOLERANCE, difference, exported, stopped_and_whole
from tests.tiny_wrapped import WRAPPED, write_wrapped

LAYERS_IN_FILES = {
    "saved": {"qwen2_vl": "model.layers", "qwen2_5_vl": "model.layers", "qwen3_vl": "model.language_model.layers"},
    "own": dict.fromkeys(WRAPPED, "model.language_model.layers"),
}
LAYERS_IN_FILES["hub"] = LAYERS_IN_FILES["saved"]
PREPROCESSING = ("preprocessor_config.json", "processor_config.json")


def decoder_of(path: Path) -> Decoder:
    return Decoder.from_source(SourceModel.open(str(path)))


def test_every_supported_wrapper_is_tested_here() -> None:
    assert set(WRAPPED) == WRAPPERS


@pytest.mark.parametrize("names", ["saved", "hub", "own"])
@pytest.mark.parametrize("family", sorted(WRAPPED))
def test_every_wrapper_replays_bit_for_bit_under_names_of_any_age(family: str, names: str, tmp_path: Path) -> None:
    """As a run checks it, and over all layers of the whole wrapper from its own loader, of which no tensor is left over."""
    path = write_wrapped(family, tmp_path / "model", names=names)
    decoder = decoder_of(path)
    check_replay(decoder)
    assert decoder.layer_name(1) == f"{LAYERS_IN_FILES[names].get(family, 'language_model.model.layers')}.1"
    in_layers = [name for i in range(decoder.layer_count) for name in decoder.layer_tensor_names(i)]
    everything = [*in_layers, *decoder.outer_tensor_names, *decoder.carried_tensor_names]
    assert sorted(everything) == sorted(decoder.source.tensors)
    assert sum("vis" in name or "projector" in name for name in everything) == len(decoder.carried_tensor_names) > 20
    model, loading = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), loading
    seen: list[Any] = []
    for i in range(decoder.layer_count):
        layer = model.get_submodule(decoder.own_layer_name(i))
        layer.register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    mask = torch.arange(30)[None] < torch.tensor([30, 21])[:, None]
    with torch.no_grad():
        model(IDS, attention_mask=mask, use_cache=False)
        hidden = seen[0][0]
        assert decoder.embed(IDS, torch.float32).equal(hidden)
        for i, (entering, leaving) in enumerate(seen):
            assert hidden.equal(entering)
            hidden = decoder.materialise(i, "cpu")(hidden, **decoder.call_arguments(i, hidden, mask))
            assert torch.equal(hidden, leaving), f"layer {i}"


def test_the_check_holds_the_replay_against_the_wrapper_and_names_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Decoder.call_arguments

    def without_windows(self: Decoder, i: int, *args: Any) -> dict[str, Any]:
        return honest(self, i, *args) | {"attention_mask": None}

    monkeypatch.setattr(Decoder, "call_arguments", without_windows)
    with pytest.raises(
        ReplayError, match=r"`attention_mask` given to `language_model\.model\.layers\.0`|differs|steps"
    ):
        check_replay(decoder_of(write_wrapped("gemma3", tmp_path / "model")))


def test_a_missing_and_a_surplus_tensor_of_a_tower_are_told_by_the_files_names(tmp_path: Path) -> None:
    path = write_wrapped("gemma3", tmp_path / "model", names="hub")
    tower = "vision_tower.vision_model.encoder.layers"

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        # Which old files have, and the model computes.
        tensors["vision_tower.vision_model.embeddings.position_ids"] = torch.arange(16)[None]
        tensors[f"{tower}.7.mlp.fc1.weight"] = tensors[f"{tower}.1.mlp.fc1.weight"].clone()
        del tensors["multi_modal_projector.mm_soft_emb_norm.weight"]

    change_tensors(path, spoil)
    with pytest.raises(SourceError) as caught:
        decoder_of(path)
    assert sorted(caught.value.problems) == [
        "`multi_modal_projector.mm_soft_emb_norm.weight` is missing",
        f"`{tower}.7.mlp.fc1.weight` is unexpected",
    ]


@pytest.mark.parametrize("family", sorted(WRAPPED))
def test_preflight_plans_a_wrapper_and_a_layer_of_it_is_quantized(family: str, tmp_path: Path) -> None:
    model = write_wrapped(family, tmp_path / "model")
    plan = preflight.check(tiny_job(model, tmp_path))
    assert plan.family == family and plan.layer_count == 3
    assert any(f"this {family} wraps a text model" in note and "are carried through" in note for note in plan.notes)
    assert plan.bytes_before == sum(info.size_bytes for info in SourceModel.open(str(model)).tensors.values())
    work, packed = finished_layer(model, tmp_path, 1, 2, calibration={"samples": 2}, quantization=EIGHT_BITS)
    assert len([name for name in packed if name.endswith(".qweight")]) == len(work.quantized) == 7
    assert all(hidden.isfinite().all() for hidden in work.outputs.values())


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("family, names", [("gemma3", "hub"), ("mistral3", "saved"), ("qwen2_5_vl", "saved")])
def test_a_wrapper_is_stopped_gone_on_with_exported_and_read(family: str, names: str, tmp_path: Path) -> None:
    model = write_wrapped(family, tmp_path / "model", names=names)
    job = stopped_and_whole(model, tmp_path, EIGHT_BITS)
    assert difference(job.output, model) < LOGITS_TOLERANCE
    tensors, source, decoder = exported(job), SourceModel.open(str(model)), decoder_of(model)
    linears = {
        f"{decoder.layer_name(i)}.{name}" for i in range(decoder.layer_count) for name in decoder.linear_shapes(i)
    }
    # By the names of transformers' modules, as GPTQModel wants them.
    packed = {name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")}
    assert packed == {decoder.own_name(name) for name in linears}
    assert all(name.startswith("model.language_model.layers.") for name in packed)
    for name in linears:
        dense = gptq_layout.unpack(tensors, decoder.own_name(name), EIGHT_BITS).dequantize()
        weight = source.load([f"{name}.weight"])[f"{name}.weight"].float()
        assert (dense - weight).norm() < 0.02 * weight.norm(), name
    kept = {name for name in source.tensors if name.rpartition(".")[0] not in linears}
    assert all(tensors[decoder.own_name(name)].equal(source.load([name])[name]) for name in kept)
    biases = {name for name in source.tensors if name.endswith(".bias")} - kept
    assert len(tensors) == len(kept) + len(biases) + 3 * 7 * 4
    for file in PREPROCESSING:
        assert (Path(job.output) / file).read_bytes() == (model / file).read_bytes()
    described, before = (json.loads((Path(place) / "config.json").read_text()) for place in (job.output, model))
    assert described["model_type"] == family and described["architectures"] == before["architectures"]
    assert described["text_config"] == before["text_config"] and described["vision_config"] == before["vision_config"]
    assert described["quantization_config"]["bits"] == 8 and described["dtype"] == "bfloat16"


COMPRESSED = RTNConfig(group_size=32, checkpoint_format="compressed-tensors")
READ: list[tuple[str, str, Quantization, float]] = [
    ("gemma3", "hub", COMPRESSED, 1e-5),
    ("mistral3", "own", COMPRESSED, 1e-5),
    ("qwen2_5_vl", "saved", COMPRESSED, 1e-5),
    ("qwen3_vl", "saved", FP8Config(), 1e-2),  # a rounded activation next to a tie is another in a sum of another order
    ("gemma3", "saved", FP8Config(), 1e-2),
    # Its kernels compute in bfloat16 where the CPU has that.
    ("llava", "hub", BitsAndBytesConfig(compute_dtype="float32"), 2e-2),
    ("qwen2_vl", "saved", BitsAndBytesConfig(quant_type="int8"), 4e-2),  # activations are rounded to 8 bits
]


@pytest.mark.usefixtures("prefect_server")
@pytest.mark.parametrize("family, names, quantization, tolerance", READ)
def test_transformers_loads_a_wrapper_and_computes_what_its_export_says(
    family: str, names: str, quantization: Quantization, tolerance: float, tmp_path: Path
) -> None:
    """Nothing missing, unexpected or quantized beside the text model's linears, and the logits of our own reading."""
    # transformers leaves what is not quantized in the dtype of the file here, whatever dtype is asked for.
    dtype = torch.float32 if isinstance(quantization, BitsAndBytesConfig) else torch.bfloat16
    model = write_wrapped(family, tmp_path / "model", names=names, dtype=dtype)
    job = tiny_job(model, tmp_path, quantization=quantization)
    quantize_model(job)
    rounds = isinstance(quantization, FP8Config)
    assert text_linears_read(job.output, tolerance, rounds) == {"model.language_model"}
    kept = [name for name in SourceModel.open(str(model)).tensors if "vis" in name or "projector" in name]
    assert set(kept) < exported(job).keys()  # under the files' own names


@pytest.mark.usefixtures("prefect_server")
def test_blocks_of_fp8_of_a_wrapper_are_read_where_its_sizes_allow_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}
    model = write_wrapped("mistral3", tmp_path / "model", **sizes)
    job = tiny_job(model, tmp_path, quantization=FP8Config(granularity="block", checkpoint_format="fp8"))
    quantize_model(job)
    assert text_linears_read(job.output, 1e-5) == set()  # on a CPU the weights are widened as they are loaded


def text_linears_read(output: str, tolerance: float, rounds_activations: bool = False) -> set[str]:
    """Where in the model that transformers makes of an export linears were replaced, once it computes what the file says."""
    loaded, info = AutoModelForImageTextToText.from_pretrained(output, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    changed = {
        name.rpartition(".layers.")[0]
        for name, module in loaded.named_modules()
        if isinstance(module, torch.nn.Linear)
        and (type(module) is not torch.nn.Linear or hasattr(module, "quantization_scheme"))
    }
    dense = dense_model(output)
    for name, module in dense.named_modules() if rounds_activations else ():
        if isinstance(module, torch.nn.Linear) and "language_model.layers." in name:
            module.register_forward_pre_hook(lambda _, args: (rounded_to_fp8(args[0]),))
    with torch.no_grad():
        found, expected = loaded.eval()(IDS).logits.float(), dense(IDS).logits
    assert float((found - expected).norm() / expected.norm()) < tolerance
    return changed


def rounded_to_fp8(x_BTK: torch.Tensor) -> torch.Tensor:
    """As readers of FP8 files round what enters a linear: with one scale per token."""
    scale_BT1 = x_BTK.abs().amax(dim=-1, keepdim=True) / 448
    return (x_BTK / scale_BT1).to(torch.float8_e4m3fn).float() * scale_BT1


@pytest.mark.parametrize("names", ["saved", "own"])
def test_readers_are_told_of_towers_by_the_names_that_they_look_for(names: str, tmp_path: Path) -> None:
    model = write_wrapped("gemma3", tmp_path / "model", names=names)
    source = SourceModel.open(str(model))
    for quantization, key in (
        (RTNConfig(group_size=32, checkpoint_format="compressed-tensors"), "ignore"),
        (FP8Config(granularity="block", checkpoint_format="fp8"), "modules_to_not_convert"),
        (BitsAndBytesConfig(), "llm_int8_skip_modules"),
        (RTNConfig(group_size=32, checkpoint_format="awq"), "modules_to_not_convert"),
    ):
        left = described(quantization, source)[key]
        assert len([name for name in left if name.startswith("model.vision_tower.encoder.layers.")]) == 12
        assert set(left) - {"lm_head"} == {name for name in left if "vision_tower" in name}
    (rule,) = described(RTNConfig(group_size=32), source)["dynamic"]
    for prefix in ("", "model."):
        assert rule_matches(rule, f"{prefix}vision_tower.vision_model.encoder.layers.0.mlp.fc1")
        assert rule_matches(rule, f"{prefix}multi_modal_projector.linear_1")
    assert not rule_matches(rule, "model.language_model.layers.0.mlp.down_proj")


def described(quantization: Quantization, source: SourceModel) -> dict[str, Any]:
    decoder, scheme = decoder_of_config(quantization, source), scheme_of(quantization, source)
    told = ruled_modules.tell(scheme.quantization_config(), quantization, decoder)
    return scheme.leave_out(told, decoder.kept_modules)


def rule_matches(pattern: str, module: str) -> bool:
    assert pattern.startswith("-:")
    return re.match(pattern.removeprefix("-:"), module) is not None


def test_rules_go_by_the_names_in_the_files_and_reach_readers_under_all_that_they_know(tmp_path: Path) -> None:
    source = SourceModel.open(str(write_wrapped("gemma3", tmp_path / "model")))
    rules: dict[str, Any] = {
        r"-:language_model\.model\.layers\.0\.self_attn": {},
        r".*\.down_proj": {"bits": 8},
    }
    others = ("language_model.model", "model.language_model")
    quantization = RTNConfig.model_validate({"group_size": 32, "dynamic": rules})
    assert not list(ruled_modules.problems(quantization, decoder_of_config(quantization, source)))
    told = described(quantization, source)["dynamic"]
    for prefix in others:
        for name, expected in (
            ("layers.0.self_attn.q_proj", "skipped"),
            ("layers.0.mlp.down_proj", {"bits": 8}),
            ("layers.1.self_attn.q_proj", None),
        ):
            matching = [key for key in told if re.match(key.removeprefix("-:"), f"{prefix}.{name}")]
            found = None if not matching else "skipped" if matching[0].startswith("-:") else told[matching[0]]
            assert found == expected, (prefix, name)
    grouped = quantization.model_copy(update={"checkpoint_format": "compressed-tensors"})
    groups = described(grouped, source)["config_groups"].values()
    for prefix in others:
        for name, bits in (("layers.0.mlp.down_proj", 8), ("layers.2.self_attn.o_proj", 4)):
            held = [
                group["weights"]["num_bits"]
                for group in groups
                if any(re.match(target.removeprefix("re:"), f"{prefix}.{name}") for target in group["targets"])
            ]
            assert held == [bits]
    left = described(grouped, source)["ignore"]
    assert "model.language_model.layers.0.self_attn.q_proj" in left


def test_an_untied_head_of_a_wrapper_is_one_more_step_under_the_files_name(tmp_path: Path) -> None:
    quantization = GPTQConfig(group_size=32, lm_head=True)
    model = write_wrapped("mistral3", tmp_path / "model")
    decoder = decoder_of_config(quantization, SourceModel.open(str(model)))
    assert (decoder.head_name, decoder.own_name(decoder.head_name)) == ("language_model.lm_head", "lm_head")
    check_replay(decoder)
    preflight.check(tiny_job(model, tmp_path, quantization=quantization))
    _, packed = finished_layer(model, tmp_path, 1, 3, calibration={"samples": 2}, quantization=quantization)
    assert "lm_head.qweight" in packed


def test_scales_go_into_the_norms_of_a_wrappers_text_model(tmp_path: Path) -> None:
    model = write_wrapped("mistral3", tmp_path / "model")
    calibration = {"samples": 2}
    _, packed = finished_layer(model, tmp_path, 1, 1, calibration=calibration, quantization=AWQConfig(group_size=32))
    norm = load_file(model / "model.safetensors")["language_model.model.layers.1.input_layernorm.weight"]
    assert not packed["model.language_model.layers.1.input_layernorm.weight"].equal(norm)
    assert "model.language_model.layers.1.self_attn.q_proj.qweight" in packed


@pytest.mark.usefixtures("prefect_server")
def test_an_adapter_is_loaded_by_peft_beside_the_text_models_linears_alone(tmp_path: Path) -> None:
    """The tower of `mistral3` has linears of the same names."""
    model = write_wrapped("mistral3", tmp_path / "model")
    job = tiny_job(model, tmp_path, quantization=GPTQConfig(group_size=32))
    quantize_model(job.model_copy(update={"adapter": EoRAConfig(rank=8)}))
    held = load_file(Path(job.output) / peft.TENSORS_FILE)
    adapted = PeftModel.from_pretrained(dense_model(job.output), Path(job.output) / peft.DIRECTORY)
    loaded = {key.replace(".default.", "."): tensor for key, tensor in adapted.state_dict().items() if "lora_" in key}
    assert loaded.keys() == held.keys() and len(held) == 2 * 3 * 7
    assert all(torch.equal(loaded[key].to(tensor.dtype), tensor) for key, tensor in held.items())


def test_what_a_wrapper_leaves_unsaid_is_its_familys(tmp_path: Path) -> None:
    """As published: the text model's own settings alone, without vocabulary; or all in one, without a text model's part."""
    path = write_wrapped("qwen2_5_vl", tmp_path / "flat")
    config = json.loads((path / "config.json").read_text())
    flat = config.pop("text_config") | config
    (path / "config.json").write_text(json.dumps(flat))
    check_replay(decoder_of(path))
    assert preflight.check(tiny_job(path, tmp_path)).layer_count == 3
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}}))
    with pytest.raises(CalibrationError, match="vocabulary has 262208 tokens"):
        calibrate(tmp_path, [[1, 2, 262208]])


@pytest.mark.parametrize(
    "changes, reason",
    [
        (
            {"model_type": "qwen2_audio"},
            r"model_type is 'qwen2_audio'; supported are: .*, with a text model inside gemma3",
        ),
        ({"model_type": "whisper"}, "model_type is 'whisper'"),
        ({"model_type": "t5"}, "model_type is 't5'"),
        (
            {"text_config": {"model_type": "gpt2"}},
            "it is a 'llava' that wraps a text model of model_type 'gpt2'; supported inside are: ",
        ),
    ],
)
def test_what_stays_unsupported_is_refused_by_name(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    model = write_wrapped("llava", tmp_path / "model")
    change_config(model, **changes)
    with pytest.raises(preflight.PreflightError, match=reason):
        preflight.check(tiny_job(model, tmp_path))


def test_a_gguf_file_of_a_wrapper_is_refused_with_the_reason(tmp_path: Path) -> None:
    model = write_wrapped("gemma3", tmp_path / "model")
    with pytest.raises(preflight.PreflightError) as refused:
        preflight.check(tiny_job(model, tmp_path, quantization=GGUFConfig()))
    (problem,) = refused.value.problems
    assert "this 'gemma3' wraps one" in problem
