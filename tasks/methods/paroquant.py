"""ParoQuant: channels are scaled and rotated in pairs until rounding their weights costs the outputs least.

Liang et al., "ParoQuant", arXiv 2511.10645. A reader multiplies the inputs of a linear by a scale per channel and turns
them, inside each group of `group_size` channels, by eight sets of Givens rotations, one angle for each of
group_size / 2 disjoint pairs; the weights have been scaled and turned the other way, and rounded there. Scales and angles
spread outliers over a group, at the cost of some multiplications per channel.

Learnt per linear, from a sample of its inputs, with AdamW and a falling rate, on the difference of the outputs (Huber):
first scales and angles, under a grid that follows the weights; then the weights themselves and the grid's scales and zero
points. Rounding passes gradients straight through. After each epoch the outputs of a part of the sample that is not
learnt from are compared; the best state of a stage is kept, and no learning at all is one of those compared.

Pairs are drawn anew for each group: eight rounds of a tournament in which everybody meets everybody, under random names.
Seeds come from the job's seed and the module's name, so that nothing has to be remembered between layers.

How it is computed here. The eight sets of a group are multiplied into one matrix, group_size squared, through which the
gradients go: a turn of N x K weights is one batched product instead of eight passes over them. What is exported is rounded
last as a reader has it: angles, scales and steps in float16, then the weights turned by those and rounded anew.

float32 whatever the source's dtype; deterministic on one kind of device (no sum whose order may vary). A reader turns its
inputs in half precision, rounding after each set, which no file can undo.

Shape suffixes: N out_features, K in_features, G groups, C columns of a group, P pairs of a group, R rotations, T tokens.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from tasks.methods.grid import SMALLEST_HALF, QuantizedRows, WeightError, check_finite
from tasks.quantization import ParoQuantConfig

ROTATIONS = 8
LAST_CODE = 15
# The range of channel scales, and the share of a rate that is left at a stage's end, of the authors' program.
SMALLEST_SCALE, LARGEST_SCALE = 1e-2, 1e2
LAST_RATE = 1 / 20
BETAS, EPSILON = (0.9, 0.95), 1e-10

Progress = Callable[[str, float], None]


@dataclass(frozen=True, eq=False)
class Rotation:
    """What is done to the inputs: pairs int16 [R, K] of channels within their group, theta float16 [R, K / 2] in radians,
    channel_scales float16 [K].
    """

    pairs_RK: Tensor
    theta_RP: Tensor
    channel_scales_K: Tensor
    group_size: int

    def matrices(self) -> Tensor:
        """float32 [G, C, C]: a group's inputs, scaled, times this are what the weights are multiplied by."""
        return turned(_order_of(self.pairs_RK, self.group_size), self.theta_RP.float(), self.group_size)


@dataclass(frozen=True, eq=False)
class ParoRows:
    """A module's weights on the grid, turned, with the rotation of its inputs. `fallback`: why nothing was learnt."""

    turned: QuantizedRows
    rotation: Rotation
    fallback: str | None = None

    @property
    def loss(self) -> float:
        """Mean squared output error over the sample, or of the weights where there is none."""
        return self.turned.loss

    def dequantize(self) -> Tensor:
        """float32 [N, K]: what a reader's weights and the rotation of its inputs come to together."""
        weight_NK = times_groups(self.turned.dequantize(), self.rotation.matrices().mT)
        return weight_NK * self.rotation.channel_scales_K.float()


class InputSample:
    """At most `rows` tokens of all that are added, evenly spread; the same for any batches, merged in a fixed order.

    Every s-th token is kept; when too many are, every other one of them, and s doubles. float32.
    """

    def __init__(self, in_features: int, device: torch.device | str, rows: int) -> None:
        self.tokens = 0
        self._rows, self._stride = rows, 1
        self._kept: list[Tensor] = [torch.empty(0, in_features, device=device)]

    def add(self, x_TK: Tensor) -> None:
        """Add tokens [T, K] of any float dtype."""
        first = -self.tokens % self._stride
        self.tokens += len(x_TK)
        self._keep(x_TK[first :: self._stride].float())

    def merge(self, other: "InputSample") -> None:
        """Add another lane's sample, from any device."""
        self._thin_to(max(self._stride, other._stride))
        other._thin_to(self._stride)
        self.tokens += other.tokens
        self._keep(other.sample())

    def sample(self) -> Tensor:
        """float32 [T, K], in the order in which they came."""
        self._kept = [torch.cat(self._kept)]
        return self._kept[0]

    def _keep(self, x_TK: Tensor) -> None:
        self._kept.append(x_TK.to(self._kept[0].device, copy=True))
        while sum(map(len, self._kept)) > self._rows:
            self._thin_to(2 * self._stride)

    def _thin_to(self, stride: int) -> None:
        self._kept = [self.sample()[:: stride // self._stride].clone()]
        self._stride = stride


def quantize_weight(
    weight_NK: Tensor, sample_TK: Tensor | None, config: ParoQuantConfig, name: str, seed: int, tell: Progress
) -> ParoRows:
    """Learn the rotation of one module from a sample of its inputs, on the weights' device; any float dtype.

    `tell` gets what is being learnt and the error on the part of the sample that is not learnt from, after each epoch.
    Without a sample nothing is turned and the weights are rounded to nearest. WeightError for NaN, infinities, and weights
    whose steps would not fit float16.
    """
    check_finite(weight_NK)
    weight_NK = weight_NK.float()
    pairs_RK = draw_pairs(weight_NK.shape[1], config.group_size, name, seed).to(weight_NK.device)
    learner = _Learner(weight_NK, pairs_RK, config)
    if sample_TK is None or len(sample_TK) < 2:
        return learner.exported(None)
    with torch.enable_grad():
        learner.learn(sample_TK.to(weight_NK.device), tell)
    return learner.exported(sample_TK.to(weight_NK.device))


def draw_pairs(in_features: int, group_size: int, name: str, seed: int) -> Tensor:
    """int16 [R, K]: in each row, each group's channels in disjoint pairs that no other row of it has; on the CPU."""
    digest = hashlib.sha256(f"paroquant:{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    others = group_size - 1
    rounds, steps = torch.arange(others)[:, None], torch.arange(1, group_size // 2)[None]
    # The last one stays, the others turn round it: in round r it meets r, and r + i meets r - i.
    met = torch.stack([(rounds + steps) % others, (rounds - steps) % others], dim=2)
    last = torch.stack([rounds, torch.full_like(rounds, others)], dim=2)
    tournament = torch.cat([last, met], dim=1).reshape(others, group_size)
    rows = []
    for _ in range(in_features // group_size):
        chosen = torch.randperm(others, generator=generator)[:ROTATIONS]
        rows.append(torch.randperm(group_size, generator=generator)[tournament[chosen]])
    return torch.cat(rows, dim=1).to(torch.int16)


def times_groups(x_TK: Tensor, matrix_GCC: Tensor) -> Tensor:
    """Each group of columns times its matrix."""
    groups, columns, _ = matrix_GCC.shape
    x_GTC = x_TK.reshape(len(x_TK), groups, columns).transpose(0, 1)
    return torch.bmm(x_GTC, matrix_GCC).transpose(0, 1).reshape(x_TK.shape)


def turned(order_RGC: Tensor, theta_RP: Tensor, group_size: int) -> Tensor:
    """[G, C, C]: all rotations of each group, one after the other, as one matrix that rows are multiplied by.

    order_RGC: the channels of a group, the first of each pair, then the second ones, as `_order_of` gives them.
    """
    rotations, groups, _ = order_RGC.shape
    theta_RGP = theta_RP.reshape(rotations, groups, group_size // 2)
    matrix_GCC = torch.eye(group_size, device=theta_RP.device).expand(groups, -1, -1)
    place_GC = torch.arange(group_size, device=theta_RP.device).expand(groups, -1)  # where each channel stands
    for order_GC, theta_GP in zip(order_RGC, theta_RGP, strict=True):
        columns_GC = place_GC.gather(1, order_GC)
        matrix_GCC = matrix_GCC.gather(2, columns_GC[:, None, :].expand(-1, group_size, -1))
        first_GCP, second_GCP = matrix_GCC.chunk(2, dim=2)
        cos_G1P, sin_G1P = theta_GP.cos()[:, None], theta_GP.sin()[:, None]
        matrix_GCC = torch.cat(
            [first_GCP * cos_G1P + second_GCP * sin_G1P, second_GCP * cos_G1P - first_GCP * sin_G1P], dim=2
        )
        place_GC = order_GC.argsort(dim=1)
    return matrix_GCC.gather(2, place_GC[:, None, :].expand(-1, group_size, -1))


def _order_of(pairs_RK: Tensor, group_size: int) -> Tensor:
    """int64 [R, G, C]: a group's channels, the first of each pair, then the second ones."""
    pairs = pairs_RK.long().reshape(len(pairs_RK), -1, group_size // 2, 2)
    return torch.cat([pairs[..., 0], pairs[..., 1]], dim=2)


class _Learner:
    """One module's parameters, on its device; each stage learns some of them."""

    def __init__(self, weight_NK: Tensor, pairs_RK: Tensor, config: ParoQuantConfig) -> None:
        self.config = config
        self.source_NK = weight_NK
        self.pairs_RK = pairs_RK
        self._order_RGC = _order_of(pairs_RK, config.group_size)
        columns = weight_NK.shape[1]
        self.parameters: dict[str, Tensor] = {
            "scales_K": weight_NK.new_ones(columns),  # of the weights; inputs are divided by them
            "theta_RP": weight_NK.new_zeros(ROTATIONS, columns // 2),
            "weight_NK": weight_NK,
        }

    def learn(self, sample_TK: Tensor, tell: Progress) -> None:
        """Both stages."""
        config = self.config
        # Every so-manyth token, so that both parts are spread alike over the texts.
        every = max(2, len(sample_TK) // max(1, min(config.validation_samples, len(sample_TK) // 2)))
        is_held_out_T = torch.arange(len(sample_TK), device=sample_TK.device) % every == every - 1
        targets_TN = sample_TK @ self.source_NK.T
        learnt_from = sample_TK[~is_held_out_T], targets_TN[~is_held_out_T]
        held_out = sample_TK[is_held_out_T], targets_TN[is_held_out_T]
        rates = {"scales_K": config.rotation_lr, "theta_RP": config.rotation_lr}
        self._stage("rotations", rates, config.rotation_epochs, learnt_from, held_out, tell)
        if not config.finetune_epochs:
            return
        with torch.no_grad():
            turned_NK = self._turned_weight(self._matrices())
            self.parameters["steps_NG"], self.parameters["zeros_NG"] = _grid_of(turned_NK, config.group_size)
        rates = {"weight_NK": config.weight_lr, "steps_NG": config.quantizer_lr, "zeros_NG": config.quantizer_lr}
        self._stage("weights", rates, config.finetune_epochs, learnt_from, held_out, tell)

    def _stage(
        self,
        what: str,
        rates: dict[str, float],
        epochs: int,
        learnt_from: tuple[Tensor, Tensor],
        held_out: tuple[Tensor, Tensor],
        tell: Progress,
    ) -> None:
        for name in rates:
            self.parameters[name] = self.parameters[name].detach().clone().requires_grad_()
        groups = [{"params": [self.parameters[name]], "lr": rate} for name, rate in rates.items()]
        optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON, weight_decay=0.0, foreach=False)
        best, best_error = self._state(rates), self._error(held_out)
        size = self.config.train_batch_size
        batches = [
            range(start, min(start + size, len(learnt_from[0]))) for start in range(0, len(learnt_from[0]), size)
        ]
        done, total = 0, max(1, epochs * len(batches))
        for epoch in range(1, epochs + 1):
            for batch in batches:
                x_TK, targets_TN = (part[batch.start : batch.stop] for part in learnt_from)
                optimizer.zero_grad()
                smooth_l1_loss(self._outputs(x_TK), targets_TN).backward()
                optimizer.step()
                done += 1
                left = LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done / total)) / 2
                for group, rate in zip(optimizer.param_groups, rates.values(), strict=True):
                    group["lr"] = rate * left
            error = self._error(held_out)
            if error < best_error:
                best, best_error = self._state(rates), error
            tell(f"{what}, epoch {epoch} of {epochs}", error)
        self.parameters |= best

    def _state(self, names: dict[str, float]) -> dict[str, Tensor]:
        return {name: self.parameters[name].detach().clone() for name in names}

    def _error(self, held_out: tuple[Tensor, Tensor]) -> float:
        with torch.no_grad():
            error = float(smooth_l1_loss(self._outputs(held_out[0]), held_out[1]))
        return error if math.isfinite(error) else math.inf

    def _outputs(self, x_TK: Tensor) -> Tensor:
        matrix_GCC = self._matrices()
        turned_NK = self._turned_weight(matrix_GCC)
        steps_NG, zeros_NG = self.parameters.get("steps_NG"), self.parameters.get("zeros_NG")
        if steps_NG is None or zeros_NG is None:
            steps_NG, zeros_NG = _grid_of(turned_NK, self.config.group_size)
        rounded_NK = _rounded(turned_NK, steps_NG, zeros_NG)
        return times_groups(x_TK / self._scales(), matrix_GCC) @ rounded_NK.T

    def _scales(self) -> Tensor:
        return _clamped(self.parameters["scales_K"], SMALLEST_SCALE, LARGEST_SCALE)

    def _matrices(self) -> Tensor:
        return turned(self._order_RGC, self.parameters["theta_RP"], self.config.group_size)

    def _turned_weight(self, matrix_GCC: Tensor) -> Tensor:
        return times_groups(self.parameters["weight_NK"] * self._scales(), matrix_GCC)

    def exported(self, sample_TK: Tensor | None) -> ParoRows:
        """The state as a reader has it, on the CPU."""
        size = self.config.group_size
        rotation = Rotation(self.pairs_RK, self.parameters["theta_RP"].half(), self._scales().reciprocal().half(), size)
        weight_NK = self.parameters["weight_NK"]
        turned_NK = times_groups(weight_NK / rotation.channel_scales_K.float(), rotation.matrices())
        steps_NG, zeros_NG = self.parameters.get("steps_NG"), self.parameters.get("zeros_NG")
        if steps_NG is None or zeros_NG is None:
            steps_NG, zeros_NG = _grid_of(turned_NK, size)
        steps_NG = steps_NG.clamp(min=SMALLEST_HALF).half()
        if not bool(steps_NG.isfinite().all()):
            row = int((~steps_NG.isfinite()).any(dim=1).nonzero()[0])
            raise WeightError(
                f"row {row} holds weights whose step does not fit float16; use a method whose scales are wider"
            )
        zeros_NG = zeros_NG.round().clamp(0, LAST_CODE)
        codes_NGC = turned_NK.reshape(len(turned_NK), -1, size) / steps_NG.float()[..., None]
        codes_NGC = codes_NGC.round_().add_(zeros_NG[..., None]).clamp_(0, LAST_CODE)
        rows = ParoRows(
            QuantizedRows(
                codes_NGC.reshape(turned_NK.shape).to(torch.uint8).cpu(),
                steps_NG.cpu(),
                zeros_NG.to(torch.int32).cpu(),
                (torch.arange(turned_NK.shape[1], dtype=torch.int32) // size),
                torch.zeros(len(turned_NK)),
            ),
            replace(
                rotation,
                pairs_RK=rotation.pairs_RK.cpu(),
                theta_RP=rotation.theta_RP.cpu(),
                channel_scales_K=rotation.channel_scales_K.cpu(),
            ),
        )
        error_NK = self.source_NK - rows.dequantize().to(self.source_NK.device)
        seen = error_NK.T if sample_TK is None else error_NK @ sample_TK.T
        losses_N = error_NK.square().mean(dim=1) if sample_TK is None else seen.square().mean(dim=1)
        return replace(rows, turned=replace(rows.turned, losses_N=losses_N.cpu()))


def _grid_of(turned_NK: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """Steps and zero points [N, G] of grids that span each group's weights and 0; zero points are not rounded yet."""
    grouped_NGC = turned_NK.reshape(len(turned_NK), -1, group_size)
    low_NG, high_NG = grouped_NGC.amin(dim=2).clamp(max=0), grouped_NGC.amax(dim=2).clamp(min=0)
    steps_NG = ((high_NG - low_NG) / LAST_CODE).clamp(min=SMALLEST_HALF)
    return steps_NG, -low_NG / steps_NG


def _rounded(turned_NK: Tensor, steps_NG: Tensor, zeros_NG: Tensor) -> Tensor:
    """The weights on the grid; gradients go straight through roundings, and not through what is clipped."""
    steps_NG1 = _clamped(steps_NG, SMALLEST_HALF, math.inf)[..., None]
    zeros_NG1 = _clamped(_round(zeros_NG), 0, LAST_CODE)[..., None]
    grouped_NGC = turned_NK.reshape(*steps_NG.shape, -1)
    codes_NGC = (_round(grouped_NGC / steps_NG1) + zeros_NG1).clamp(0, LAST_CODE)
    return ((codes_NGC - zeros_NG1) * steps_NG1).reshape(turned_NK.shape)


def _round(values: Tensor) -> Tensor:
    return values + (values.round() - values).detach()


def _clamped(values: Tensor, low: float, high: float) -> Tensor:
    return values + (values.clamp(low, high) - values).detach()
