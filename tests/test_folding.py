"""Which modules can take up a subset's scales: tried on layers of several kinds, and held to the layer's own forward."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tasks.models.decoder import Decoder
from tasks.models.folding import Folding, find_folding
from tasks.models.source import SourceModel
from tests.tiny_families import write_tiny
from tests.tiny_models import write_tiny_llama

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
HIDDEN, WIDE = 12, 20


@pytest.mark.parametrize("key_value_heads", [1, 2, 4])
def test_a_llama_layer_folds_everywhere_and_computes_what_it_did(key_value_heads: int, tmp_path: Path) -> None:
    path = write_tiny_llama(
        tmp_path / "m", key_value_heads=key_value_heads, attention_bias=True, mlp_bias=True, dtype=torch.float32
    )
    decoder = Decoder.from_source(SourceModel.open(str(path)))
    folding = decoder.folding(0)
    assert folding.refusals == {}
    assert {subset: (fold.module, fold.offset) for subset, fold in folding.folds.items()} == {
        QKV: ("input_layernorm", 0),
        ("self_attn.o_proj",): ("self_attn.v_proj", None),
        ("mlp.gate_proj", "mlp.up_proj"): ("post_attention_layernorm", 0),
        ("mlp.down_proj",): ("mlp.up_proj", None),
    }
    shared_K = torch.arange(64) // 16 // (4 // key_value_heads) * 16 + torch.arange(64) % 16
    assert torch.equal(folding.folds["self_attn.o_proj",].channels_K, shared_K)
    layer = decoder.materialise(0, "cpu", torch.float64)
    hidden_BTH = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    arguments = decoder.call_arguments(0, hidden_BTH, None)
    with torch.no_grad():
        before = layer(hidden_BTH, **arguments)
        apply(layer, folding)
        after = layer(hidden_BTH, **arguments)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)  # its norms and tables are float32


def apply(layer: nn.Module, folding: Folding) -> None:
    """Scale every subset by random scales and what comes before by their inverse, once for all that share it."""
    generator = torch.Generator().manual_seed(4)
    shared: dict[str, Tensor] = {}
    for subset, fold in folding.folds.items():
        is_first = fold.module not in shared
        scale_N = torch.exp(torch.randn(fold.channel_count, generator=generator, dtype=torch.float64))
        scale_N = shared.setdefault(fold.module, torch.exp2(scale_N.log2().round()) if fold.followers else scale_N)
        for name in subset:
            layer.get_submodule(name).weight.data *= scale_N[fold.channels_K]
        if not is_first:
            assert fold.followers
            continue
        for name in fold.followers:
            layer.get_submodule(name).weight.data *= scale_N
        module: Any = layer.get_submodule(fold.module)
        for parameter in module.parameters():
            offset = fold.offset or 0
            divisor_N = scale_N.reshape(-1, *[1] * (parameter.dim() - 1))
            parameter.data = (parameter.data + offset) / divisor_N - offset


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "qwen2_moe", "glm4_moe", "gemma2"])
def test_layers_of_other_families_compute_what_they_did_and_every_expert_is_folded(family: str, tmp_path: Path) -> None:
    decoder = Decoder.from_source(SourceModel.open(str(write_tiny(family, tmp_path / "m", dtype=torch.float32))))
    for number in decoder.layers_of_each_kind:
        folding = decoder.folding(number)
        assert folding.refusals == {}
        layer = decoder.materialise(number, "cpu", torch.float64)
        hidden_BTH = torch.randn(
            2, 9, decoder.config.hidden_size, generator=torch.Generator().manual_seed(3), dtype=torch.float64
        )
        arguments = decoder.call_arguments(number, hidden_BTH, None)
        with torch.no_grad():
            before = layer(hidden_BTH, **arguments)
            apply(layer, folding)
            after = layer(hidden_BTH, **arguments)
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)  # its norms and tables are float32


def test_nothing_of_the_weights_is_read_and_every_layer_has_its_folding(tmp_path: Path, monkeypatch: Any) -> None:
    decoder = Decoder.from_source(SourceModel.open(str(write_tiny_llama(tmp_path / "m"))))
    monkeypatch.setattr(SourceModel, "load", None)
    assert decoder.folding(0).folds.keys() == decoder.folding(1).folds.keys()


class MLP(nn.Module):
    """A layer of one norm and an MLP, of which a test changes what it looks at."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = norm or LlamaRMSNorm(HIDDEN)
        self.gate, self.up = nn.Linear(HIDDEN, WIDE), nn.Linear(HIDDEN, WIDE)
        self.down = nn.Linear(WIDE, HIDDEN)

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        x_BTH = self.norm(hidden_BTH)
        return hidden_BTH + self.down(self.between(functional.silu(self.gate(x_BTH)), self.up(x_BTH)))

    def between(self, gate_BTK: Tensor, up_BTK: Tensor) -> Tensor:
        return gate_BTK * up_BTK


GATE_UP, DOWN = ("gate", "up"), ("down",)


def folding_of(layer: nn.Module, *subsets: tuple[str, ...]) -> Folding:
    hidden_BTH = torch.randn(1, 3, HIDDEN, generator=torch.Generator().manual_seed(0))
    found = find_folding(layer.requires_grad_(False), subsets or (GATE_UP, DOWN), hidden_BTH, {})
    assert found.folds.keys() | found.refusals.keys() == set(subsets or (GATE_UP, DOWN))
    assert not found.folds.keys() & found.refusals.keys()
    return found


def test_a_norm_of_one_plus_its_weight_is_known_as_one() -> None:
    found = folding_of(MLP(GemmaRMSNorm(HIDDEN)))
    assert found.folds[GATE_UP].offset == 1
    assert found.folds[DOWN].module == "up" and found.folds[DOWN].offset is None


def test_a_norm_with_a_bias_is_refused() -> None:
    assert folding_of(MLP(nn.LayerNorm(HIDDEN))).refusals == {
        GATE_UP: "`norm` adds a bias, which scales can't be folded into exactly"
    }


def test_a_norm_that_does_something_else_with_its_weight_is_refused() -> None:
    class Squared(LlamaRMSNorm):
        def forward(self, hidden_BTH: Tensor) -> Tensor:
            return hidden_BTH * self.weight.square()

    assert "`norm` does not multiply by its weight" in folding_of(MLP(Squared(HIDDEN))).refusals[GATE_UP]


class RoutedMLP(MLP):
    def forward(self, hidden_BTH: Tensor) -> Tensor:
        return super().forward(hidden_BTH) * self.norm(hidden_BTH).mean(dim=-1, keepdim=True)


class ResidualAfterNorm(MLP):
    def forward(self, hidden_BTH: Tensor) -> Tensor:
        return super().forward(hidden_BTH) + self.norm(hidden_BTH)


@pytest.mark.parametrize("kind", [RoutedMLP, ResidualAfterNorm])
def test_a_norm_that_something_else_reads_too_takes_no_scales(kind: type[MLP]) -> None:
    found = folding_of(kind())
    assert found.refusals == {GATE_UP: "nothing before it scales its input channel by channel, and nothing else"}
    assert DOWN in found.folds


def test_a_norm_before_two_subsets_or_part_of_one_takes_no_scales() -> None:
    found = folding_of(MLP(), ("gate",), ("up",), DOWN)
    assert found.refusals == dict.fromkeys((("gate",), ("up",)), "`norm` feeds more than the linears of one subset")

    class Apart(MLP):
        def forward(self, hidden_BTH: Tensor) -> Tensor:
            return self.down(self.between(self.gate(self.norm(hidden_BTH)), self.up(hidden_BTH)))

    assert "feeds more than" in folding_of(Apart()).refusals[GATE_UP]


class Router(nn.Module):
    """Tells each token how much of the MLP it gets, by what enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, HIDDEN))

    def forward(self, x_BTH: Tensor) -> Tensor:
        return functional.softmax(functional.linear(x_BTH, self.weight), dim=-1).amax(dim=-1, keepdim=True)


class Mixture(MLP):
    """What a router gives each token of an MLP."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__(norm)
        self.router = Router()

    def routed(self, x_BTH: Tensor) -> Tensor:
        return self.router(x_BTH)

    def forward(self, hidden_BTH: Tensor) -> Tensor:
        x_BTH = self.norm(hidden_BTH)
        share_BT1 = self.routed(x_BTH)
        return hidden_BTH + share_BT1 * self.down(self.between(functional.silu(self.gate(x_BTH)), self.up(x_BTH)))


def test_a_router_that_reads_a_norm_follows_it() -> None:
    found = folding_of(Mixture())
    assert found.refusals == {} and found.folds[GATE_UP].followers == ("router",)
    assert found.folds[DOWN].followers == ()


def test_a_router_that_hears_more_than_the_norm_or_hears_it_otherwise_lets_nothing_be_scaled() -> None:
    class Hears(Mixture):
        def routed(self, x_BTH: Tensor) -> Tensor:
            return self.router(x_BTH.roll(1, dims=-1))

    class Added(Mixture):
        def routed(self, x_BTH: Tensor) -> Tensor:
            return self.router(x_BTH) * x_BTH.mean(dim=-1, keepdim=True)

    class Bent(Mixture):
        def routed(self, x_BTH: Tensor) -> Tensor:
            return self.router(x_BTH + 1.0)

    assert "`norm` does not feed the router channel by channel" in folding_of(Hears()).refusals[GATE_UP]
    for kind in (Added, Bent):
        assert "nothing before it scales" in folding_of(kind()).refusals[GATE_UP], kind


def test_a_norm_of_one_plus_its_weight_before_a_router_takes_no_scales() -> None:
    assert "adds 1 to its weight" in folding_of(Mixture(GemmaRMSNorm(HIDDEN))).refusals[GATE_UP]


def test_a_matrix_that_rules_leave_does_not_follow_a_norm() -> None:
    """It stays as it is in the source, so what it reads can't be scaled."""

    class Left(Mixture):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(HIDDEN, 1)
            self.left = nn.Linear(HIDDEN, 1)

        def routed(self, x_BTH: Tensor) -> Tensor:
            return functional.sigmoid(self.left(x_BTH)) + functional.sigmoid(self.router(x_BTH))

    assert "nothing before it scales" in folding_of(Left()).refusals[GATE_UP]


def test_a_linear_whose_channels_are_moved_about_is_followed() -> None:
    order_K = torch.randperm(WIDE, generator=torch.Generator().manual_seed(5))

    class Moved(MLP):
        def between(self, gate_BTK: Tensor, up_BTK: Tensor) -> Tensor:
            return (gate_BTK * up_BTK)[..., order_K]

    assert torch.equal(folding_of(Moved()).folds[DOWN].channels_K, order_K)


def test_a_linear_whose_channels_are_mixed_or_bent_takes_no_scales() -> None:
    class Mixed(MLP):
        def between(self, gate_BTK: Tensor, up_BTK: Tensor) -> Tensor:
            return gate_BTK * (up_BTK + up_BTK.roll(1, dims=-1))

    class Bent(MLP):
        def between(self, gate_BTK: Tensor, up_BTK: Tensor) -> Tensor:
            return gate_BTK + functional.gelu(up_BTK)

    assert folding_of(Mixed()).refusals == {DOWN: "`up` mixes its channels on the way"}
    assert folding_of(Bent()).refusals == {
        DOWN: "nothing before it scales its input channel by channel, and nothing else"
    }


def test_channels_that_an_activation_cuts_off_are_not_taken_for_others() -> None:
    """Of few tokens some channels are zero behind a ReLU, doubled or not."""

    class Cut(MLP):
        def between(self, gate_BTK: Tensor, up_BTK: Tensor) -> Tensor:
            return functional.relu(up_BTK)

    assert folding_of(Cut()).refusals[DOWN] == "`up` gives channels that are zero in the trial"


def test_a_linear_that_no_token_of_the_trial_came_to_is_named_as_one() -> None:
    class Idle(MLP):
        def forward(self, hidden_BTH: Tensor) -> Tensor:
            return hidden_BTH + self.gate(self.norm(hidden_BTH)).mean() + self.up(self.norm(hidden_BTH)).mean()

    found = folding_of(Idle())
    assert found.refusals == {DOWN: "no token of the trial came to it"} and GATE_UP in found.folds


def test_gate_and_up_in_one_matrix_are_left_unfolded() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = LlamaRMSNorm(HIDDEN)
            self.gate_up, self.down = nn.Linear(HIDDEN, 2 * WIDE), nn.Linear(WIDE, HIDDEN)

        def forward(self, hidden_BTH: Tensor) -> Tensor:
            gate_BTK, up_BTK = self.gate_up(self.norm(hidden_BTH)).chunk(2, dim=-1)
            return hidden_BTH + self.down(functional.silu(gate_BTK) * up_BTK)

    found = folding_of(Fused(), ("gate_up",), DOWN)
    assert found.folds.keys() == {("gate_up",)} and found.refusals.keys() == {DOWN}
