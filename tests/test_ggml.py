import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tasks.methods import ggml
from tasks.methods.ggml_blocks import BLOCK_TYPES, pack_planes, unpack_planes
from tasks.methods.grid import WeightError
from tasks.methods.importance import ImportanceSum

GOLDEN = load_file(Path(__file__).parent / "golden" / "llamacpp_blocks.safetensors")
WITH_REFERENCE = ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"]
K_QUANTS = ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k"]
ALL = WITH_REFERENCE + K_QUANTS


def package_type(block_type: str) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[block_type.upper()]


@st.composite
def weights(draw: st.DrawFn) -> Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight_NK = torch.randn(draw(st.integers(1, 5)), 256 * draw(st.integers(1, 3)), generator=generator)
    kind = draw(st.sampled_from(["normal", "coarse", "shifted", "sparse"]))
    if kind == "coarse":  # ties everywhere: of the largest magnitude, and half way between codes
        weight_NK = (weight_NK * 2).round() / 4
    elif kind == "shifted":
        weight_NK += draw(st.sampled_from([-3.0, 3.0]))
    elif kind == "sparse":
        weight_NK *= torch.rand(weight_NK.shape, generator=generator) < 0.02
    # Plus zero: of 0.0 and -0.0 either is the smallest, and what numpy takes depends on the machine.
    return weight_NK * draw(st.sampled_from([1.0, 0.02, 1e-4, 100.0])) + 0.0


def test_sizes_and_numbers_of_the_types_are_those_of_the_package():
    for name, block in BLOCK_TYPES.items():
        assert (block.weights, block.size_bytes) == gguf.GGML_QUANT_SIZES[package_type(name)]
        assert block.ggml_id == package_type(name).value
    assert set(BLOCK_TYPES) == set(ALL)


@pytest.mark.parametrize("block_type", WITH_REFERENCE)
@given(weight_NK=weights())
@settings(deadline=None, max_examples=60)
def test_bytes_are_those_of_the_packages_reference_quantization(block_type, weight_NK):
    theirs = gguf.quantize(weight_NK.numpy(), package_type(block_type))
    assert np.array_equal(ggml.quantize_rows(weight_NK, block_type).blocks_NP.numpy(), theirs)


@pytest.mark.parametrize("block_type", WITH_REFERENCE)
def test_bytes_are_those_of_llamacpp(block_type):
    ours = ggml.quantize_rows(GOLDEN["weight"], block_type)
    assert torch.equal(ours.blocks_NP, GOLDEN[f"{block_type}.plain"])


@pytest.mark.parametrize("block_type", ALL)
def test_any_bytes_decode_to_what_the_package_decodes_them_to(block_type):
    generator = torch.Generator().manual_seed(0)
    shape = (100, 3 * BLOCK_TYPES[block_type].size_bytes)
    blocks_NP = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # random scales are infinite now and then
        theirs = gguf.dequantize(blocks_NP.numpy(), package_type(block_type))
    assert np.array_equal(ggml.decode(blocks_NP, block_type).numpy(), theirs, equal_nan=True)


@pytest.mark.parametrize("block_type", K_QUANTS)
def test_k_quants_lose_less_than_llamacpps(block_type):
    weight_NK = GOLDEN["weight"].float()
    theirs_NK = ggml.decode(GOLDEN[f"{block_type}.plain"], block_type)
    ours = ggml.quantize_rows(weight_NK, block_type)
    assert ours.loss < float((theirs_NK - weight_NK).square().mean())


@pytest.mark.parametrize("block_type", [name for name in ALL if name != "q8_0"])
def test_with_importance_the_weighted_error_is_less_than_llamacpps_and_than_without(block_type):
    weight_NK, importance_K = GOLDEN["weight"].float(), GOLDEN["importance"]

    def error(dense_NK: Tensor) -> float:
        return float(((dense_NK - weight_NK).square() * importance_K).mean())

    ours = error(ggml.quantize_rows(weight_NK, block_type, importance_K).dequantize())
    assert ours < error(ggml.decode(GOLDEN[f"{block_type}.weighted"], block_type))
    assert ours < 0.95 * error(ggml.quantize_rows(weight_NK, block_type).dequantize())


@pytest.mark.parametrize("block_type", K_QUANTS)
@given(weight_NK=weights())
@settings(deadline=None, max_examples=30)
def test_k_quants_lose_no_more_than_rounding_to_the_plain_grid_can(block_type, weight_NK):
    last_code, last_scale = {"q2_k": (3, 15), "q3_k": (4, 32), "q4_k": (15, 63), "q5_k": (31, 63), "q6_k": (32, 128)}[
        block_type
    ]
    dense_NK = ggml.quantize_rows(weight_NK, block_type).dequantize()
    error_B = (dense_NK - weight_NK).reshape(-1, 256).square().mean(dim=1).sqrt()
    largest_B = weight_NK.reshape(-1, 256).abs().amax(dim=1)
    # Half a step, a whole one where the grid ends a code early, and scale and min off by half of theirs.
    limit_B = largest_B * (1 / last_code + 1.6 / last_scale) + 2.0**-25 * 64
    assert bool((error_B <= limit_B).all())


@pytest.mark.parametrize("block_type", ALL)
def test_losses_are_the_mean_squared_errors_of_the_rows(block_type):
    weight_NK = GOLDEN["weight"].float()
    rows = ggml.quantize_rows(weight_NK, block_type)
    expected_N = (rows.dequantize() - weight_NK).square().mean(dim=1)
    torch.testing.assert_close(rows.losses_N, expected_N)
    assert rows.loss == pytest.approx(float(expected_N.mean()))


@pytest.mark.parametrize("importance_K", [None, torch.rand(512)], ids=["plain", "weighted"])
@pytest.mark.parametrize("block_type", ALL)
def test_zeros_come_back_as_exact_zeros(block_type, importance_K):
    weight_NK = torch.randn(3, 512)
    weight_NK[1] = 0
    weight_NK[2, 256:] = 0
    dense_NK = ggml.quantize_rows(weight_NK, block_type, importance_K).dequantize()
    assert not dense_NK[1].any() and not dense_NK[2, 256:].any()
    assert bool(dense_NK.isfinite().all())


@pytest.mark.parametrize("importance_K", [None, torch.rand(512)], ids=["plain", "weighted"])
@pytest.mark.parametrize("magnitude", [1e-3, 1e-6, 1e-9, 1e-20, 1e-38, 1e-44])
@pytest.mark.parametrize("block_type", ALL)
def test_tiny_weights_stay_finite_and_no_farther_than_their_size(block_type, magnitude, importance_K):
    torch.manual_seed(0)
    weight_NK = torch.randn(3, 512).clamp(-3, 3) * magnitude
    dense_NK = ggml.quantize_rows(weight_NK, block_type, importance_K).dequantize()
    assert bool(dense_NK.isfinite().all())
    # A half-precision scale can't be nearer than half its smallest step, times the farthest code.
    assert float((dense_NK - weight_NK).abs().max()) <= 3 * magnitude + 2.0**-25 * 128


@pytest.mark.parametrize("value", [7.0, -7.0, 1e-3, 6e4])
@pytest.mark.parametrize("block_type", ALL)
def test_constant_rows_come_back(block_type, value):
    dense_NK = ggml.quantize_rows(torch.full((2, 256), value), block_type).dequantize()
    torch.testing.assert_close(dense_NK, torch.full((2, 256), value), rtol=1e-2, atol=0)


@pytest.mark.parametrize("block_type", K_QUANTS)
def test_one_large_weight_spoils_its_block_only(block_type):
    torch.manual_seed(0)
    weight_NK = torch.randn(2, 768)
    weight_NK[0, 300] = 6e4
    spoilt_NK = ggml.quantize_rows(weight_NK, block_type).dequantize()
    assert bool(spoilt_NK.isfinite().all())
    weight_NK[0, 300] = 0
    whole_NK = ggml.quantize_rows(weight_NK, block_type).dequantize()
    assert torch.equal(spoilt_NK[1], whole_NK[1])
    assert torch.equal(spoilt_NK[0, :256], whole_NK[0, :256]) and torch.equal(spoilt_NK[0, 512:], whole_NK[0, 512:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 7e4, 1e30])
@pytest.mark.parametrize("block_type", ["q4_0", "q8_0", "q4_k", "q6_k"])
def test_damaged_and_huge_weights_are_refused_with_their_row(block_type, value):
    weight_NK = torch.randn(4, 256)
    weight_NK[2, 5] = value
    with pytest.raises(WeightError, match="row 2 "):
        ggml.quantize_rows(weight_NK, block_type)


def test_rows_that_blocks_do_not_fill_are_refused():
    with pytest.raises(ValueError, match="rows of 576 weights can't be q4_k: its blocks hold 256"):
        ggml.quantize_rows(torch.randn(2, 576), "q4_k")
    with pytest.raises(ValueError, match="rows of 100 bytes are not q8_0"):
        ggml.decode(torch.zeros(2, 100, dtype=torch.uint8), "q8_0")


@pytest.mark.parametrize("importance_K", [None, torch.rand(512)], ids=["plain", "weighted"])
@pytest.mark.parametrize("block_type", ALL)
def test_rows_do_not_depend_on_each_other_or_on_the_dtype(block_type, importance_K):
    torch.manual_seed(0)
    weight_NK = torch.randn(700, 512).bfloat16()  # more rows than are encoded at once
    whole = ggml.quantize_rows(weight_NK, block_type, importance_K)
    part = ggml.quantize_rows(weight_NK[509:520].float(), block_type, importance_K)
    assert torch.equal(part.blocks_NP, whole.blocks_NP[509:520])
    assert torch.equal(part.losses_N, whole.losses_N[509:520])


@pytest.mark.parametrize("block_type", ALL)
def test_importance_counts_relatively_and_none_at_all_is_all_alike(block_type):
    torch.manual_seed(0)
    weight_NK, importance_K = torch.randn(3, 512), torch.rand(512)
    once, scaled = (ggml.quantize_rows(weight_NK, block_type, scale * importance_K) for scale in (1.0, 2.0**40))
    assert torch.equal(once.blocks_NP, scaled.blocks_NP)
    nothing, alike = (ggml.quantize_rows(weight_NK, block_type, f(512)) for f in (torch.zeros, torch.ones))
    assert torch.equal(nothing.blocks_NP, alike.blocks_NP)


@pytest.mark.parametrize("block_type", ALL)
def test_columns_that_nothing_enters_are_still_rounded(block_type):
    torch.manual_seed(0)
    weight_NK, importance_K = torch.randn(3, 512), torch.zeros(512)
    importance_K[::64] = 1.0
    dense_NK = ggml.quantize_rows(weight_NK, block_type, importance_K).dequantize()
    assert float((dense_NK - weight_NK).square().mean()) < 0.5


@pytest.mark.parametrize(
    ("importance_K", "message"),
    [
        (torch.ones(511), "512 input columns need one each"),
        (-torch.ones(512), "negative or non-finite"),
        (torch.full((512,), torch.nan), "negative or non-finite"),
    ],
)
def test_an_importance_that_is_none_is_refused(importance_K, message):
    with pytest.raises(ValueError, match=message):
        ggml.quantize_rows(torch.randn(2, 512), "q4_k", importance_K)


@given(st.sampled_from([(1, 1), (1, 32), (2, 4), (2, 32), (4, 8), (4, 16), (4, 32), (4, 64)]), st.integers(0, 2**31))
@example((4, 16), 0)
@settings(deadline=None)
def test_unpacking_planes_inverts_packing_them(plane, seed):
    bits, width = plane
    codes_BC = torch.randint(0, 2**bits, (3, 256), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
    packed_BP = pack_planes(codes_BC, bits, width)
    assert packed_BP.shape == (3, 256 * bits // 8)
    assert torch.equal(unpack_planes(packed_BP, bits, width), codes_BC)


def test_low_nibbles_hold_the_first_half_of_a_block():
    codes_BC = torch.arange(32)[None] % 16
    codes_BC[0, 16:] = 15 - codes_BC[0, 16:]
    assert pack_planes(codes_BC, 4, 16).tolist() == [[(15 - i) * 16 + i for i in range(16)]]


def test_importance_is_the_mean_square_however_tokens_are_split():
    torch.manual_seed(0)
    x_TK = torch.randn(50, 8).bfloat16()
    whole, first, second = (ImportanceSum(8) for _ in range(3))
    whole.add(x_TK)
    first.add(x_TK[:13])
    second.add(x_TK[13:20])
    second.add(x_TK[20:])
    first.merge(second)
    torch.testing.assert_close(whole.importance(), x_TK.float().square().mean(dim=0))
    torch.testing.assert_close(first.importance(), whole.importance())
    assert first.tokens == 50


def test_importance_without_tokens_is_refused():
    with pytest.raises(ValueError, match="no calibration token"):
        ImportanceSum(8).importance()
