"""A layer scaled, quantized and run again across pools of any size; what goes on is what the exported layer computes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tasks import quantize_layer, quantize_shard, scaled_shard
from tasks.formats import awq as layout
from tasks.formats import compressed_tensors
from tasks.layer_work import LayerWork
from tasks.methods import rtn
from tasks.models.decoder import Decoder
from tasks.models.folding import Folding
from tasks.quantization import AWQConfig, RTNConfig
from tests.flow_jobs import tiny_job
from tests.test_quantize_layer import assert_equal, finished_layer, open_run, run_shards
from tests.tiny_models import write_tiny_llama

LAYER = "model.layers.0"
NORMS = (f"{LAYER}.input_layernorm.weight", f"{LAYER}.post_attention_layernorm.weight")
AWQ = AWQConfig(group_size=32, n_grid=6)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_llama(path, attention_bias=True, mlp_bias=True, dtype=request.param)


@pytest.fixture(autouse=True)
def many_small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that cut through modules, so that a tiny layer has several."""
    monkeypatch.setattr(quantize_shard, "UNIT_ROWS", 48)
    monkeypatch.setattr(scaled_shard, "UNIT_ROWS", 48)


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    """A copy of the model whose tensors a test may change."""
    path = tmp_path / "own"
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def change(path: Path, **changes: Any) -> None:
    """Replace tensors of layer 0 by what functions of theirs return; `__` stands for a dot."""
    tensors = load_file(path / "model.safetensors")
    for name, function in changes.items():
        full = f"{LAYER}.{name.replace('__', '.')}"
        tensors[full] = function(tensors[full])
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def modules_of(packed: dict[str, Tensor]) -> Iterator[str]:
    for name in packed:
        if name.endswith((".qweight", ".weight_packed")):
            yield name.rpartition(".")[0]


def exported_forward(decoder: Decoder, packed: dict[str, Tensor], run: Any, config: AWQConfig) -> dict[int, Tensor]:
    """What the layer of these exported tensors makes of every batch: read by the layout, run by transformers' code."""
    reader: Any = compressed_tensors if config.checkpoint_format == "compressed-tensors" else layout
    module = decoder.materialise(0, "cpu")
    state = {name: packed[name].float() for name in packed if name.endswith((".bias", "norm.weight"))}
    for name in modules_of(packed):
        state[f"{name}.weight"] = reader.unpack(packed, name, config).dequantize()
    module.load_state_dict({name.removeprefix(f"{LAYER}."): tensor for name, tensor in state.items()})
    outputs = {}
    for number, hidden in enumerate(run.hidden):
        mask_BT = run.calibration_batch(number).attention_mask
        with torch.no_grad():
            output = module(hidden.float(), **decoder.call_arguments(0, hidden.float(), mask_BT))
        outputs[number] = (output[0] if isinstance(output, tuple) else output).to(decoder.source_dtype)
    return outputs


@pytest.mark.parametrize("config", [AWQ, AWQ.model_copy(update={"sym": True, "apply_clip": False})], ids=str)
def test_a_layer_is_the_same_for_every_number_of_devices(model: Path, config: AWQConfig, tmp_path: Path) -> None:
    first, packed = finished_layer(model, tmp_path, 1, quantization=config)
    for devices in (2, 3, 5):
        work, again = finished_layer(model, tmp_path, devices, quantization=config)
        assert_equal(again, packed)
        assert work.outcomes == first.outcomes
        assert all(torch.equal(work.outputs[batch], first.outputs[batch]) for batch in first.outputs)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("checkpoint_format", ["awq", "compressed-tensors"])
def test_the_hidden_states_that_go_on_are_those_of_the_exported_layer(
    model: Path, checkpoint_format: str, batch_size: int, tmp_path: Path
) -> None:
    config = AWQConfig(group_size=32, n_grid=6, checkpoint_format=checkpoint_format)  # type: ignore[arg-type]
    job = tiny_job(model, tmp_path, quantization=config, calibration={"batch_size": batch_size})
    with open_run(job) as run:
        work, errors = run_shards(run, 0)
        assert errors == []
        expected = exported_forward(run.decoder, quantize_layer.pack(run, work), run, config)
    assert work.outputs.keys() == expected.keys()
    for batch, hidden in expected.items():
        assert torch.equal(work.outputs[batch], hidden)


def dense(packed: dict[str, Tensor], name: str, norm: Tensor | None = None) -> Tensor:
    weight_NK = layout.unpack(packed, name, AWQ).dequantize()
    return weight_NK if norm is None else weight_NK * norm.float()


def test_with_their_folded_norms_the_weights_are_close_to_the_sources(model: Path, tmp_path: Path) -> None:
    work, packed = finished_layer(model, tmp_path, 1, quantization=AWQ)
    source = load_file(model / "model.safetensors")
    assert {outcome.method for outcome in work.outcomes.values()} == {"awq"}
    assert {outcome.unscaled for outcome in work.outcomes.values()} == {None}
    for norm, modules in zip(NORMS, (("q_proj", "k_proj"), ("gate_proj",)), strict=True):
        assert packed[norm].dtype == source[norm].dtype and not torch.equal(packed[norm], source[norm])
        for name in [name for name in modules_of(packed) if name.endswith(modules)]:
            expected_NK = source[f"{name}.weight"].float() * source[norm].float()
            actual_NK = dense(packed, name, packed[norm])
            assert float((actual_NK - expected_NK).norm() / expected_NK.norm()) < 0.15
    changed = {name for name in work.folded if name.endswith("bias")}
    assert changed == {f"{LAYER}.self_attn.v_proj.bias", f"{LAYER}.mlp.up_proj.bias"}


@pytest.mark.parametrize("sym", [True, False])
def test_the_layers_own_output_is_closer_than_after_rounding_to_nearest(model: Path, sym: bool, tmp_path: Path) -> None:
    """On the hidden states of a real run: a few channels of them carry most, as in trained models."""
    size_H = torch.exp(1.5 * torch.randn(64, generator=torch.Generator().manual_seed(1)))
    errors = {}
    for config in (AWQConfig(group_size=32, sym=sym), RTNConfig(group_size=32, sym=sym, checkpoint_format="awq")):
        job = tiny_job(model, tmp_path, quantization=AWQConfig(group_size=32, sym=sym), root=config.method)
        with open_run(job) as run:
            run.hidden = [(hidden * size_H).to(hidden.dtype) for hidden in run.hidden]
            module = run.decoder.materialise(0, "cpu")
            arguments = [
                run.decoder.call_arguments(0, hidden.float(), run.calibration_batch(n).attention_mask)
                for n, hidden in enumerate(run.hidden)
            ]
            with torch.no_grad():
                true = [module(hidden.float(), **call) for hidden, call in zip(run.hidden, arguments, strict=True)]
                if config.method == "awq":
                    work, failed = run_shards(run, 0)
                    assert failed == []
                    outputs = [work.outputs[batch].float() for batch in range(len(true))]
                else:
                    for name in run.decoder.linear_shapes(0):
                        weight = module.get_submodule(name).weight
                        weight.data = rtn.quantize_rows(weight.data, config).dequantize()
                    outputs = [
                        module(hidden.float(), **call) for hidden, call in zip(run.hidden, arguments, strict=True)
                    ]
            errors[config.method] = sum(float((a - b).square().sum()) for a, b in zip(outputs, true, strict=True))
    assert errors["awq"] < 0.8 * errors["rtn"]


# Edges ----------------------------------------------------------------------------------------------------------------


def test_subsets_that_too_few_tokens_reach_are_rounded_to_nearest_and_named(model: Path, tmp_path: Path) -> None:
    config = AWQConfig(group_size=32, fallback_tokens=1.5)
    work, packed = finished_layer(model, tmp_path, 2, quantization=config)
    for outcome in work.outcomes.values():
        assert outcome.method == "rtn" and outcome.fallback is not None
        assert "calibration tokens reached it" in outcome.fallback
    source = load_file(model / "model.safetensors")
    for name in modules_of(packed):
        nearest = rtn.quantize_rows(source[f"{name}.weight"], config)
        bias = source.get(f"{name}.bias")
        assert_equal(
            {key: packed[key] for key in packed if key.startswith(f"{name}.")}, layout.pack(name, nearest, config, bias)
        )
    for norm in NORMS:
        assert torch.equal(packed[norm], source[norm])


def test_what_can_not_be_folded_is_clipped_only_and_the_reason_is_told(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Decoder.folding

    def without_norms(self: Decoder, i: int) -> Folding:
        folding = found(self, i)
        kept = {subset: fold for subset, fold in folding.folds.items() if fold.offset is None}
        return Folding(kept, {subset: "an odd norm" for subset in folding.folds if subset not in kept})

    monkeypatch.setattr(Decoder, "folding", without_norms)
    work, packed = finished_layer(model, tmp_path, 2, quantization=AWQ)
    assert [outcome.unscaled for outcome in work.outcomes.values()] == ["an odd norm", None, "an odd norm", None]
    assert {outcome.method for outcome in work.outcomes.values()} == {"awq"}
    source = load_file(model / "model.safetensors")
    assert all(torch.equal(packed[norm], source[norm]) for norm in NORMS)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(own_model: Path, bad: float, tmp_path: Path) -> None:
    change(own_model, mlp__up_proj__weight=lambda weight: weight.index_fill(0, torch.tensor([5]), bad))
    job = tiny_job(own_model, tmp_path, quantization=AWQ)
    with open_run(job) as run:
        _, errors = run_shards(run, 0)
    assert len(errors) == 1 and f"`{LAYER}.mlp.up_proj`: row 5" in str(errors[0])


def test_inputs_that_are_not_finite_are_told_with_the_modules_name(model: Path, tmp_path: Path) -> None:
    with open_run(tiny_job(model, tmp_path, quantization=AWQ)) as run:
        run.hidden[0][0, 0, 0] = float("inf")
        _, errors = run_shards(run, 0)
    assert len(errors) == 1 and f"`{LAYER}.self_attn.q_proj`: the inputs hold NaN or Inf" in str(errors[0])


def finite_layer(path: Path, place: Path) -> tuple[LayerWork, dict[str, Tensor]]:
    work, packed = finished_layer(path, place, 2, quantization=AWQ)
    quantize_layer.scan(packed, LAYER)
    assert all(bool(hidden.isfinite().all()) for hidden in work.outputs.values())
    return work, packed


def test_dead_channels_and_rows_of_zeros_stay_what_they_are(own_model: Path, tmp_path: Path) -> None:
    dead = torch.tensor([0, 7])
    change(
        own_model,
        input_layernorm__weight=lambda weight: weight.index_fill(0, dead, 0.0),
        self_attn__v_proj__weight=lambda weight: weight.index_fill(0, dead, 0.0),
        mlp__up_proj__weight=lambda weight: weight.index_fill(0, dead, 0.0),
        mlp__up_proj__bias=lambda bias: bias.index_fill(0, dead, 0.0),
        mlp__down_proj__weight=lambda weight: weight.index_fill(1, torch.arange(32), 0.0),
    )
    _, packed = finite_layer(own_model, tmp_path)
    assert bool((packed[NORMS[0]][dead] == 0).all())
    assert bool((dense(packed, f"{LAYER}.self_attn.v_proj")[dead] == 0).all())
    assert bool((packed[f"{LAYER}.mlp.up_proj.bias"][dead] == 0).all())
    assert bool((dense(packed, f"{LAYER}.mlp.down_proj")[:, :32] == 0).all())


def test_weights_of_extreme_size_give_a_finite_layer(own_model: Path, tmp_path: Path) -> None:
    change(
        own_model,
        self_attn__q_proj__weight=lambda weight: weight * 1e-6,
        self_attn__v_proj__weight=lambda weight: weight * 1e-5,
        mlp__gate_proj__weight=lambda weight: weight.index_fill(0, torch.tensor([3]), 6e4),
        mlp__down_proj__weight=lambda weight: weight * 1e-3,
    )
    work, _ = finite_layer(own_model, tmp_path)
    assert all(0 <= rows.loss < float("inf") for rows in work.quantized.values())
