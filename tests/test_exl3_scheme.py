"""EXL3 through the flow: cut short and resumed, refused beforehand, read again; widths that mix to a mean."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from flows.quantize_model import quantize_model
from tasks import calibration
from tasks.evaluate import dense_model
from tasks.exl3_scheme import EXL3Scheme, Siblings, module_widths
from tasks.methods.hessian import ActivationError, HessianSum
from tasks.models.source import SourceModel
from tasks.output_directory import read_report
from tasks.preflight import PreflightError, check
from tasks.quantization import EXL3Config
from tests.client_environment import client_python
from tests.flow_jobs import contents, layers_run, tiny_job
from tests.loaded_exports import logits, relative_difference
from tests.test_schemes import PowerCut, power_cut
from tests.tiny_models import write_tiny_llama

LAYERS = 2
# At 7 and 8 bits the search is fastest; the siblings of the ends of the model get the higher width.
CONFIG = EXL3Config(bits=7.5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads, hidden and intermediate size of 128: as little as the layout allows."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("model") / "tiny",
        layers=LAYERS, hidden_size=128, intermediate_size=128, key_value_heads=4, attention_bias=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def hessians() -> dict[str, Tensor]:
    """The Hessian that each module was quantized with in the run of `export`, by its full name."""
    return {}


@pytest.fixture(scope="module")
def export(
    model: Path, hessians: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory, prefect_server: None
) -> Path:
    """The output of an undisturbed run on one device."""
    quantize = EXL3Scheme.quantize

    def remembered(self: EXL3Scheme, name: str, weight_NK: Tensor, state: Any) -> Any:
        hessians[name] = state
        return quantize(self, name, weight_NK, state)

    job = tiny_job(model, tmp_path_factory.mktemp("whole"), quantization=CONFIG)
    with mock.patch.object(EXL3Scheme, "quantize", remembered):
        quantize_model(job)
    return Path(job.output)


def scheme_of(model: Path, config: EXL3Config = CONFIG) -> EXL3Scheme:
    return EXL3Scheme(config, SourceModel.open(str(model)), seed=0)


def test_a_run_cut_short_and_resumed_on_two_devices_ends_with_the_bytes_of_one_that_was_not(
    model: Path, export: Path, tmp_path: Path
) -> None:
    job = tiny_job(model, tmp_path, quantization=CONFIG, devices=("cpu", "cpu"))
    for layer, modules in ((0, 3), (1, 0), (1, 2)):
        with power_cut(layer, modules), pytest.raises(PowerCut):
            quantize_model(job)
    with layers_run() as ran:
        report = quantize_model(job)
    assert ran == [1] and report.resumed_from == 1
    assert contents(job.output) == contents(export)


def test_an_export_says_what_it_holds_and_is_close_to_its_source(model: Path, export: Path) -> None:
    described = json.loads((export / "config.json").read_text())["quantization_config"]
    assert described == json.loads((export / "quantization_config.json").read_text())
    assert (described["quant_method"], described["bits"], described["codebook"]) == ("exl3", 7.5, "mcg")
    stored: dict[str, Any] = {}
    for shard in export.glob("*.safetensors"):
        stored |= load_file(shard)
    packed = {name for name in stored if name.endswith((".trellis", ".suh", ".svh", ".mcg"))}
    listed = [tensors for entry in described["tensor_storage"].values() for tensors in entry["stored_tensors"].items()]
    assert packed | {name for name in stored if name.endswith("_proj.bias")} == {name for name, _ in listed}
    for name, told in listed:
        assert list(stored[name].shape) == told["shape"]
    widths = {name: entry["bits_per_weight"] for name, entry in described["tensor_storage"].items()}
    assert set(widths.values()) == {7, 8} and sum(widths.values()) / len(widths) == 7.5
    assert relative_difference(logits(dense_model(export)), logits(dense_model(model))) < 0.05
    report = read_report(export)
    assert report is not None and report["fallbacks"] == 0
    for layer in report["layers"]:
        assert {module["method"] for module in layer["modules"]} == {"exl3"}
        assert all(module["loss"] > 0 and module["damp_percent"] == 0.025 for module in layer["modules"])


def test_later_linears_see_the_quantized_weights_of_earlier_ones(
    model: Path, hessians: dict[str, Tensor], export: Path, tmp_path: Path
) -> None:
    """The Hessians that the run used are those of the exported model's own forward, and not of the source's."""
    job = tiny_job(model, tmp_path)
    assert job.calibration is not None
    batches = calibration.prepare(job.calibration, model, seed=0).batches
    for name in ("model.layers.0.mlp.down_proj", "model.layers.1.self_attn.q_proj"):
        of_export, of_source = (hessian_of_inputs(dense_model(path), name, batches) for path in (export, model))
        off_by = float((hessians[name] - of_export).norm())
        # The source is in bfloat16, to which a run rounds hidden states between layers.
        assert off_by < 0.2 * float((of_source - of_export).norm())


def hessian_of_inputs(decoder: nn.Module, name: str, batches: Sequence[calibration.Batch]) -> Tensor:
    """2/T * sum x x^T over the real tokens that enter a linear in the model's own forward."""
    inputs: list[Tensor] = []
    for batch in batches:
        real = batch.attention_mask.bool()
        with (
            decoder.get_submodule(name).register_forward_pre_hook(
                lambda _, args, real=real: inputs.append(args[0][real])
            ),
            torch.no_grad(),
        ):
            decoder(input_ids=batch.input_ids, attention_mask=batch.attention_mask)
    x_TK = torch.cat(inputs)
    return 2 * x_TK.t() @ x_TK / len(x_TK)


# Widths ---------------------------------------------------------------------------------------------------------------


def groups_of(layers: int) -> tuple[Siblings, ...]:
    sizes = {"qkv": 3 * 4096, "o": 4096, "gate_up": 2 * 8192, "down": 8192}
    return tuple(Siblings(layer, {f"{layer}.{name}": size}) for layer in range(layers) for name, size in sizes.items())


@given(st.integers(1, 12), st.floats(2.0, 8.0))
def test_widths_are_whole_and_their_mean_is_just_below_what_was_asked(layers: int, bits: float) -> None:
    groups = groups_of(layers)
    widths = module_widths(groups, bits)
    weights = {name: count for group in groups for name, count in group.weights.items()}
    assert widths.keys() == weights.keys() and set(widths.values()) <= {int(bits), int(bits) + 1}
    total = sum(weights.values())
    mean = sum(widths[name] * count for name, count in weights.items()) / total
    assert mean <= bits * (1 + 1e-8)
    # No group that would still fit has been left at the lower width.
    lower = [count for name, count in weights.items() if widths[name] == int(bits)]
    assert all((mean + count / total) > bits * (1 - 1e-8) for count in lower)
    assert max(widths.values()) <= 8


def test_siblings_share_a_width_and_the_ends_of_a_model_get_more(model: Path) -> None:
    widths = module_widths(groups_of(9), 3.25)
    assert all(widths[f"{layer}.qkv"] == 4 for layer in (0, 8)) and widths["4.down"] == 3
    assert module_widths(groups_of(9), 3.0) == dict.fromkeys(widths, 3)
    siblings = scheme_of(model).siblings
    assert [len(group.weights) for group in siblings] == [3, 1, 2, 1] * LAYERS
    assert siblings[0].weights.keys() == {f"model.layers.0.self_attn.{letter}_proj" for letter in "qkv"}


def test_a_tenth_of_ten_equal_groups_is_one_group() -> None:
    groups = tuple(Siblings(layer, {str(layer): 1000}) for layer in range(10))
    assert sorted(module_widths(groups, 3.1).values()) == [3] * 9 + [4]


# What is refused, and what is told -----------------------------------------------------------------------------------


def test_sizes_that_are_no_multiples_of_128_are_refused_with_their_modules(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", hidden_size=64, intermediate_size=128)
    with pytest.raises(PreflightError) as refused:
        check(tiny_job(model, tmp_path, quantization=CONFIG))
    told = str(refused.value)
    assert "`self_attn.q_proj`" in told and "in_features 64 is not a multiple of 128" in told


def test_calibration_is_needed(model: Path, tmp_path: Path) -> None:
    job = tiny_job(model, tmp_path, quantization=CONFIG).model_copy(update={"calibration": None})
    with pytest.raises(PreflightError, match="method `exl3` looks at activations"):
        check(job)


def test_the_plan_tells_widths_bytes_and_readers(model: Path, export: Path, tmp_path: Path) -> None:
    plan = check(tiny_job(model, tmp_path, quantization=CONFIG))
    assert plan.summary == "exl3, 7.5 bit, mcg, layout exl3"
    assert any("7 of 14 modules get 8 bits, the others 7: 7.500 bits on average" in note for note in plan.notes)
    assert any("GPTQModel do" in note for note in plan.notes)
    report = read_report(export)
    assert report is not None
    packed = sum(kind.bytes_after for kind in plan.modules)
    held = {name: tensor for path in export.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert packed == sum(tensor.nbytes for name, tensor in held.items() if "_proj." in name)


def test_modules_that_no_token_reached_are_coded_without_a_hessian_and_named(model: Path) -> None:
    scheme = scheme_of(model)
    prepared = scheme.prepare(None, 144, "x")
    assert prepared.state is None and prepared.fallback == "0 of 144 calibration tokens reached it"
    assert scheme.prepare(HessianSum(128, "cpu"), 144, "x").fallback == prepared.fallback
    broken = HessianSum(128, "cpu")
    broken.add(torch.full((3, 128), torch.inf))
    with pytest.raises(ActivationError, match="`x`: its inputs hold NaN or Inf"):
        scheme.prepare(broken, 144, "x")


def test_a_hessian_that_will_not_factor_costs_its_own_module_only(model: Path) -> None:
    scheme, name = scheme_of(model), "model.layers.0.mlp.up_proj"
    weight_NK = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    fallen_back = scheme.quantize(name, weight_NK, -torch.eye(128))
    assert fallen_back.fallback is not None and "not positive definite" in fallen_back.fallback
    assert torch.equal(fallen_back.symbols_RCL, scheme.quantize(name, weight_NK, None).symbols_RCL)


@pytest.mark.slow
def test_gptqmodel_computes_what_our_export_says(export: Path, tmp_path: Path) -> None:
    script = Path(__file__).parent / "clients" / "gptqmodel_exl3.py"
    environment = os.environ | {"GPTQMODEL_CPU_WORKERS": "2", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    environment |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    answer = tmp_path / "answer.safetensors"
    command = [str(client_python()), str(script), str(export), str(answer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    theirs = load_file(answer)["logits"]
    with torch.inference_mode():
        expected = dense_model(export)(torch.arange(40)[None] * 7 % 311).logits
    # The codebook's values are rounded to float16 by us, as by exllamav3's kernels, and not by GPTQModel.
    assert relative_difference(theirs, expected) < 2e-3
    assert torch.equal(theirs.argmax(-1), expected.argmax(-1))
