"""The qqq layout: packed words are another program's bytes and mean what it computes; bad shapes are refused by name."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from tasks.formats.qqq import (
    config_of,
    pack,
    pack_codes,
    packed_bytes,
    parts,
    problems,
    quantization_config,
    unpack,
    unpack_codes,
)
from tasks.methods.qqq import QQQRows, round_to_nearest
from tasks.quantization import QQQConfig

GOLDEN = Path(__file__).parent / "golden" / "gptqmodel_qqq.safetensors"
GROUP_SIZES = (128, -1)


@given(st.integers(1, 3), st.integers(1, 4), st.booleans(), st.integers(0, 2**31))
def test_unpack_inverts_pack(tiles_n: int, tiles_k: int, is_grouped: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes_NK = torch.randint(0, 16, (64 * tiles_n, 16 * tiles_k), generator=generator, dtype=torch.uint8)
    packed = pack_codes(codes_NK, is_grouped=is_grouped)
    assert packed.dtype == torch.int32 and packed.shape == (tiles_k, 128 * tiles_n)
    assert torch.equal(unpack_codes(packed, is_grouped=is_grouped), codes_NK)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_unpacking_another_programs_tensors_and_repacking_gives_its_bytes(group_size: int) -> None:
    tensors = load_file(GOLDEN)
    config = QQQConfig(group_size=group_size)
    theirs = {f"m.{part}": tensors[f"g{group_size}.{part}"] for part in parts(config)}
    packed = pack("m", unpack(theirs, "m", config), config, None)
    assert set(packed) == set(theirs)
    for name, tensor in packed.items():
        assert tensor.dtype == theirs[name].dtype and tensor.shape == theirs[name].shape
        assert torch.equal(tensor, theirs[name])


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_what_the_tensors_mean_is_what_another_program_computes(group_size: int) -> None:
    tensors = load_file(GOLDEN)
    config = QQQConfig(group_size=group_size)
    rows = unpack({f"m.{part}": tensors[f"g{group_size}.{part}"] for part in parts(config)}, "m", config)
    x_TK = tensors["inputs"][:8].float() / 8
    scale_T1 = x_TK.abs().amax(dim=1, keepdim=True) / 127
    # Whole numbers below 2^24: their products are exact in float32.
    expected_TN = ((x_TK / scale_T1).round() @ rows.integers().T) * scale_T1 * rows.channel_N
    assert torch.equal(expected_TN, tensors[f"g{group_size}.outputs"])


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_an_export_takes_the_bytes_that_were_foretold(group_size: int) -> None:
    config = QQQConfig(group_size=group_size)
    rows = round_to_nearest(torch.randn(64, 384, generator=torch.Generator().manual_seed(1)), config)
    for bias in (None, torch.ones(64)):
        packed = pack("m", rows, config, bias)
        size = sum(tensor.nbytes for tensor in packed.values())
        assert size == packed_bytes(384, 64, config, bias.nbytes if bias is not None else 0)


@pytest.mark.parametrize(
    ("in_features", "out_features", "group_size", "message"),
    [
        (576, 576, -1, "576 and out_features 576 fill no tile"),
        (256, 96, 128, "out_features 96 fill no tile"),
        (192, 128, 128, "192 is not a multiple of group_size 128"),
        (128, 64, 128, "single group of 128"),
    ],
)
def test_shapes_that_no_kernel_takes_are_refused_by_name(
    in_features: int, out_features: int, group_size: int, message: str
) -> None:
    config = QQQConfig(group_size=group_size)
    (problem,) = problems("mlp.up_proj", in_features, out_features, config)
    assert "`mlp.up_proj`" in problem and message in problem
    rows = QQQRows(
        torch.zeros(out_features, in_features, dtype=torch.uint8), torch.ones(out_features),
        torch.ones(out_features, max(1, in_features // 128)).half(), torch.zeros(out_features),
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        pack("mlp.up_proj", rows, config, None)


@pytest.mark.parametrize(("in_features", "out_features"), [(128, 64), (64, 128), (192, 256), (384, 192)])
def test_shapes_that_a_kernel_takes_are_not(in_features: int, out_features: int) -> None:
    assert problems("m", in_features, out_features, QQQConfig(group_size=-1)) == []


def test_a_bias_that_half_precision_cannot_hold_is_refused() -> None:
    config = QQQConfig()
    rows = round_to_nearest(torch.ones(64, 256), config)
    with pytest.raises(ValueError, match="`m`: the bias holds values that float16"):
        pack("m", rows, config, torch.full((64,), 1e6))


@pytest.mark.parametrize("bad", [0.0, -1.0, float("inf"), float("nan")])
def test_a_bad_scale_is_refused(bad: float) -> None:
    config = QQQConfig()
    rows = round_to_nearest(torch.ones(64, 256), config)
    rows.channel_N[3] = bad
    with pytest.raises(ValueError, match="`m`: a scale is zero, negative, NaN or infinite"):
        pack("m", rows, config, None)


@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_the_config_of_a_file_says_how_to_read_it(group_size: int) -> None:
    described = quantization_config(QQQConfig(group_size=group_size))
    assert config_of(described) == QQQConfig(group_size=group_size)
    assert described["quant_method"] == "qqq" and described["wbits"] == 4
