"""Experts that files stack, transposed, with biases, gates and ups alternating, plain or MXFP4: read one by one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tasks import preflight
from tasks.evaluate import dense_model
from tasks.models.decoder import Decoder
from tasks.models.replay import ReplayError, check_replay
from tasks.models.source import SourceError, SourceModel
from tasks.models.stacked_experts import STACKED_FAMILIES, ExpertPart, dequantize, stacked
from tasks.quantization import (
    BitsAndBytesConfig,
    EXL3Config,
    FP8Config,
    GGUFConfig,
    GPTQConfig,
    Quantization,
    RTNConfig,
)
from tests.flow_jobs import tiny_job
from tests.fp8_models import write_wide
from tests.layer_runs import assert_equal, finished_layer
from tests.mxfp4_models import change, write_mxfp4
from tests.tiny_families import write_tiny
from tests.tiny_models import write_tiny_llama

EXPERTS = "model.layers.0.mlp.experts"
GPTQ = GPTQConfig(group_size=32)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("gpt_oss", tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def mxfp4(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mxfp4(plain, tmp_path_factory.mktemp("mxfp4") / "model")


def decoder_of(path: Path) -> Decoder:
    return Decoder.from_source(SourceModel.open(str(path)))


def problems_of(path: Path) -> tuple[str, ...]:
    with pytest.raises(SourceError) as caught:
        decoder_of(path)
    return caught.value.problems


def test_each_experts_tensors_are_cut_out_of_the_stacks_and_put_back(plain: Path) -> None:
    """By slices of our own: the halves of the columns, turned; nothing else is touched."""
    held, source = load_file(plain / "model.safetensors"), SourceModel.open(str(plain))
    seen = source.load(source.tensors)
    for number in range(8):
        both_KN, both_N = held[f"{EXPERTS}.gate_up_proj"][number], held[f"{EXPERTS}.gate_up_proj_bias"][number]
        assert seen[f"{EXPERTS}.{number}.gate_proj.weight"].equal(both_KN.T[:32])
        assert seen[f"{EXPERTS}.{number}.up_proj.weight"].equal(both_KN.T[32:])
        assert seen[f"{EXPERTS}.{number}.gate_proj.bias"].equal(both_N[:32])
        assert seen[f"{EXPERTS}.{number}.up_proj.bias"].equal(both_N[32:])
        assert seen[f"{EXPERTS}.{number}.down_proj.weight"].equal(held[f"{EXPERTS}.down_proj"][number].T)
        assert seen[f"{EXPERTS}.{number}.down_proj.bias"].equal(held[f"{EXPERTS}.down_proj_bias"][number])
    assert all(tensor.is_contiguous() and tensor.shape == source.tensors[name].shape for name, tensor in seen.items())
    assert source.load_rows(f"{EXPERTS}.7.up_proj.weight", 5).equal(seen[f"{EXPERTS}.7.up_proj.weight"][:5])
    assert_equal(stacked(seen, STACKED_FAMILIES["gpt_oss"]), held)
    assert_equal(source.load_stacked(source.tensors), held)
    assert sum(map(source.stored_bytes, source.tensors)) == sum(tensor.nbytes for tensor in held.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_and_every_scale_is_widened_as_transformers_does(dtype: torch.dtype) -> None:
    blocks_NGB = torch.arange(256, dtype=torch.uint8).repeat(256).reshape(256, 16, 16)
    scales_NG = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 16)
    theirs_KN = convert_moe_packed_tensors(blocks_NGB[None], scales_NG[None], dtype=dtype)[0]
    ours_NK = dequantize(blocks_NGB, scales_NG, dtype)
    assert ours_NK.dtype == dtype and ours_NK.isfinite().sum() > 1000
    torch.testing.assert_close(ours_NK, theirs_KN.T, rtol=0, atol=0, equal_nan=True)


def test_an_mxfp4_source_is_what_transformers_makes_of_it(mxfp4: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(
        mxfp4, dtype="auto", quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    source = SourceModel.open(str(mxfp4))
    assert_equal(source.load_stacked(source.tensors), theirs)
    assert_equal(stacked(source.load(source.tensors), STACKED_FAMILIES["gpt_oss"]), theirs)
    assert source.config["dtype"] == "bfloat16" and "quantization_config" not in source.config
    held = load_file(mxfp4 / "model.safetensors")
    assert sum(map(source.stored_bytes, source.tensors)) == sum(tensor.nbytes for tensor in held.values())
    float32 = dense_model(mxfp4).state_dict()
    assert all(float32[name].equal(tensor.float()) for name, tensor in theirs.items())


def test_an_mxfp4_source_replays_and_is_quantized_as_its_plain_twin(mxfp4: Path, tmp_path: Path) -> None:
    check_replay(decoder_of(mxfp4))
    source = SourceModel.open(str(mxfp4))
    twin = write_wide(mxfp4, tmp_path / "twin", source.load_stacked(source.tensors))
    packed = {}
    for name, model in (("mxfp4", mxfp4), ("twin", twin)):
        config = json.loads((model / "config.json").read_text())
        if name == "twin":
            del config["quantization_config"]
            (model / "config.json").write_text(json.dumps(config))
        packed[name] = finished_layer(model, tmp_path / name, 1, 1, quantization=GPTQ, calibration={"samples": 2})[1]
    assert_equal(packed["mxfp4"], packed["twin"])
    assert "model.layers.1.mlp.experts.7.down_proj.bias" in packed["mxfp4"]


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 24])
def test_experts_compute_few_tokens_and_many_as_transformers_does(tokens: int, plain: Path) -> None:
    """A product of up to three rows is rounded otherwise where the weight lies the other way."""
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, experts_implementation="eager")
    hidden_BTH = torch.randn(1, tokens, 64, generator=torch.Generator().manual_seed(tokens))
    ours = decoder_of(plain).materialise(0, "cpu")
    with torch.no_grad():
        expected, _ = theirs.model.layers[0].mlp(hidden_BTH)
        found, _ = ours.mlp(hidden_BTH)
    assert torch.equal(found, expected)


def test_the_check_before_the_first_layer_sees_an_expert_in_anothers_place(
    plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = ExpertPart.read

    def read(self: ExpertPart, *args: Any) -> Tensor:
        return honest(ExpertPart(self.stack, self.number ^ 1, self.start, self.stop), *args)

    monkeypatch.setattr(ExpertPart, "read", read)
    with pytest.raises(ReplayError, match=r"weight `model\.layers\.0\.mlp\.experts\.down_proj` differs"):
        check_replay(decoder_of(plain))


@pytest.mark.parametrize(
    "changes, problem",
    [
        ({"down_proj_scales": None}, "`{}.down_proj_scales` is missing, without which the other of the two means nothing"),
        ({"down_proj_blocks": None}, "`{}.down_proj_blocks` is missing, without which the other of the two means nothing"),
        ({"down_proj_blocks": None, "down_proj_scales": None}, "`{}.down_proj` is missing"),
        ({"down_proj_bias": None}, "`{}.down_proj_bias` is missing"),
        ({"down_proj_bias": torch.ones(8, 65)}, "`{}.down_proj_bias` has the shape [8, 65]; for its weights it is [8, 64]"),
        ({"down_proj_scales": torch.ones(8, 64, 2).byte()}, "`{}.down_proj_scales` is U8 of shape [8, 64, 2]; for"),
        ({"down_proj_blocks": torch.ones(8, 64, 1, 16)}, "`{}.down_proj_blocks` is F32 of shape [8, 64, 1, 16]; MXFP4 is U8"),
        ({"0.up_proj.weight": torch.ones(32, 64)}, "`{}.0.up_proj.weight` is of one expert: this family's files hold"),
    ],
)  # fmt: skip
def test_stacks_that_are_not_whole_are_told_by_name(changes: dict[str, Any], problem: str, mxfp4: Path) -> None:
    (told,) = problems_of(change(mxfp4, **changes))
    assert told.startswith(problem.format(EXPERTS)), told


def test_stacks_of_other_shapes_than_the_configuration_makes_are_told_by_name(plain: Path) -> None:
    told = problems_of(change(plain, down_proj=torch.ones(8, 40, 64)))
    assert told[0] == f"`{EXPERTS}.0.down_proj.weight` has the shape [64, 40]; config.json makes it [64, 32]"
    (told_once,) = problems_of(change(plain, down_proj=torch.ones(32, 64)))
    assert told_once.startswith(f"`{EXPERTS}.down_proj` has the shape [32, 64]; experts are stacked in three")
    odd, odd_bias = torch.ones(8, 64, 63), torch.ones(8, 63)
    told = problems_of(change(plain, gate_up_proj=odd, gate_up_proj_bias=odd_bias))
    assert told[0] == f"`{EXPERTS}.gate_up_proj` has 63 rows, which `gate_proj`, `up_proj` can't share"
    fewer, fewer_biases = torch.ones(7, 32, 64), torch.ones(7, 64)
    (told_once,) = problems_of(change(plain, down_proj=fewer, down_proj_bias=fewer_biases))
    assert told_once == f"the tensors of `{EXPERTS}` are of 7 and 8 experts"


def test_mxfp4_is_read_where_config_json_tells_of_it_and_in_no_other_family(mxfp4: Path, tmp_path: Path) -> None:
    silent = write_wide(mxfp4, tmp_path / "silent", load_file(mxfp4 / "model.safetensors"))
    config = json.loads((silent / "config.json").read_text())
    described = config.pop("quantization_config")
    (silent / "config.json").write_text(json.dumps(config))
    assert f"`{EXPERTS}.down_proj_blocks` is MXFP4, which config.json does not tell" in "\n".join(problems_of(silent))
    llama = write_tiny_llama(tmp_path / "llama")
    config = json.loads((llama / "config.json").read_text()) | {"quantization_config": described}
    (llama / "config.json").write_text(json.dumps(config))
    (told,) = problems_of(llama)
    assert told.startswith("it is quantized already (mxfp4), which can't be read") and "`mxfp4` of gpt_oss" in told


def test_preflight_names_scales_that_are_nan(mxfp4: Path, tmp_path: Path) -> None:
    scales = load_file(mxfp4 / "model.safetensors")[f"{EXPERTS}.gate_up_proj_scales"]
    scales[3, 40] = 255
    with pytest.raises(preflight.PreflightError) as refused:
        preflight.check(tiny_job(change(mxfp4, gate_up_proj_scales=scales), tmp_path))
    (problem,) = refused.value.problems
    assert f"the scales of `{EXPERTS}.3.up_proj.weight` hold 2 values that are NaN" in problem


def test_the_plan_tells_what_is_read_and_who_reads_the_export(mxfp4: Path, tmp_path: Path) -> None:
    plan = preflight.check(tiny_job(mxfp4, tmp_path, quantization=GPTQ))
    assert any("MXFP4 (72 weights): they are widened to bfloat16" in note for note in plan.notes), plan.notes
    told = "`gate_proj` and `up_proj` are parts of `gate_up_proj` by their order in it, as GPTQModel cuts it"
    assert any(told in note for note in plan.notes)
    down = next(kind for kind in plan.modules if kind.name == "mlp.experts.*.down_proj")
    assert (down.count, down.out_features, down.in_features) == (24, 64, 32)
    assert down.bytes_before == 24 * (64 * 16 + 64 * 1 + 2 * 64)  # blocks, scales, a bias in bfloat16


@pytest.mark.parametrize(
    "quantization, layout",
    [
        (RTNConfig(group_size=32, checkpoint_format="compressed-tensors"), "compressed-tensors"),
        (FP8Config(), "compressed-tensors"),
        (EXL3Config(), "exl3"),
        (BitsAndBytesConfig(), "bitsandbytes"),
        (GGUFConfig(), "gguf"),
    ],
)
def test_layouts_in_which_no_program_reads_these_experts_are_refused(
    quantization: Quantization, layout: str, plain: Path, tmp_path: Path
) -> None:
    with pytest.raises(preflight.PreflightError) as refused:
        preflight.check(tiny_job(plain, tmp_path, quantization=quantization))
    expected = f"no program is known that reads packed experts of gpt_oss in a `{layout}` file"
    assert any(expected in problem for problem in refused.value.problems), refused.value.problems


def test_experts_one_by_one_are_refused_in_a_source(plain: Path, tmp_path: Path) -> None:
    """What another program calls `gate_proj` may be the gates, which are every other row here."""
    source = SourceModel.open(str(plain))
    (tmp_path / "model").mkdir()
    save_file(source.load(source.tensors), tmp_path / "model" / "model.safetensors", {"format": "pt"})
    (tmp_path / "model" / "config.json").write_text((plain / "config.json").read_text())
    (problem,) = problems_of(tmp_path / "model")
    assert "is of one expert" in problem and "name the original model" in problem
