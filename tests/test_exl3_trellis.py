"""Codebooks and the search for paths: against scalar programs, all paths of small trellises, and theory."""

import itertools
import os
import shutil
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tasks.methods import exl3_trellis
from tasks.methods.exl3 import SPREADS, USUAL_SCALES
from tasks.methods.exl3_trellis import CODEBOOKS, TILE, Trellis, codebook


def half_of(bits: int) -> Fraction:
    return Fraction(struct.unpack("<e", struct.pack("<H", bits))[0])


def nearest_half(value: Fraction) -> float:
    """Rounded once: the fractions here are exact in a float."""
    assert Fraction(float(value)) == value
    return float(struct.unpack("<e", struct.pack("<e", float(value)))[0])


def scalar_value(name: str, word: int) -> float:
    """The value of a word, by exact fractions: what exllamav3's kernels compute with float16 instructions."""
    if name == "mul1":
        mixed = word * 0x83DCD12D % 2**32
        total = sum(mixed.to_bytes(4, "little"))
        return nearest_half((1024 + total) * half_of(0x1EEE) + half_of(0xC931))
    mixed = word * 0xCBAC1FED % 2**32 if name == "mcg" else (word * 89226354 + 64248484) % 2**32
    mixed = (mixed & 0x8FFF8FFF) ^ 0x3B603B60
    return nearest_half(half_of(mixed & 0xFFFF) + half_of(mixed >> 16))


@pytest.mark.parametrize("name", CODEBOOKS)
def test_a_codebook_holds_what_exact_fractions_rounded_once_give(name: str) -> None:
    values_S = codebook(name)
    assert values_S.shape == (65536,) and values_S.dtype == torch.float32
    for word in [0, 1, 2, 65535, *range(7, 65536, 97)]:
        assert float(values_S[word]) == scalar_value(name, word)


@pytest.mark.parametrize("name", CODEBOOKS)
def test_a_codebook_is_centred_and_has_the_spread_that_scales_are_made_for(name: str) -> None:
    values_S = codebook(name)
    assert abs(float(values_S.mean())) < 0.01
    assert float(values_S.std()) == pytest.approx(SPREADS[name], abs=1e-4)


def is_closed(words_BL: Tensor, trellis: Trellis) -> bool:
    before_BL = words_BL.roll(1, dims=1)
    return bool((words_BL >> trellis.bits == before_BL & (trellis.nodes - 1)).all())


def all_closed_paths(trellis: Trellis, length: int) -> Tensor:
    """The words of every ring of symbols, [paths, L]."""
    rings = []
    for symbols in itertools.product(range(1 << trellis.bits), repeat=length):
        word, words = 0, []
        for symbol in (*symbols, *symbols):  # twice round: what was before the first word is its own end
            word = (word << trellis.bits | symbol) & ((1 << trellis.word_bits) - 1)
            words.append(word)
        rings.append(words[length:])
    return torch.tensor(rings)


@pytest.mark.parametrize(("word_bits", "bits", "length"), [(4, 1, 8), (6, 1, 10), (4, 2, 6), (6, 2, 6), (6, 3, 4)])
def test_no_closed_path_through_the_same_node_is_better_than_the_one_found(
    word_bits: int, bits: int, length: int
) -> None:
    generator = torch.Generator().manual_seed(word_bits * bits)
    trellis = Trellis(torch.randn(1 << word_bits, generator=generator), bits)
    tiles_BL = torch.randn(24, length, generator=generator)
    words_BL = trellis.search(tiles_BL)
    assert is_closed(words_BL, trellis)
    paths_PL = all_closed_paths(trellis, length)
    values_PL = trellis.decode(paths_PL)
    for tile_L, words_L in zip(tiles_BL, words_BL, strict=True):
        costs_P = (values_PL - tile_L).square().sum(dim=1)
        found = (trellis.decode(words_L) - tile_L).square().sum()
        through_P = paths_PL[:, 0] >> bits == words_L[0] >> bits
        torch.testing.assert_close(found, costs_P[through_P].min())


def greedy(trellis: Trellis, tile_L: Tensor) -> float:
    """The cost of an open path that takes the nearest value at every step: with no ring to close, an easier task."""
    cost, node = 0.0, 0
    for value in tile_L:
        words = (node << trellis.bits) + torch.arange(1 << trellis.bits)
        errors = (trellis.values_S[words] - value).square()
        cost += float(errors.min())
        node = int(words[errors.argmin()]) & (trellis.nodes - 1)
    return cost


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_a_path_is_closed_and_better_than_taking_the_nearest_value_each_time(bits: int) -> None:
    trellis = Trellis(codebook("mcg"), bits)
    tiles_BL = torch.randn(2, TILE, generator=torch.Generator().manual_seed(bits))
    words_BL = trellis.search(tiles_BL)
    assert is_closed(words_BL, trellis)
    costs_B = (trellis.decode(words_BL) - tiles_BL).square().sum(dim=1)
    for tile_L, cost in zip(tiles_BL, costs_B, strict=True):
        assert float(cost) < 0.8 * greedy(trellis, tile_L)


# Mean squared error of unit Gaussian weights: QTIP's tables for codes of 16 bits have 0.069 at 2 bits; nothing is below
# the bound 4^-bits.
@pytest.mark.parametrize(("bits", "at_most"), [(2, 0.0725), (3, 0.0190), (4, 0.0050), (5, 0.00130), (6, 0.00035)])
def test_gaussian_weights_lose_what_theory_says(bits: int, at_most: float) -> None:
    tiles_BL = torch.randn(6, TILE, generator=torch.Generator().manual_seed(0))
    tiles_BL /= tiles_BL.square().mean().sqrt()
    trellis, scale = Trellis(codebook("mcg"), bits), SPREADS["mcg"] * USUAL_SCALES[bits]
    decoded_BL = trellis.decode(trellis.search(tiles_BL * scale)) / scale
    assert 4.0**-bits < float((decoded_BL - tiles_BL).square().mean()) < at_most


@pytest.mark.parametrize("bits", [3, 7])
def test_a_path_depends_on_its_tile_alone(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the tiles beside it, on how many go together, or on the number of threads."""
    tiles_BL = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    together_BL = Trellis(codebook("mcg"), bits).search(tiles_BL)
    threads = torch.get_num_threads()
    try:
        for count, at_once in ((1, 1), (3, 2), (2, 100)):
            torch.set_num_threads(count)
            monkeypatch.setitem(exl3_trellis.TILES_AT_ONCE, "cpu", at_once)
            assert torch.equal(Trellis(codebook("mcg"), bits).search(tiles_BL), together_BL)
    finally:
        torch.set_num_threads(threads)
    trellis = Trellis(codebook("mcg"), bits)
    for tile_1L, words_1L in zip(tiles_BL.flip(0).split(1), together_BL.flip(0).split(1), strict=True):
        assert torch.equal(trellis.search(tile_1L), words_1L)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_compiled_code_finds_the_same_paths(bits: int) -> None:
    tiles_BL = torch.randn(11, 64, generator=torch.Generator().manual_seed(bits))
    words_BL = Trellis(codebook("mcg"), bits).search(tiles_BL)
    trellis = Trellis(codebook("mcg"), bits, compiled=True)
    assert torch.equal(trellis.search(tiles_BL), words_BL)
    # Every cost on the way too, and not only what became of it.
    plain_LBV = Trellis(codebook("mcg"), bits)._forward(tiles_BL[:8].t().contiguous(), None)
    assert torch.equal(trellis._forward(tiles_BL[:8].t().contiguous(), None), plain_LBV)


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(6, 40), st.integers(0, 9))
def test_paths_of_any_length_and_scale_are_closed(bits: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    trellis = Trellis(torch.randn(64, generator=generator), bits)
    tiles_BL = torch.randn(3, length, generator=generator) * 10.0 ** (seed - 4)
    assert is_closed(trellis.search(tiles_BL), trellis)


def test_no_tiles_have_no_paths() -> None:
    assert Trellis(torch.randn(64), 2).search(torch.empty(0, 16)).shape == (0, 16)
