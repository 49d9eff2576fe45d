"""Weights that broke other quantizers, through the methods and into their layouts: exact zeros, finite bytes, or a refusal.

EXL3, whose search takes long, has the like in test_exl3.py.
"""

import pytest
import torch
from torch import Tensor

from tasks.formats import gguf
from tasks.gguf_scheme import GGUFScheme
from tasks.methods.grid import WeightError
from tasks.methods.hessian import HessianError
from tasks.models.source import SourceModel
from tasks.quantization import (
    AWQConfig,
    BitsAndBytesConfig,
    FP8Config,
    GGUFConfig,
    GPTQConfig,
    ParoQuantConfig,
    QQQConfig,
    Quantization,
    RTNConfig,
)
from tasks.quantize_layer import scan
from tasks.schemes import scheme_of
from tests.tiny_models import write_tiny_llama

NAME = "model.layers.0.mlp.up_proj"
CONFIGS: dict[str, Quantization] = {
    "gptq": GPTQConfig(group_size=32),
    "gptq asymmetric": GPTQConfig(group_size=32, sym=False),
    "awq": AWQConfig(group_size=32),
    "awq symmetric, not clipped": AWQConfig(group_size=32, sym=True, apply_clip=False),
    "qqq": QQQConfig(),
    "qqq by rows": QQQConfig(group_size=-1, mse=2.4),
    "paroquant": ParoQuantConfig(group_size=64),
    "rtn": RTNConfig(group_size=32),
    "rtn asymmetric": RTNConfig(group_size=32, sym=False),
    "rtn 8 bit": RTNConfig(bits=8, group_size=-1, checkpoint_format="compressed-tensors"),
    **{f"fp8 {granularity}": FP8Config(granularity=granularity) for granularity in ("tensor", "row", "block")},
    "fp8 e5m2": FP8Config(fp8_format="e5m2", checkpoint_format="fp8"),
    "nf4": BitsAndBytesConfig(),
    "fp4 without double quantization": BitsAndBytesConfig(quant_type="fp4", double_quant=False),
    "int8": BitsAndBytesConfig(quant_type="int8"),
    **{name: GGUFConfig(quant_type=name) for name in ("q4_0", "q5_0", "q8_0", "q2_k", "q3_k_m", "q4_k_m", "q6_k")},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    path = tmp_path_factory.mktemp("model") / "tiny"
    return SourceModel.open(str(write_tiny_llama(path, layers=1, hidden_size=256, intermediate_size=512)))


@pytest.fixture
def weight_NK() -> Tensor:
    return torch.randn(512, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


def through(config: Quantization, source: SourceModel, weight_NK: Tensor) -> Tensor:
    """What a reader of the export sees of these weights; what is written is scanned first."""
    scheme = scheme_of(config, source)
    if scheme.quantizes_units:
        total = scheme.statistic(weight_NK.shape[1], torch.device("cpu"))
        total.add(torch.randn(600, weight_NK.shape[1], generator=torch.Generator().manual_seed(1)))
        state = scheme.prepare(total, 600, NAME).state
        assert state is not None
        scheme.check(weight_NK.float())
        try:
            rows = scheme.quantize_unit(weight_NK.float(), state)
        except HessianError:  # as a shard does then
            rows = scheme.quantize_unit(weight_NK.float(), None)
    else:
        rows = scheme.quantize(NAME, weight_NK, None)
    packed = scheme.pack(NAME, rows, None)
    scan(packed, "model.layers.0")
    if isinstance(scheme, GGUFScheme):
        entry = scheme.entries[f"{NAME}.weight"]
        return gguf.decode(entry, packed[entry.name])
    dense: Tensor = scheme.layout.unpack(packed, NAME, config).dequantize()
    return dense


@pytest.mark.parametrize("name", CONFIGS)
def test_zeros_come_back_as_exact_zeros(name: str, source: SourceModel, weight_NK: Tensor) -> None:
    weight_NK[3], weight_NK[100:140] = 0, 0
    dense_NK = through(CONFIGS[name], source, weight_NK)
    assert not dense_NK[3].any() and not dense_NK[100:140].any() and bool(dense_NK[4].any())
    assert not through(CONFIGS[name], source, torch.zeros_like(weight_NK)).any()
    if CONFIGS[name].method not in ("gptq", "qqq"):  # which move errors of other columns here
        weight_NK[:, :128] = 0
        assert not through(CONFIGS[name], source, weight_NK)[:, :128].any()


@pytest.mark.parametrize("magnitude", [1e-6, 1e-12, 1e-30])
@pytest.mark.parametrize("name", CONFIGS)
def test_tiny_weights_come_back_finite_and_no_larger(
    name: str, magnitude: float, source: SourceModel, weight_NK: Tensor
) -> None:
    dense_NK = through(CONFIGS[name], source, weight_NK * magnitude)
    assert bool(dense_NK.isfinite().all())
    # Where a scale of half precision ends, weights become zeros or the smallest that it holds.
    assert float(dense_NK.abs().max()) <= max(1.3 * float(weight_NK.float().abs().max()) * magnitude, 2.0**-15)


@pytest.mark.parametrize("value", [6e4, 1e38])
@pytest.mark.parametrize("name", CONFIGS)
def test_one_huge_weight_is_held_or_refused(name: str, value: float, source: SourceModel, weight_NK: Tensor) -> None:
    weight_NK[5, 7] = value
    try:
        dense_NK = through(CONFIGS[name], source, weight_NK)
    except WeightError as error:
        assert any(word in str(error) for word in ("row 5", "double_quant", "scale")), error
    else:
        assert bool(dense_NK.isfinite().all())
        assert float(dense_NK[5, 7]) == pytest.approx(float(weight_NK[5, 7]), rel=0.3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", CONFIGS)
def test_weights_that_are_not_finite_are_refused_with_their_row(
    name: str, value: float, source: SourceModel, weight_NK: Tensor
) -> None:
    weight_NK[5, 7] = value
    with pytest.raises(WeightError, match="row 5"):
        through(CONFIGS[name], source, weight_NK)
