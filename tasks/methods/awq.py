"""AWQ: input channels that carry much are scaled up before their weights are rounded, and down in what comes before.

Lin et al., "AWQ", arXiv 2306.00978. A weight's rounding error does not grow with the weight, as long as its group's range
doesn't; so with a scale s > 1 on an input channel, and 1/s on the channel itself, its share of the output error falls.
Which scales are best is searched: s = mean|x|^r for r from 0 to 1, or mean|x|^r / mean|w|^(1 - r), normalised so that the
largest and the smallest are inverse. Then each group's range is clipped to what costs the output least.

How it is computed here, and where that differs from the usual programs:

* Every candidate is judged over ALL calibration tokens. The output error of rows dW is tr(dW C dW^T) with the inputs'
  second moments C = 1/T sum x x^T, of which a group's clipping needs its own block on the diagonal. So no activation is
  kept, a candidate costs K/T of a forward, and results do not depend on how tokens came in batches.
* The error is that of the subset's own outputs, not of the attention or the MLP around it.
* Clipping shrinks the range of the grid. What is clipped comes out too small, in every group and every layer alike, and
  such errors add up where those of rounding cancel: attention grows flatter. That is why other programs clip no queries
  and keys. Here each clipped group's scale is raised until its output has its old size along the true output, before
  the error is judged; then every linear can be clipped. Perplexity of SmolLM2-135M with its first 12 layers in 4 bits,
  groups of 64 (source 19.55): not clipped 20.56, clipped 21.01, clipped with the size restored 20.54.
* What enters the experts of a mixture enters its router too, which must choose as before. So all experts share scales
  there, which are powers of two: they change neither a norm's bits nor a router's, but their exponents.
* The scales that weights are multiplied by are those that were really taken out before: a norm's weight is rounded to
  the source's dtype first. A folded layer computes what it did before rounding, whatever the dtype.

Numeric traps, each with a test: channels without inputs keep their scale of 1; a candidate that pushes a weight out of
what a float16 scale reaches, or whose error is not finite, is passed over; so is a channel's scale that what comes before
can't take up. The first candidate is no scaling at all, which is then what is left. float32, sums of errors float64.

Agrees with a float64 evaluation of the same objective over kept activations (tests/test_awq.py).

Perplexity of SmolLM2-135M in 4 bits with groups of 64, as benchmarks/quality.py measures it (2026-11-29; source 19.55): 22.67
with zero points, where rounding to nearest has 25.77; 25.09 symmetric, against 26.35.

Shape suffixes: N out_features, K in_features, G groups, C columns of one group, R any rows, S candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tasks.methods.grid import (
    LARGEST_HALF,
    SMALLEST_HALF,
    QuantizedRows,
    check_weight,
    columns_per_group,
    find_group_grids,
    full_range,
    round_to_grid,
    scale_and_zero,
)
from tasks.methods.hessian import ActivationError, HessianSum
from tasks.quantization import AWQConfig

# Ranges that clipping tries: 1.00, 0.95, .. 0.50 of the full one.
CLIP_STEPS = 10
LARGEST_CLIP = 0.5
# By how much a scale may be changed to make up for what clipping took; more than that is no clipping's doing.
LARGEST_REGAIN = 1.1
# Rows that are clipped together: it takes some copies of them.
CLIPPED_ROWS = 512
# Channels' scales beyond this do nothing for the error, and cost precision of what they are folded into.
LARGEST_SCALE = 1e4


class InputSum:
    """Second moments and magnitudes of a subset's input, summed over real tokens; lanes are merged in order."""

    def __init__(self, in_features: int, device: str | torch.device = "cpu") -> None:
        self.tokens = 0
        self._products = HessianSum(in_features, device)
        self._magnitudes_K = torch.zeros(in_features, dtype=torch.float64, device=device)

    def add(self, x_TK: Tensor) -> None:
        """Add tokens [..., K] of any float dtype; padding must have been taken out."""
        x_TK = x_TK.reshape(-1, x_TK.shape[-1])
        self._products.add(x_TK)
        self.tokens += len(x_TK)
        self._magnitudes_K += x_TK.float().abs().sum(dim=0, dtype=torch.float64)

    def merge(self, other: "InputSum") -> None:
        """Add another lane's tokens, from any device."""
        self._products.merge(other._products)
        self.tokens += other.tokens
        self._magnitudes_K += other._magnitudes_K.to(self._magnitudes_K.device)

    def moments(self) -> "Moments":
        """Means over the tokens; ActivationError for NaN or Inf, HessianError when there was no token."""
        second_KK = self._products.hessian().mul_(0.5)
        magnitude_K = self._magnitudes_K / self.tokens
        if not bool(second_KK.isfinite().all()) or not bool(magnitude_K.isfinite().all()):
            raise ActivationError(
                "the inputs hold NaN or Inf, or squares beyond float32: the source model is damaged, or needs a wider "
                "compute dtype than the one it ran in"
            )
        return Moments(second_KK, magnitude_K.float())


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known of a subset's input: second_KK float32, mean of x x^T; magnitude_K float32, mean of |x|."""

    second_KK: Tensor
    magnitude_K: Tensor

    def to(self, device: torch.device | str) -> "Moments":
        """These on `device`."""
        return Moments(self.second_KK.to(device), self.magnitude_K.to(device))

    def divided(self, scale_K: Tensor) -> "Moments":
        """Those of the input divided by `scale_K`."""
        scale_K = scale_K.to(self.second_KK.device)
        return Moments(self.second_KK / scale_K[:, None] / scale_K, self.magnitude_K / scale_K)


def weight_magnitude(weights: list[Tensor], config: AWQConfig) -> Tensor:
    """float64 [K]: mean over all rows of |w| as a share of the largest in its group; what sharing an input stack to."""
    rows = sum(map(len, weights))
    total_K = torch.zeros(weights[0].shape[1], dtype=torch.float64, device=weights[0].device)
    size = columns_per_group(len(total_K), config)
    for weight_NK in weights:
        for weight_RK in weight_NK.split(CLIPPED_ROWS):
            grouped_RGC = weight_RK.float().abs().reshape(len(weight_RK), -1, size)
            shares_RGC = grouped_RGC / grouped_RGC.amax(dim=2, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            total_K += shares_RGC.reshape(len(weight_RK), -1).sum(dim=0, dtype=torch.float64)
    return total_K / rows


def candidate_scales(magnitude_K: Tensor, weight_magnitude_K: Tensor, channels_K: Tensor, config: AWQConfig) -> Tensor:
    """float32 [S, K] on the CPU: the scales to try, of which the first are all 1.

    Columns with one number in `channels_K` share a scale, that of their mean magnitudes. Channels without inputs, or
    without weights, get 1.
    """
    channels_K = channels_K.cpu()
    count = int(channels_K.max()) + 1
    sizes_N = torch.bincount(channels_K, minlength=count).clamp(min=1)
    means = [
        torch.bincount(channels_K, weights=values_K.cpu().double(), minlength=count) / sizes_N
        for values_K in (magnitude_K, weight_magnitude_K)
    ]
    is_live_N = (means[0] > 0) & (means[1] > 0)
    inputs_N, weights_N = (mean_N.where(is_live_N, torch.ones_like(mean_N)) for mean_N in means)
    found = [torch.ones(len(channels_K))]
    for is_duo in (False, True) if config.duo_scaling else (False,):
        for step in range(config.n_grid):
            ratio = step / config.n_grid
            if step == 0 and not is_duo:
                continue  # which is no scaling
            scale_N = inputs_N**ratio / (weights_N ** (1 - ratio) if is_duo else 1.0)
            live = scale_N[is_live_N]
            if len(live):
                scale_N = scale_N / (live.max() * live.min()).sqrt()
            scale_N = scale_N.clamp(1 / LARGEST_SCALE, LARGEST_SCALE).where(is_live_N, torch.ones_like(scale_N))
            found.append(scale_N[channels_K].float())
    return torch.stack(found)


def in_powers_of_two(scales_SK: Tensor) -> Tensor:
    """Candidates with each scale the nearest power of two, by ratio; each once, in their order."""
    found: list[Tensor] = []
    for scale_K in torch.exp2(scales_SK.log2().round()):
        if not any(torch.equal(scale_K, other_K) for other_K in found):
            found.append(scale_K)
    return torch.stack(found)


def scale_losses(weight_RK: Tensor, second_KK: Tensor, scales_SK: Tensor, config: AWQConfig) -> Tensor:
    """float64 [S] on the CPU: the summed output error of these rows, rounded to nearest with each candidate's scales.

    Infinite for a candidate under which a weight is out of the grid's reach, or whose error is not finite.
    """
    weight_RK = weight_RK.float()

    def loss(scaled_RK: Tensor, scale_K: Tensor) -> Tensor:
        error_RK = _rounded(scaled_RK, config).div_(scale_K).sub_(weight_RK)
        return (error_RK @ second_KK).mul_(error_RK)

    return _losses(weight_RK, scales_SK, config, loss)


def clipped_losses(weight_RK: Tensor, moments: Moments, scales_SK: Tensor, config: AWQConfig) -> Tensor:
    """The same of these rows as `quantize_rows` leaves them.

    For scales in powers of two, which are few and coarse: clipping may undo what they seemed to bring.
    """

    def loss(scaled_RK: Tensor, scale_K: Tensor) -> Tensor:
        return quantize_rows(scaled_RK, moments.divided(scale_K), config).losses_N

    return _losses(weight_RK.float(), scales_SK, config, loss)


def _losses(
    weight_RK: Tensor, scales_SK: Tensor, config: AWQConfig, loss: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    limit = LARGEST_HALF * (2**config.bits - 1) / 4  # half of what `check_weight` lets pass
    losses = []
    for scale_K in scales_SK.to(weight_RK.device):
        scaled_RK = weight_RK * scale_K
        if not float(scaled_RK.abs().max()) <= limit:
            losses.append(float("inf"))
            continue
        total = float(loss(scaled_RK, scale_K).sum(dtype=torch.float64))
        losses.append(total if total == total else float("inf"))
    return torch.tensor(losses, dtype=torch.float64)


def best_candidate(losses_S: Tensor) -> int:
    """The candidate with the least loss, the first of equals; 0, no scaling, when none is finite."""
    return int(losses_S.argmin())


def quantize_rows(weight_RK: Tensor, moments: Moments, config: AWQConfig) -> QuantizedRows:
    """Round rows, scaled already, of modules whose input has these moments, on the weights' device.

    The loss is the mean over tokens of a row's squared output error. WeightError for weights that no grid holds.
    """
    check_weight(weight_RK, config)
    weight_RK = weight_RK.float()
    rows, in_features = weight_RK.shape
    size = columns_per_group(in_features, config)
    grouped_RGC = weight_RK.reshape(rows, -1, size)
    if config.apply_clip:
        blocks_GCC = _diagonal_blocks(moments.second_KK, size)
        parts = [_clipped(part_RK, blocks_GCC, config) for part_RK in weight_RK.split(CLIPPED_ROWS)]
        codes_RGC, scales_RG, zeros_RG = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    else:
        scales_RG, zeros_RG = find_group_grids(weight_RK, config)
        codes_RGC = round_to_grid(grouped_RGC, scales_RG[..., None], zeros_RG[..., None], config.bits)
    error_RK = ((codes_RGC - zeros_RG[..., None]) * scales_RG[..., None] - grouped_RGC).reshape(rows, -1)
    losses_R = (error_RK @ moments.second_KK).mul_(error_RK).sum(dim=1)
    return QuantizedRows(
        codes_NK=codes_RGC.reshape(rows, in_features).to(torch.uint8),
        scales_NG=scales_RG.half(),
        zeros_NG=zeros_RG.to(torch.int32),
        g_idx_K=torch.arange(in_features, device=weight_RK.device, dtype=torch.int32) // size,
        # What is left of a sum that cancels out may be under zero.
        losses_N=losses_R.clamp(min=0),
    )


def _rounded(weight_RK: Tensor, config: AWQConfig) -> Tensor:
    """The weights as their own full grids give them back."""
    scales_RG, zeros_RG = find_group_grids(weight_RK, config)
    grouped_RGC = weight_RK.reshape(len(weight_RK), scales_RG.shape[1], -1)
    codes_RGC = round_to_grid(grouped_RGC, scales_RG[..., None], zeros_RG[..., None], config.bits)
    return codes_RGC.sub_(zeros_RG[..., None]).mul_(scales_RG[..., None]).reshape(weight_RK.shape)


def _diagonal_blocks(second_KK: Tensor, size: int) -> Tensor:
    groups = len(second_KK) // size
    return torch.stack([second_KK[g * size : (g + 1) * size, g * size : (g + 1) * size] for g in range(groups)])


def _clipped(weight_RK: Tensor, blocks_GCC: Tensor, config: AWQConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [R, G, C], scales and zeros [R, G], all float32, of each group's shrunken range with the least output error."""
    rows, groups, size = len(weight_RK), len(blocks_GCC), blocks_GCC.shape[1]
    weight_GRC = weight_RK.reshape(rows, groups, size).transpose(0, 1).contiguous()
    low_R, high_R = full_range(weight_GRC.reshape(-1, size), config)
    target_GRC = torch.bmm(weight_GRC, blocks_GCC)
    energy_GR = (target_GRC * weight_GRC).sum(dim=2)
    best_GR = torch.full_like(energy_GR, torch.inf)
    scales_GR, zeros_GR, codes_GRC = torch.ones_like(best_GR), torch.zeros_like(best_GR), torch.zeros_like(weight_GRC)
    for step in range(CLIP_STEPS + 1):
        shrink = 1 - LARGEST_CLIP * step / CLIP_STEPS
        scale_R, zero_R = scale_and_zero(shrink * low_R, shrink * high_R, config)
        scale_GR, zero_GR = scale_R.reshape(groups, rows), zero_R.reshape(groups, rows)
        tried_GRC = round_to_grid(weight_GRC, scale_GR[..., None], zero_GR[..., None], config.bits)
        steps_GRC = tried_GRC - zero_GR[..., None]
        scale_GR = _unbiased(scale_GR, (steps_GRC * target_GRC).sum(dim=2), energy_GR)
        error_GRC = steps_GRC.mul_(scale_GR[..., None]).sub_(weight_GRC)
        error_GR = torch.bmm(error_GRC, blocks_GCC).mul_(error_GRC).sum(dim=2)
        # The full range stands where no error is finite.
        is_better_GR = (error_GR < best_GR) | (step == 0)
        best_GR = torch.where(is_better_GR, error_GR.nan_to_num(nan=torch.inf, posinf=torch.inf), best_GR)
        scales_GR = torch.where(is_better_GR, scale_GR, scales_GR)
        zeros_GR = torch.where(is_better_GR, zero_GR, zeros_GR)
        codes_GRC = torch.where(is_better_GR[..., None], tried_GRC, codes_GRC)
    return codes_GRC.transpose(0, 1), scales_GR.t(), zeros_GR.t()


def _unbiased(scale_GR: Tensor, projection_GR: Tensor, energy_GR: Tensor) -> Tensor:
    """The scales with which a group's output has neither shrunk nor grown along the true one, at float16 precision.

    `projection` is that of the output of the codes, less their zero, on the true output, whose square is `energy`. Where
    that says nothing, for want of inputs or of weights, the scales stay.
    """
    factor_GR = energy_GR / (scale_GR * projection_GR)
    is_sound_GR = (factor_GR > 1 / LARGEST_REGAIN) & (factor_GR < LARGEST_REGAIN)
    regained_GR = (scale_GR * factor_GR).clamp(SMALLEST_HALF, LARGEST_HALF).half().float()
    return torch.where(is_sound_GR, regained_GR, scale_GR)


def fold_into_norm(weight_N: Tensor, offset: int, scale_N: Tensor) -> tuple[Tensor, Tensor]:
    """A norm's weight with `scale_N` taken out, in its own dtype, and the float32 scales that really were taken out.

    `offset` is what the norm adds to its weight. The weight is rounded first, so that the two always match: times the
    second, the first is the old weight. A channel whose weight is 0, or can't be divided by about its scale in this dtype,
    stays as it is, with a scale of 1.
    """
    gain_N = offset + weight_N.float()
    folded_N = (gain_N / scale_N - offset).to(weight_N.dtype)
    taken_N = gain_N / (offset + folded_N.float())
    ratio_N = taken_N / scale_N
    fits_N = taken_N.isfinite() & (ratio_N > 0.5) & (ratio_N < 2)
    return folded_N.where(fits_N, weight_N), taken_N.where(fits_N, torch.ones_like(taken_N))


def fold_exactly(weight_N: Tensor, matrices: list[Tensor], scale_N: Tensor) -> tuple[Tensor, list[Tensor], Tensor]:
    """A norm's weight with `scale_N` taken out, matrices [M, N] that read its output with their columns times them, and them.

    Of powers of two, so that what the matrices give stays the same to the last bit. All in their own dtypes; a channel
    that one of them can't take so, because a value would leave its dtype's normal range, stays as it is, with a scale of 1.
    """
    exact_N = torch.ones_like(scale_N, dtype=torch.bool)
    for tensor, factor_N in [(weight_N, 1 / scale_N), *((matrix_MN, scale_N) for matrix_MN in matrices)]:
        scaled = (tensor.float() * factor_N).to(tensor.dtype)
        is_kept = (scaled.float() / factor_N == tensor.float()) & scaled.isfinite()
        is_kept &= (scaled == 0) | (scaled.abs() >= torch.finfo(tensor.dtype).tiny)
        exact_N &= is_kept.reshape(-1, len(scale_N)).all(dim=0)
    taken_N = scale_N.where(exact_N, torch.ones_like(scale_N))
    folded_N = (weight_N.float() / taken_N).to(weight_N.dtype)
    return folded_N, [(matrix_MN.float() * taken_N).to(matrix_MN.dtype) for matrix_MN in matrices], taken_N


def fold_into_rows(weight_NK: Tensor, scale_N: Tensor, config: AWQConfig) -> Tensor:
    """float32 [N] on the CPU: by what each row of a linear may be divided, 1 where it would leave the grid's reach."""
    limit = LARGEST_HALF * (2**config.bits - 1) / 4
    fits_N = weight_NK.abs().amax(dim=1).float().cpu() / scale_N <= limit
    return scale_N.where(fits_N, torch.ones_like(scale_N))
