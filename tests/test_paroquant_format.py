"""The paroquant layout: another program's tensors mean what it computes, and what the layout can't hold is refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.formats.paroquant import config_of, pack, packed_bytes, parts, problems, quantization_config, unpack
from tasks.methods.paroquant import ParoRows, quantize_weight
from tasks.quantization import ParoQuantConfig

GOLDEN = Path(__file__).parent / "golden" / "gptqmodel_paroquant.safetensors"


def rounded(out_features: int, in_features: int, config: ParoQuantConfig) -> ParoRows:
    weight_NK = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0))
    return quantize_weight(weight_NK, None, config, "m", 0, lambda what, error: None)


def test_another_programs_tensors_mean_what_it_computes_and_are_repacked_to_its_bytes() -> None:
    tensors, config = load_file(GOLDEN), ParoQuantConfig()
    theirs = {f"m.{part}": tensors[part] for part in parts(config)}
    rows = unpack(theirs, "m", config)
    outputs_TN = tensors["inputs"] @ rows.dequantize().T
    # float32 rotations one by one there, as one matrix here.
    assert float((outputs_TN - tensors["outputs"]).norm() / tensors["outputs"].norm()) < 1e-4
    theirs["m.scales"] = theirs["m.scales"].half()  # bfloat16 there
    packed = pack("m", unpack(theirs, "m", config), config, None)
    assert packed.keys() == theirs.keys()
    for name, tensor in packed.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("group_size", [64, 128])
def test_unpack_inverts_pack_and_the_bytes_are_those_foretold(group_size: int) -> None:
    config = ParoQuantConfig(group_size=group_size)
    rows = rounded(16, 256, config)
    for bias in (None, torch.ones(16)):
        packed = pack("m", rows, config, bias)
        size = sum(tensor.nbytes for tensor in packed.values())
        assert size == packed_bytes(256, 16, config, bias.nbytes if bias is not None else 0)
    back = unpack(packed, "m", config)
    assert torch.equal(back.dequantize(), rows.dequantize())
    assert torch.equal(back.rotation.pairs_RK, rows.rotation.pairs_RK)


def test_shapes_that_the_layout_cannot_hold_are_refused_by_name() -> None:
    config = ParoQuantConfig()
    assert problems("m", 256, 16, config) == []
    assert "192 is not a multiple of group_size 128; 64 would fit" in problems("m", 192, 16, config)[0]
    assert "no size that readers take would fit" in problems("m", 100, 16, config)[0]
    assert "out_features 12 is not a multiple of 8" in problems("m", 256, 12, config)[0]


def test_angles_that_are_not_finite_are_refused() -> None:
    config = ParoQuantConfig()
    rows = rounded(16, 256, config)
    rows.rotation.theta_RP[2, 3] = torch.nan
    with pytest.raises(ValueError, match="`m`: an angle or a channel scale is NaN or infinite"):
        pack("m", rows, config, None)


def test_the_config_of_a_file_says_how_to_read_it() -> None:
    described = quantization_config(ParoQuantConfig(group_size=64))
    assert config_of(described) == ParoQuantConfig(group_size=64)
    assert (described["quant_method"], described["krot"]) == ("paroquant", 8)
