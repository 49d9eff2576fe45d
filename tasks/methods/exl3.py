"""EXL3: weights are turned until they look Gaussian, then coded by a trellis, errors fed back block by block.

The method of exllamav3 (a variant of QTIP, arXiv 2406.11235, and of QuIP#, 2402.04396), computed anew in plain torch.
With W the weight as [K, N], H a Hadamard matrix in blocks of 128 (symmetric and orthogonal), and a scale with a random
sign for every input channel (suh) and output channel (svh),

    W = diag(suh) H inner H diag(svh).

Every number of `inner` is a sum of 128 weights with random signs, and so nearly Gaussian whatever W was: what the
codebook is made for. `inner` is cut into tiles of 16 x 16 and each is coded by a closed path (exl3_trellis.py).

LDLQ: for inputs with Hessian A the output error of `inner` is that of its inputs, A' = H diag(suh) A diag(suh) H. With
A' = L D L^T, L unit lower in blocks of 16, blocks of input channels are coded from the last to the first, and block i
takes up sum over j > i of L_ji^T error_j before: what then remains of the error is weighed by D alone. `sigma_reg` of
A's mean diagonal is added first. float64 until L, since A is ill-conditioned.

Where this differs from exllamav3: A' holds the channel scales and not only their signs, so it is the Hessian of what is
really coded (it is factored per module); suh and svh are rounded to float16 before the weights are divided by them, so
their rounding costs nothing; channels of zeros get the scale 0 and come back as zeros; the scale of `inner` is searched
around the best one for a Gaussian, which is known, with a sixteenth of a module's tiles at most.

Signs are drawn from the seed and the module's name on the CPU, so that they are the same on every device.

Shape suffixes: N out_features, K in_features, R blocks of 16 input channels, C blocks of 16 output channels, L positions
of a tile.
"""

import hashlib
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from tasks.methods.exl3_trellis import TILE, Trellis, codebook
from tasks.methods.grid import WeightError, check_finite, row_losses
from tasks.methods.hessian import ActivationError, HessianError
from tasks.quantization import EXL3Config

BLOCK = 128
SIDE = 16
# Standard deviation of the values of the codebooks made of two float16, over which exllamav3 states its scales.
SPREADS = {"3inst": 1.2437, "mcg": 1.2441, "mul1": 1.0003}
# Times that spread: the scale at which Gaussian weights have the least error. The values end at 3.2 (mul1: 3.5) standard
# deviations, which costs more the finer they lie. benchmarks/exl3.py --scales
USUAL_SCALES = {2: 0.98, 3: 0.95, 4: 0.90, 5: 0.85, 6: 0.80, 7: 0.76, 8: 0.73}
# With `out_scales` "auto", output channels get scales unless 2% of the input channels carry this share of all.
SKEW = 0.15
# Times the usual scale of `inner`: tried on a sample of the tiles.
SCALES_TRIED = (0.94, 1.0, 1.06)
SAMPLED_SHARE, FEWEST_SAMPLED, MOST_SAMPLED = 16 * len(SCALES_TRIED), 4, 64
# Mean magnitudes of suh below or above these share their exponent with svh, so that float16 holds both.
SMALLEST_MEAN, LARGEST_MEAN = 2.0**-10, 2.0**10


@dataclass(frozen=True, eq=False)
class TrellisWeight:
    """A module as the format holds it, and its loss.

    symbols_RCL uint8: the newest `bits` bits at each position of each tile, in the order of the path; suh_K, svh_N
    float16. `loss`: mean over output channels of the squared output error per token, or of the weight error where
    no Hessian was known.
    """

    symbols_RCL: Tensor
    suh_K: Tensor
    svh_N: Tensor
    bits: int
    codebook: str
    loss: float
    fallback: str | None = None  # why a Hessian that was there was not used

    def dequantize(self) -> Tensor:
        """float32 [N, K]: what a reader of the exported file computes."""
        values_S = codebook(self.codebook).to(self.symbols_RCL.device)
        # A row of blocks at a time: words take eight bytes each.
        inner = [matrix_of(values_S[words_of(row_1CL, self.bits)]) for row_1CL in self.symbols_RCL.split(1)]
        return _outer(torch.cat(inner), self.suh_K, self.svh_N)

    def because(self, fallback: str) -> "TrellisWeight":
        """The same, with the reason why its Hessian was not used."""
        return replace(self, fallback=fallback)

    def to(self, device: torch.device | str) -> "TrellisWeight":
        """This weight on `device`."""
        moved = (self.symbols_RCL.to(device), self.suh_K.to(device), self.svh_N.to(device))
        return replace(self, symbols_RCL=moved[0], suh_K=moved[1], svh_N=moved[2])


def quantize_weight(
    weight_NK: Tensor, hessian_KK: Tensor | None, config: EXL3Config, bits: int, name: str, seed: int
) -> TrellisWeight:
    """One whole module of that full name, on the weight's device; without a Hessian, each tile to its nearest path.

    `hessian_KK` is that of the module's inputs, 2/T sum x x^T, and is unchanged. WeightError for weights that are not
    finite, ActivationError for a Hessian that is not, HessianError for one that won't factor.
    """
    check_finite(weight_NK)
    weight_KN = weight_NK.float().t()
    if hessian_KK is not None and not bool(hessian_KK.isfinite().all()):
        raise ActivationError("the Hessian holds NaN or Inf: calibration inputs of this module overflowed")
    trellis = Trellis(codebook(config.codebook).to(weight_KN.device), bits, config.compiled)
    has_out_scales = config.out_scales == "always" or (
        config.out_scales == "auto" and hessian_KK is not None and _skew(hessian_KK, config) < SKEW
    )
    suh_K, svh_N = _channel_scales(weight_KN, has_out_scales, name, seed)
    spread = SPREADS[config.codebook] * USUAL_SCALES[bits]
    # Powers of two aside, the scale is in suh alone; it is rounded anew for the one that was found.
    inner_KN = _inner(weight_KN, suh_K / spread, svh_N)
    found = spread * _best_scale(inner_KN, trellis)
    suh_K, svh_N = _as_halves(suh_K / found, svh_N)
    if not bool(suh_K.isfinite().all() and svh_N.isfinite().all()):
        raise WeightError(
            f"the root mean square of a channel is out of the range of float16 scales; the largest magnitude is "
            f"{float(weight_NK.abs().max()):.4g}: the source file is damaged, or the model diverged"
        )
    inner_KN = _inner(weight_KN, suh_K, svh_N)
    lower_KK = None if hessian_KK is None else block_lower(inner_hessian(hessian_KK, suh_K), config.sigma_reg)
    coded = TrellisWeight(encode(inner_KN, lower_KK, trellis), suh_K, svh_N, bits, config.codebook, 0.0)
    error_NK = coded.dequantize().sub_(weight_NK.float())
    if hessian_KK is None:
        return replace(coded, loss=float(row_losses(error_NK).mean()))
    # H is twice the mean of x x^T.
    error = float(((error_NK @ hessian_KK.float()) * error_NK).sum(dtype=torch.float64))
    return replace(coded, loss=error / (2 * len(error_NK)))


def encode(inner_KN: Tensor, lower_KK: Tensor | None, trellis: Trellis) -> Tensor:
    """uint8 [R, C, L]: symbols of all tiles, by LDLQ where the unit lower factor is given, else each for itself."""
    symbols = []
    error_KN = torch.zeros_like(inner_KN)
    for start in range(len(inner_KN) - SIDE, -1, -SIDE):
        stop = start + SIDE
        target = inner_KN[start:stop]
        if lower_KK is not None:
            target = torch.addmm(target, lower_KK[stop:, start:stop].t(), error_KN[stop:])
        words_CL = trellis.search(tiles_of(target)[0])
        symbols_CL = (words_CL & ((1 << trellis.bits) - 1)).to(torch.uint8)
        # What a reader will find, of every tile, before its error is fed back.
        assert torch.equal(words_of(symbols_CL, trellis.bits), words_CL), "a path that is not closed"
        symbols.append(symbols_CL)
        error_KN[start:stop] = inner_KN[start:stop] - matrix_of(trellis.decode(words_CL)[None])
    return torch.stack(symbols[::-1])


def inner_hessian(hessian_KK: Tensor, suh_K: Tensor) -> Tensor:
    """float64 [K, K]: the Hessian of what `inner` is multiplied with, H diag(suh) hessian diag(suh) H."""
    turned_KK = hessian_KK.double() * suh_K.double()[:, None] * suh_K.double()
    return turn_columns(turn_columns(turned_KK).t()).t()


def block_lower(hessian_KK: Tensor, sigma_reg: float) -> Tensor | None:
    """float32 [K, K]: L of H = L D L^T, unit lower in blocks of 16 by 16; `hessian_KK` float64 is overwritten.

    `sigma_reg` of the mean diagonal is added, and doubled while it is below 1 and H won't factor; then HessianError.
    None for a Hessian of zeros, where no error matters.
    """
    diagonal_K = hessian_KK.diagonal().clone()
    mean = float(diagonal_K.mean())
    if mean == 0.0:
        return None
    failed_at = torch.ones(())
    while sigma_reg < 1 and int(failed_at):
        hessian_KK.diagonal().copy_(diagonal_K + sigma_reg * mean)
        factor_KK, failed_at = torch.linalg.cholesky_ex(hessian_KK)
        sigma_reg *= 2
    if int(failed_at):
        raise HessianError(
            f"the Hessian is not positive definite (leading minor {int(failed_at)} of {len(hessian_KK)}) even at "
            f"sigma_reg={sigma_reg / 2:.3g}: too few distinct calibration tokens, or sums that lost their precision"
        )
    for start in range(0, len(factor_KK), SIDE):
        stop = start + SIDE
        factor_KK[start:, start:stop] = torch.linalg.solve_triangular(
            factor_KK[start:stop, start:stop], factor_KK[start:, start:stop], upper=False, left=False
        )
    return factor_KK.float()


def words_of(symbols: Tensor, bits: int) -> Tensor:
    """int64: the 16-bit word at each position of closed paths of uint8 symbols, [..., L]."""
    words = torch.zeros_like(symbols, dtype=torch.int64)
    for back in range(-(-16 // bits)):
        words |= torch.roll(symbols.long(), back, dims=-1) << (back * bits)
    return words & 0xFFFF


def tiles_of(matrix_KN: Tensor) -> Tensor:
    """[R, C, L]: the tiles of a matrix, each in the order in which tensor cores hold it."""
    rows, columns = matrix_KN.shape[0] // SIDE, matrix_KN.shape[1] // SIDE
    tiles = matrix_KN.reshape(rows, SIDE, columns, SIDE).transpose(1, 2).reshape(rows, columns, TILE)
    return tiles[..., _tile_order().to(tiles.device)]


def matrix_of(tiles_RCL: Tensor) -> Tensor:
    """[K, N]: the inverse of `tiles_of`."""
    rows, columns, _ = tiles_RCL.shape
    back_L = torch.argsort(_tile_order()).to(tiles_RCL.device)
    tiles = tiles_RCL[..., back_L].reshape(rows, columns, SIDE, SIDE)
    return tiles.transpose(1, 2).reshape(rows * SIDE, columns * SIDE)


def turn_columns(matrix: Tensor) -> Tensor:
    """A matrix times H: the Hadamard matrix of 128, over the root of 128, along its columns in blocks."""
    blocks = matrix.reshape(len(matrix), -1, BLOCK)
    return (blocks @ _hadamard(matrix.dtype).to(matrix.device)).reshape(matrix.shape)


@cache
def _tile_order() -> Tensor:
    """int64 [L]: the element (row * 16 + column, rows being input channels) of each position of a path.

    Thread t of a warp holds the rows 2 (t % 4) + {0, 1, 8, 9} of the columns t // 4 + {0, 8}.
    """
    position = torch.arange(TILE)
    thread, held = position // 8, position % 8
    row = thread % 4 * 2 + held % 2 + held // 2 % 2 * 8
    return row * SIDE + thread // 4 + held // 4 * 8


@cache
def _hadamard(dtype: torch.dtype) -> Tensor:
    """Sylvester's matrix of 128 over the root of 128."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < BLOCK:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return (matrix / BLOCK**0.5).to(dtype)


def _inner(weight_KN: Tensor, suh_K: Tensor, svh_N: Tensor) -> Tensor:
    """float32 [K, N]: H diag(1/suh) W diag(1/svh) H, channels of scale 0 left out."""
    scaled_KN = weight_KN * _inverse(suh_K)[:, None] * _inverse(svh_N)
    return turn_columns(turn_columns(scaled_KN).t()).t().contiguous()


def _outer(inner_KN: Tensor, suh_K: Tensor, svh_N: Tensor) -> Tensor:
    """float32 [N, K]: the weight that `inner` stands for."""
    weight_NK = turn_columns(turn_columns(inner_KN.t()).mul_(suh_K.float()).t()).mul_(svh_N.float()).t()
    return weight_NK.contiguous()


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale.float())


def _channel_scales(weight_KN: Tensor, has_out_scales: bool, name: str, seed: int) -> tuple[Tensor, Tensor]:
    """float32 [K], [N]: signs, times the root mean square of each channel; `inner` would have variance 1 with them."""
    in_features, out_features = weight_KN.shape
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    signs = torch.randint(0, 2, (in_features + out_features,), generator=generator).to(weight_KN.device) * 2.0 - 1.0
    # In float64, where no square leaves the range.
    rms_N = weight_KN.double().square().mean(dim=0).sqrt()
    mean = rms_N.mean()
    svh_N = (rms_N / mean if has_out_scales and mean > 0 else (rms_N > 0).double()).float() * signs[in_features:]
    half_turned_KN = turn_columns(weight_KN * _inverse(svh_N))
    suh_K = half_turned_KN.double().square().mean(dim=1).sqrt().float() * signs[:in_features]
    return suh_K, svh_N


def _skew(hessian_KK: Tensor, config: EXL3Config) -> float:
    """Share that the 2% largest input channels have of the sum of all channels' root mean squares."""
    diagonal_K = hessian_KK.diagonal().double()
    roots_K = (diagonal_K + config.sigma_reg * diagonal_K.mean()).sqrt().sort(descending=True).values
    total = float(roots_K.sum())
    return float(roots_K[: len(roots_K) // 50].sum()) / total if total > 0 else 0.0


def _as_halves(suh_K: Tensor, svh_N: Tensor) -> tuple[Tensor, Tensor]:
    """Both in float16; where suh is too small or too large for that, its exponent is shared out between them."""
    mean = float(suh_K.abs().mean())
    if mean > 0 and not SMALLEST_MEAN <= mean <= LARGEST_MEAN:
        moved = 2.0 ** round(torch.tensor(mean).log2().item() / 2)
        suh_K, svh_N = suh_K / moved, svh_N * moved
    return suh_K.half(), svh_N.half()


def _best_scale(inner_KN: Tensor, trellis: Trellis) -> float:
    """Which of the scales tried has the least error on tiles of a diagonal, relative to the one that `inner` has."""
    rows, columns = inner_KN.shape[0] // SIDE, inner_KN.shape[1] // SIDE
    count = min(max(rows * columns // SAMPLED_SHARE, FEWEST_SAMPLED), MOST_SAMPLED)
    # Along a diagonal that wraps at different lengths, so that many rows and columns are seen.
    steps = torch.arange(count, device=inner_KN.device) * max(1, max(rows, columns) // count)
    tiles_BL = tiles_of(inner_KN)[steps % rows, steps % columns]
    errors = [
        float((trellis.decode(trellis.search(tiles_BL * scale)) / scale - tiles_BL).square().mean(dtype=torch.float64))
        for scale in SCALES_TRIED
    ]
    return SCALES_TRIED[errors.index(min(errors))]
