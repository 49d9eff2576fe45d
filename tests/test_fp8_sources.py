"""Sources that are FP8 themselves: read as transformers reads them, quantized as their bfloat16 twins are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import NaiveQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from tasks import identity, preflight
from tasks.devices import DevicePool
from tasks.evaluate import dense_model
from tasks.models.decoder import Decoder
from tasks.models.replay import check_replay
from tasks.models.source import SourceError, SourceModel
from tasks.models.tensor_check import refuse_not_finite
from tasks.quantization import (
    AWQConfig,
    BitsAndBytesConfig,
    FP8Config,
    GGUFConfig,
    GPTQConfig,
    QQQConfig,
    Quantization,
    RTNConfig,
)
from tests.flow_jobs import tiny_job
from tests.fp8_models import change_shard, scaled, write_beside, write_fp8, write_wide
from tests.layer_runs import assert_equal, finished_layer, open_run, run_shards
from tests.tiny_families import write_tiny
from tests.tiny_models import write_tiny_llama

Q, SCALE = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight_scale_inv"
EDGES = {"hidden_size": 160, "intermediate_size": 192}  # one block and a quarter, one and a half


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("dense") / "model", attention_bias=True, **EDGES)


@pytest.fixture
def model(dense: Path, tmp_path: Path) -> Path:
    """Its copy in FP8, to be changed."""
    write_fp8(dense, tmp_path / "fp8")
    return tmp_path / "fp8"


def read(path: Path) -> dict[str, Tensor]:
    source = SourceModel.open(str(path))
    return source.load(source.tensors)


def problems_of(path: Path) -> tuple[str, ...]:
    with pytest.raises(SourceError) as caught:
        Decoder.from_source(SourceModel.open(str(path)))
    return caught.value.problems


@pytest.mark.parametrize(
    ("family", "scale_dtype"),
    [
        ("llama", torch.float32),
        ("llama", torch.bfloat16),
        ("llama", torch.float8_e8m0fnu),
        ("qwen3_moe", torch.float32),
    ],
)
def test_weights_are_what_transformers_widens_them_to(family: str, scale_dtype: torch.dtype, tmp_path: Path) -> None:
    write_tiny(family, tmp_path / "dense")
    write_fp8(tmp_path / "dense", tmp_path / "fp8", block=(32, 16), scale_dtype=scale_dtype)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8",
        dtype="auto",
        quantization_config=FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 16)),
    ).state_dict()
    ours = read(tmp_path / "fp8")
    for name in [name for name in theirs if ".experts." in name]:
        experts = name.rpartition(".")[0]
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        fused = [torch.cat([ours.pop(f"{experts}.{e}.{part}.weight") for part in parts]) for e in range(8)]
        assert torch.equal(torch.stack(fused), theirs.pop(name)), name
    assert_equal(ours, theirs)


def test_blocks_at_the_edges_are_cut_off(dense: Path, tmp_path: Path) -> None:
    wide = write_fp8(dense, tmp_path / "fp8")
    source = SourceModel.open(str(tmp_path / "fp8"))
    assert {info.values.shape: info.scales.shape for info in source.scaled.values()} == {
        (160, 160): (2, 2), (80, 160): (1, 2), (192, 160): (2, 2), (160, 192): (2, 2),
    }  # fmt: skip
    assert_equal(source.load(source.tensors), wide)
    assert source.load_rows(Q, 130).equal(wide[Q][:130])
    assert (source.tensors[Q].size_bytes, source.stored_bytes(Q)) == (2 * 160 * 160, 160 * 160 + 4 * 4)
    float32 = dense_model(tmp_path / "fp8").state_dict()
    assert all(float32[name].bfloat16().equal(wide[name]) for name in wide)


def test_a_large_matrix_is_widened_piece_by_piece_to_the_same(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = read(model)
    monkeypatch.setattr("tasks.models.fp8_weights.PIECE_WEIGHTS", 1000)
    assert_equal(read(model), whole)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_weights_are_widened_to_the_dtype_of_the_config(dtype: str, dense: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"dtype": dtype}
    (model / "config.json").write_text(json.dumps(config))
    values, scales = (load_file(model / f"model-0000{n}-of-00002.safetensors") for n in (1, 2))
    spread_NK = torch.kron(scales[SCALE], torch.ones(128, 128))[:160, :160]
    expected = (values[Q].float() * spread_NK).to(getattr(torch, dtype))
    assert_equal({Q: read(model)[Q]}, {Q: expected})


def test_a_config_without_a_dtype_means_bfloat16_and_says_so(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    del config["dtype"]
    (model / "config.json").write_text(json.dumps(config))
    source = SourceModel.open(str(model))
    assert source.stored_config == config
    del config["quantization_config"]
    assert source.config == config | {"dtype": "bfloat16"}


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_compressed_tensors_are_read_as_its_own_package_reads_them(strategy: str, dense: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
    arguments |= {"block_structure": [32, 32]} if strategy == "block" else {}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    tensors, expected = load_file(dense / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        block = {"tensor": tuple(tensors[name].shape), "channel": None, "block": (32, 32)}[strategy]
        values_NK, scales_RC, _ = scaled(tensors[name].float(), block, torch.bfloat16)
        stored = {"weight": values_NK, "weight_scale": scales_RC.flatten() if strategy == "tensor" else scales_RC}
        expected[name] = NaiveQuantizationCompressor.decompress(stored, scheme)["weight"]
        module = name.removesuffix(".weight")
        tensors |= {f"{module}.{part}": tensor for part, tensor in stored.items()}
        tensors[f"{module}.input_scale"] = torch.ones(1)  # of a kernel that rounds activations
    (tmp_path / "model").mkdir()
    save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    groups = {"group_0": {"targets": ["Linear"], "weights": arguments}}
    described = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    write_beside(dense, tmp_path / "model", described)
    ours = read(tmp_path / "model")
    Decoder.from_source(SourceModel.open(str(tmp_path / "model")))
    assert_equal({name: ours[name] for name in expected}, expected)


METHODS: tuple[Quantization, ...] = (
    GPTQConfig(group_size=32), RTNConfig(group_size=32), AWQConfig(group_size=32), QQQConfig(group_size=-1), FP8Config(),
    BitsAndBytesConfig(), GGUFConfig(quant_type="q8_0"),
)  # fmt: skip


@pytest.mark.parametrize("quantization", METHODS, ids=lambda config: config.method)
def test_every_method_makes_of_it_what_it_makes_of_the_bfloat16_twin(
    quantization: Quantization, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    dense = write_tiny_llama(tmp_path / "dense", attention_bias=quantization.method != "gguf", **sizes)
    twin = write_wide(dense, tmp_path / "wide", write_fp8(dense, tmp_path / "fp8"))
    layers = [
        finished_layer(path, tmp_path / path.name / "run", 1, quantization=quantization)[1]
        for path in (tmp_path / "fp8", twin)
    ]
    assert_equal(*layers)
    assert not any(name.endswith("weight_scale_inv") for name in layers[0])


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "phi3"])
def test_a_family_is_replayed_and_quantized_as_its_twin(family: str, tmp_path: Path) -> None:
    dense = write_tiny(family, tmp_path / "dense")
    twin = write_wide(dense, tmp_path / "wide", write_fp8(dense, tmp_path / "fp8", also=("lm_head",)))
    source = SourceModel.open(str(tmp_path / "fp8"))
    assert "lm_head.weight" in source.scaled
    check_replay(Decoder.from_source(source))
    config = RTNConfig(group_size=32)
    for layer in range(2):
        assert_equal(
            *(finished_layer(path, tmp_path / f"{path.name}-{layer}", 1, layer, quantization=config)[1]
              for path in (tmp_path / "fp8", twin))
        )  # fmt: skip


def test_what_does_not_fit_is_told_in_one_list(model: Path) -> None:
    change_shard(
        model,
        1,
        **{
            SCALE: None,
            SCALE.replace("q_proj", "k_proj"): torch.ones(1, 3),
            SCALE.replace("q_proj", "v_proj"): torch.ones(1, 2, dtype=torch.int32),
            "model.layers.0.input_layernorm.weight_scale_inv": torch.ones(1, 1),
            "model.layers.9.mlp.up_proj.weight_scale_inv": torch.ones(1, 1),
        },
    )
    layer = "model.layers.0"
    assert problems_of(model) == (
        f"`{layer}.self_attn.k_proj.weight_scale_inv` has the shape [1, 3]; for `{layer}.self_attn.k_proj.weight` of shape "
        f"[80, 160] config.json makes it [1, 2]",
        f"`{Q}` is F8_E4M3 and `{SCALE}` is missing, without which it means nothing: fetch all files of the model again",
        f"`{layer}.self_attn.v_proj.weight_scale_inv` is I32; scales are F32, BF16, F16, F8_E8M0",
        f"`{layer}.input_layernorm.weight_scale_inv` scales an FP8 weight, but `{layer}.input_layernorm.weight` is BF16",
        "`model.layers.9.mlp.up_proj.weight_scale_inv` scales an FP8 weight, but `model.layers.9.mlp.up_proj.weight` is "
        "missing",
    )


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "fp8", "expert_dtype": "fp4"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {}}},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"g": {"weights": {"type": "float", "num_bits": 8, "strategy": "group"}}},
        },
    ],
)
def test_other_layouts_are_refused_by_name_with_the_way_out(described: dict[str, Any], model: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": described}
    (model / "config.json").write_text(json.dumps(config))
    (problem,) = problems_of(model)
    assert f"({described['quant_method']})" in problem
    assert "or load this one with transformers, dequantize it and save that" in problem


def test_preflight_names_scales_that_are_not_finite(model: Path, tmp_path: Path) -> None:
    change_shard(model, 1, **{SCALE: torch.tensor([[1.0, torch.nan], [torch.inf, 1.0]])})
    with pytest.raises(preflight.PreflightError, match=f"`{SCALE}` holds 2 values that are NaN or infinite"):
        preflight.check(tiny_job(model, tmp_path))


def test_values_that_are_nan_are_named_where_they_are_read(dense: Path, tmp_path: Path) -> None:
    write_fp8(dense, tmp_path / "fp8", also=("lm_head",))
    values = load_file(tmp_path / "fp8" / "model-00001-of-00002.safetensors")
    for name in (Q, "lm_head.weight"):
        values[name].view(torch.uint8)[1, 2] = 0x7F
    change_shard(tmp_path / "fp8", 0, **{name: values[name] for name in (Q, "lm_head.weight")})
    with pytest.raises(SourceError, match=r"`lm_head.weight` holds 1 values that are NaN"):
        refuse_not_finite(SourceModel.open(str(tmp_path / "fp8")), ["lm_head.weight"])
    with open_run(tiny_job(tmp_path / "fp8", tmp_path, quantization=RTNConfig(group_size=32))) as run:
        (error,) = run_shards(run, 0)[1]
    assert "q_proj" in str(error) and "NaN" in str(error)


def test_the_plan_tells_what_is_read_and_counts_bytes_as_they_are_stored(model: Path, tmp_path: Path) -> None:
    plan = preflight.check(tiny_job(model, tmp_path))
    assert any("FP8 (`fp8`, 14 weights): they are widened to bfloat16" in note for note in plan.notes)
    q_proj = next(kind for kind in plan.modules if kind.name == "self_attn.q_proj")
    assert q_proj.bytes_before == 2 * (160 * 160 + 4 * 4 + 2 * 160)  # values, scales, a bias in bfloat16


def test_the_identity_holds_scales_and_their_description(model: Path, tmp_path: Path) -> None:
    job, pool = tiny_job(model, tmp_path, quantization=RTNConfig(group_size=32)), DevicePool.resolve(("cpu",))

    def areas() -> dict[str, Any]:
        source = SourceModel.open(str(model))
        return identity.build(job, source, Decoder.from_source(source), None, pool, 1)

    before = areas()
    assert before["source"]["config"]["quantization_config"]["weight_block_size"] == [128, 128]
    scales = load_file(model / "model-00002-of-00002.safetensors")
    change_shard(model, 1, **{SCALE: scales[SCALE] * 2})
    after = areas()
    assert [area for area in before if before[area] != after[area]] == ["source"]
    shards = before["source"]["shards"]
    assert [file for file in shards if shards[file] != after["source"]["shards"][file]] == [
        "model-00002-of-00002.safetensors"
    ]
