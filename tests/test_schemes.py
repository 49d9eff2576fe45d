"""Every method and layout through the real flow: cut short anywhere and run again, and loaded by an independent program."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import bitsandbytes
import pytest
import torch
from gguf import GGUFReader, dequantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers.utils.quantization_config import CompressedTensorsConfig

from flows.quantize_model import quantize_model
from tasks.evaluate import dense_model
from tasks.layer_work import LayerWork, shares
from tasks.output_directory import GGUF_FILE, read_report
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
from tasks.schemes import needs_activations
from tests.flow_jobs import contents, layers_run, tiny_job
from tests.loaded_exports import load, logits, relative_difference
from tests.test_bitsandbytes import INT8_TOLERANCE, rounded_to_int8
from tests.test_fp8 import rounded_to_e4m3
from tests.tiny_models import write_tiny_llama

pytestmark = pytest.mark.usefixtures("prefect_server")

LAYERS = 4
INTEGER: dict[str, Any] = {"group_size": 32, "checkpoint_format": "compressed-tensors"}
CONFIGS: dict[str, Quantization] = {
    "gptq": GPTQConfig(group_size=32),
    "rtn": RTNConfig(group_size=32),
    "qqq": QQQConfig(group_size=-1, damp_percent=0.05),
    "gptq as compressed-tensors": GPTQConfig(**INTEGER),
    "rtn as compressed-tensors": RTNConfig(bits=8, **INTEGER),
    "rtn as awq": RTNConfig(group_size=32, sym=False, checkpoint_format="awq"),
    "awq": AWQConfig(group_size=32),
    "awq as compressed-tensors": AWQConfig(bits=8, sym=True, **INTEGER),
    "fp8": FP8Config(),
    "fp8 in blocks": FP8Config(granularity="block", checkpoint_format="fp8"),
    "nf4": BitsAndBytesConfig(compute_dtype="float32"),  # so that its reader computes what we do
    "int8": BitsAndBytesConfig(quant_type="int8"),
    "q8_0": GGUFConfig(quant_type="q8_0"),
    "q4_k_m": GGUFConfig(),
    "q4_k_m with importance": GGUFConfig(imatrix=True),
}
WEIGHT_ONLY = [name for name, config in CONFIGS.items() if not needs_activations(config)]
GGUF = [name for name, config in CONFIGS.items() if config.method == "gguf"]
FOUR_BIT = ("gptq", "rtn", "qqq", "gptq as compressed-tensors", "rtn as awq", "awq", "nf4")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every size a multiple of 128, so that blocks fill it; biases, so that a lost one shows."""
    return write_tiny_llama(
        tmp_path_factory.mktemp("model") / "tiny",
        layers=LAYERS, hidden_size=128, intermediate_size=256, key_value_heads=4, attention_bias=True, mlp_bias=True,
        dtype=torch.float32,
    )  # fmt: skip


@pytest.fixture(scope="module")
def exports(model: Path, tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> dict[str, Path]:
    """The outputs of undisturbed runs, made as they are asked for."""

    class Exports(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            job = tiny_job(model, tmp_path_factory.mktemp("whole"), quantization=CONFIGS[name])
            quantize_model(job if name not in WEIGHT_ONLY else job.model_copy(update={"calibration": None}))
            self[name] = Path(job.output)
            return self[name]

    return Exports()


class PowerCut(RuntimeError):
    """Stands for the end of the process: whatever is not published is lost."""


@contextmanager
def power_cut(layer: int, modules: int) -> Iterator[None]:
    """Let no layer from number `layer` on finish more than so many modules; 0 cuts at the boundary before it."""
    keep, begin = LayerWork.keep, LayerWork.__init__

    def cut_at_the_boundary(self: LayerWork, run: Any, number: int, devices: Any) -> None:
        begin(self, run, number, devices)
        if number == layer and modules == 0:
            raise PowerCut

    def cut_inside(self: LayerWork, name: str, rows: Any) -> None:
        keep(self, name, rows)
        if self.layer == layer and len(self.quantized) >= modules:
            raise PowerCut

    with (
        mock.patch.object(LayerWork, "__init__", cut_at_the_boundary),
        mock.patch.object(LayerWork, "keep", cut_inside),
    ):
        yield


EVERYWHERE = tuple((layer, modules) for layer in range(LAYERS) for modules in (0, 3))


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize(
    "cuts",
    [((1, 3), (3, 0)), pytest.param(EVERYWHERE, marks=pytest.mark.slow)],
    ids=["inside and between", "everywhere"],
)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_cut_short_and_resumed_ends_with_the_bytes_of_one_that_was_not(
    name: str, cuts: tuple[tuple[int, int], ...], interval: int, model: Path, exports: dict[str, Path], tmp_path: Path
) -> None:
    job = tiny_job(model, tmp_path, quantization=CONFIGS[name], devices=("cpu", "cpu"), interval=f"layer:{interval}")
    published = 0
    for layer, modules in cuts:
        with power_cut(layer, modules), layers_run() as ran, pytest.raises(PowerCut):
            quantize_model(job)
        # The other device is at the layer after it, where that does not need this one.
        at_the_same_time = {layer + 1} if name in WEIGHT_ONLY else set()
        assert len(ran) == len(set(ran)) and set(ran) - at_the_same_time == set(range(published, layer + 1))
        published = layer - layer % interval
    with layers_run() as ran:
        report = quantize_model(job)
    assert sorted(ran) == list(range(published, LAYERS))
    assert report.resumed_from == (published or None)
    assert contents(job.output) == contents(exports[name])


def test_the_report_names_the_method_of_each_module_and_a_loss(exports: dict[str, Path]) -> None:
    for name in WEIGHT_ONLY:
        report = read_report(exports[name])
        assert report is not None
        assert report["fallbacks"] == 0 and report["calibration"] == {}
        for layer in report["layers"]:
            assert {module["method"] for module in layer["modules"]} == {CONFIGS[name].method}
            assert len(layer["modules"]) == 7 and all(module["loss"] > 0 for module in layer["modules"])


def test_the_report_of_awq_names_its_method_and_nothing_that_was_left_unscaled(exports: dict[str, Path]) -> None:
    for name in ("awq", "awq as compressed-tensors"):
        report = read_report(exports[name])
        assert report is not None and report["fallbacks"] == 0
        for layer in report["layers"]:
            assert {(module["method"], module["unscaled"]) for module in layer["modules"]} == {("awq", None)}
            assert all(module["loss"] > 0 for module in layer["modules"])


@given(st.dictionaries(st.text(), st.integers(1, 100), min_size=1), st.integers(1, 9))
def test_modules_are_shared_out_once_each_and_about_evenly(costs: dict[str, int], devices: int) -> None:
    assigned = shares(costs, devices)
    assert sorted(name for share in assigned for name in share) == sorted(costs)
    loads = [sum(costs[name] for name in share) for share in assigned]
    assert max(loads) - min(loads) <= max(costs.values())


# What other programs make of the exports ------------------------------------------------------------------------------


def expected_logits(output: Path) -> torch.Tensor:
    """Those of the dense model whose weights are our own reading of the file."""
    return logits(dense_model(output))


def with_rounded_inputs(output: Path, rounded: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """The dense model of our own reading, its linears' inputs rounded as a client rounds them."""
    model: nn.Module = dense_model(output)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return model


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.endswith("as compressed-tensors")])
def test_transformers_reads_packed_integers_exactly(name: str, exports: dict[str, Path]) -> None:
    loaded = load(exports[name])
    assert set(loaded.classes.values()) == {nn.Linear}
    assert {loaded.tensors[f"{module}.weight_packed"].dtype for module in loaded.classes} == {torch.int32}
    assert torch.equal(loaded.logits, expected_logits(exports[name]))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")  # only how to load is passed
@pytest.mark.parametrize("name", ["fp8", "fp8 in blocks"])
def test_transformers_reads_fp8_weights_exactly(name: str, exports: dict[str, Path]) -> None:
    options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if name == "fp8" else {}
    loaded = load(exports[name], **options)
    assert set(loaded.classes.values()) == {nn.Linear}
    assert torch.equal(loaded.logits, expected_logits(exports[name]))


def test_transformers_computes_with_fp8_weights_as_they_are(exports: dict[str, Path]) -> None:
    loaded = load(exports["fp8"])
    assert {loaded.tensors[f"{module}.weight"].dtype for module in loaded.classes} == {torch.float8_e4m3fn}
    expected = with_rounded_inputs(exports["fp8"], lambda x_BTK: rounded_to_e4m3(x_BTK, "row"))
    assert torch.equal(loaded.logits, logits(expected))


@pytest.mark.parametrize("name", ["nf4", "int8"])
def test_bitsandbytes_loads_its_codes(name: str, exports: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    # Where a CPU has AVX512-BF16 it would compute in bfloat16.
    monkeypatch.setattr(bitsandbytes.nn.modules, "has_avx512bf16", lambda: False)
    loaded = load(exports[name])
    replaced = {"nf4": bitsandbytes.nn.Linear4bit, "int8": bitsandbytes.nn.Linear8bitLt}[name]
    assert set(loaded.classes.values()) == {replaced}
    if name == "nf4":
        assert torch.equal(loaded.logits, expected_logits(exports[name]))
    else:
        expected = logits(with_rounded_inputs(exports[name], rounded_to_int8))
        assert relative_difference(loaded.logits, expected) < LAYERS / 2 * INT8_TOLERANCE  # which is that of two layers


def test_a_gguf_export_holds_every_tensor_of_the_source_and_nothing_else(model: Path, exports: dict[str, Path]) -> None:
    source = load_file(model / "model.safetensors")
    for name in GGUF:
        assert sorted(contents(exports[name])) == [GGUF_FILE]
        held = {tensor.name: tensor for tensor in GGUFReader(exports[name] / GGUF_FILE).tensors}
        assert len(held) == len(source)
        down = held["blk.0.ffn_down.weight"]
        dense = torch.from_numpy(dequantize(down.data, down.tensor_type))
        wanted = source["model.layers.0.mlp.down_proj.weight"]
        assert relative_difference(dense, wanted) < (0.01 if name == "q8_0" else 0.1)


@pytest.fixture(scope="module")
def gguf_errors(tmp_path_factory: pytest.TempPathFactory, prefect_server: None) -> dict[str, float]:
    """How far each .gguf export, as transformers reads it, is from its source; without biases, which it leaves out."""
    place = tmp_path_factory.mktemp("gguf")
    source = write_tiny_llama(place / "model", hidden_size=256, intermediate_size=512)
    errors = {}
    for name in GGUF:
        job = tiny_job(source, place, quantization=CONFIGS[name], output=name, root=f"{name} checkpoint")
        quantize_model(job)
        errors[name] = relative_difference(expected_logits(Path(job.output)), expected_logits(source))
    return errors


def test_transformers_reads_a_gguf_export(gguf_errors: dict[str, float]) -> None:
    assert gguf_errors["q8_0"] < 0.05
    assert gguf_errors["q4_k_m"] < 0.5  # as far as other 4-bit methods are on this random model
    assert gguf_errors["q4_k_m with importance"] < 1.05 * gguf_errors["q4_k_m"]
    assert gguf_errors["q4_k_m with importance"] != gguf_errors["q4_k_m"]


def test_biases_that_a_reader_would_leave_out_are_told(exports: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="holds biases"):
        dense_model(exports["q8_0"])


def test_every_export_is_close_to_its_source(model: Path, exports: dict[str, Path]) -> None:
    source = expected_logits(model)
    for name in set(CONFIGS) - set(GGUF):
        assert relative_difference(expected_logits(exports[name]), source) < (0.5 if name in FOUR_BIT else 0.2), name
