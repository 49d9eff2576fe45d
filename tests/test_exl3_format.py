"""The exl3 layout: against GPTQModel's decoder and a scalar one of our own, bit by bit."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tasks.formats import exl3 as layout
from tasks.methods.exl3 import TrellisWeight, matrix_of, words_of
from tasks.methods.exl3_trellis import CODEBOOKS, codebook
from tasks.quantization import EXL3Config

GOLDEN = load_file(Path(__file__).parent / "golden" / "gptqmodel_exl3.safetensors")
# A value of a codebook is rounded to float16 by exllamav3 and by us, and not by GPTQModel: half a unit in the eleventh bit.
HALF_UNIT = 2.0**-11
NAME = "model.layers.0.mlp.up_proj"


def random_weight(bits: int, codebook: str = "mcg", rows: int = 8, columns: int = 16, seed: int = 0) -> TrellisWeight:
    generator = torch.Generator().manual_seed(seed)
    return TrellisWeight(
        symbols_RCL=torch.randint(0, 1 << bits, (rows, columns, 256), generator=generator).to(torch.uint8),
        suh_K=torch.randn(16 * rows, generator=generator).half(),
        svh_N=torch.randn(16 * columns, generator=generator).half(),
        bits=bits,
        codebook=codebook,
        loss=0.0,
    )


def scalar_words(tile_P: Tensor, bits: int) -> list[int]:
    """The word at each position, as exllamav3's kernels read it: 16 bits of a ring, the last being the position's own."""
    halves = [int(half) & 0xFFFF for half in tile_P]
    words_32 = [halves[2 * i] | halves[2 * i + 1] << 16 for i in range(len(halves) // 2)]
    ring = "".join(f"{word:032b}" for word in words_32)
    ends = [(position + 1) * bits for position in range(256)]
    return [int((ring + ring)[len(ring) + end - 16 : len(ring) + end], 2) for end in ends]


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_word_of_a_tile_is_what_a_scalar_reader_finds(bits: int) -> None:
    weight = random_weight(bits, rows=1, columns=2)
    packed_RCP = layout.pack_symbols(weight.symbols_RCL, bits)
    assert packed_RCP.shape == (1, 2, 16 * bits) and packed_RCP.dtype == torch.int16
    words_RCL = words_of(weight.symbols_RCL, bits)
    for tile in range(2):
        assert scalar_words(packed_RCP[0, tile], bits) == words_RCL[0, tile].tolist()


@settings(max_examples=25)
@given(st.integers(2, 8), st.integers(1, 3), st.integers(1, 3), st.integers(0, 99))
def test_unpacking_inverts_packing(bits: int, rows: int, columns: int, seed: int) -> None:
    symbols_RCL = random_weight(bits, rows=rows, columns=columns, seed=seed).symbols_RCL
    assert torch.equal(layout.unpack_symbols(layout.pack_symbols(symbols_RCL, bits), bits), symbols_RCL)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("name", CODEBOOKS)
def test_gptqmodel_reads_the_same_tiles(name: str, bits: int) -> None:
    symbols_RCL = layout.unpack_symbols(GOLDEN[f"{name}.{bits}.trellis"], bits)
    inner_KN = matrix_of(codebook(name)[words_of(symbols_RCL, bits)])
    theirs_KN = GOLDEN[f"{name}.{bits}.inner"]
    assert bool(((inner_KN - theirs_KN).abs() <= theirs_KN.abs() * HALF_UNIT + 2.0**-25).all())
    assert torch.equal(inner_KN, theirs_KN.half().float())  # which is what rounding theirs gives


def test_gptqmodel_reads_the_same_module() -> None:
    tensors = {f"{NAME}.{part}": GOLDEN[f"module.{part}"] for part in ("trellis", "suh", "svh", "mcg")}
    weight = layout.unpack(tensors, NAME, EXL3Config())
    assert (weight.bits, weight.codebook) == (3, "mcg")
    theirs_NK = GOLDEN["module.weight_KN"].t()
    torch.testing.assert_close(
        weight.dequantize()[:64], theirs_NK, rtol=0, atol=float(theirs_NK.abs().max()) * HALF_UNIT
    )
    assert all(
        torch.equal(tensors[name], tensor) for name, tensor in layout.pack(NAME, weight, EXL3Config(), None).items()
    )


@pytest.mark.parametrize("name", CODEBOOKS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_module_is_stored_as_the_list_of_tensors_says(name: str, has_bias: bool) -> None:
    config = EXL3Config(bits=4.5, codebook=name)  # type: ignore[arg-type]
    weight = random_weight(5, name)
    bias = torch.randn(256) if has_bias else None
    packed = layout.pack(NAME, weight, config, bias)
    entry = layout.tensor_storage(NAME, 128, 256, config, 5, has_bias)
    assert entry["bits_per_weight"] == 5 and entry["quant_format"] == "exl3"
    described: dict[str, dict[str, Any]] = entry["stored_tensors"]
    assert packed.keys() == described.keys()
    for full, tensor in packed.items():
        told = described[full]
        assert list(tensor.shape) == told["shape"] and str(tensor.dtype) == f"torch.{told['torch_dtype']}"
        assert tensor.nbytes == told["n_bytes"] == prod(told["shape"]) * tensor.itemsize
        assert tensor.is_contiguous()
    assert sum(tensor.nbytes for tensor in packed.values()) == layout.packed_bytes(128, 256, config, 2 * has_bias, 5)
    again = layout.unpack(packed, NAME, config)
    assert (again.bits, again.codebook) == (5, name)
    assert torch.equal(again.dequantize(), weight.dequantize())
    assert {f"{NAME}.{part}" for part in layout.parts(config)} == packed.keys() - {f"{NAME}.bias"}
    if name != "3inst":
        assert int(packed[f"{NAME}.{name}"]) & 0xFFFFFFFF == entry[f"{name}_multiplier"]


def test_the_described_config_is_read_back() -> None:
    config = EXL3Config(bits=2.25, codebook="mul1")
    assert layout.config_of(layout.quantization_config(config, {})) == config


def test_sizes_that_no_hadamard_block_fits_are_named() -> None:
    complaints = layout.problems(NAME, 576, 200, EXL3Config())
    assert len(complaints) == 2
    assert all(f"`{NAME}`" in complaint and "not a multiple of 128" in complaint for complaint in complaints)
    assert "in_features 576" in complaints[0] and "out_features 200" in complaints[1]
    with pytest.raises(ValueError, match="out_features 144"):
        layout.pack(NAME, random_weight(3, columns=9), EXL3Config(), None)


def test_scales_and_biases_that_float16_can_not_hold_are_refused() -> None:
    weight = random_weight(3)
    weight.suh_K[3] = torch.inf
    with pytest.raises(ValueError, match=f"`{NAME}`: a channel scale"):
        layout.pack(NAME, weight, EXL3Config(), None)
    with pytest.raises(ValueError, match="the bias holds values"):
        layout.pack(NAME, random_weight(3), EXL3Config(), torch.full((256,), 1e6))


def test_another_multiplier_is_refused() -> None:
    packed = layout.pack(NAME, random_weight(3), EXL3Config(), None)
    packed[f"{NAME}.mcg"] += 2
    with pytest.raises(ValueError, match="not the multiplier"):
        layout.unpack(packed, NAME, EXL3Config())
