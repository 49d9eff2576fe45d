"""Every family: layer by layer bit for bit what transformers computes with the whole, experts one by one."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.models.decoder import Decoder
from tasks.models.experts import UnfusedExperts
from tasks.models.families import SUPPORTED
from tasks.models.replay import ReplayError, check_replay
from tasks.models.source import SourceError, SourceModel
from tests.family_replay import assert_replays
from tests.tiny_families import FAMILIES, FURTHER, write_tiny

MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3", "qwen2_moe", "olmoe", "phimoe", "glm4_moe", "gpt_oss")


def decoder_of(path) -> Decoder:
    return Decoder.from_source(SourceModel.open(str(path)))


def change_tensors(path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def change_config(path, **changes) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def test_every_supported_family_is_tested_here():
    assert FAMILIES.keys() | FURTHER.keys() == SUPPORTED and not FAMILIES.keys() & FURTHER.keys()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_replays_bit_for_bit(family, tmp_path):
    path = write_tiny(family, tmp_path / "model")
    assert_replays(decoder_of(path), path)


@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text", "vaultgemma"])
def test_embeddings_that_are_scaled_by_a_root_that_half_precision_rounds_replay_too(family, tmp_path):
    """The check computes in float32, where the square root of 96 is another number than in bfloat16."""
    check_replay(decoder_of(write_tiny(family, tmp_path / "model", hidden_size=96)))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_tensor_of_every_family_has_a_name_and_every_linear_a_subset(family, tmp_path):
    decoder = decoder_of(write_tiny(family, tmp_path / "model"))
    names = [name for i in range(decoder.layer_count) for name in decoder.layer_tensor_names(i)]
    tied = set(decoder.source.tensors) - set(names) - set(decoder.outer_tensor_names)
    assert len(names) == len(set(names)) and tied <= {"lm_head.weight"}
    assert set(names) | set(decoder.outer_tensor_names) <= set(decoder.source.tensors)
    for i in range(decoder.layer_count):
        layer = decoder.materialise(i, "cpu")
        for name, shape in decoder.linear_shapes(i).items():
            assert layer.get_submodule(name).weight.shape == shape
            assert decoder.source.tensors[f"{decoder.layer_name(i)}.{name}.weight"].shape == shape


def test_dense_and_sparse_layers_are_two_kinds_with_subsets_of_their_own(tmp_path):
    decoder = decoder_of(write_tiny("qwen3_moe", tmp_path / "model"))
    assert decoder.kinds == (0, 1, 0) and decoder.layers_of_each_kind == (0, 1)
    assert decoder.subsets(1)[-2:] == (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
    sparse = decoder.subsets(2)
    assert sparse[2:4] == (("mlp.experts.0.gate_proj", "mlp.experts.0.up_proj"), ("mlp.experts.0.down_proj",))
    assert len(sparse) == 2 + 2 * 8
    assert decoder.linear_shapes(2)["mlp.experts.7.down_proj"] == (64, 32)


def test_settings_that_no_tensor_shows_make_another_kind(tmp_path):
    """Two layers with the same tensors, one of which uses no rotary tables, or looks at a window only."""
    assert decoder_of(write_tiny("smollm3", tmp_path / "model")).kinds == (0, 1, 0)
    assert decoder_of(write_tiny("gemma2", tmp_path / "other")).kinds == (0, 1, 0)


def test_attention_falls_back_to_eager_where_a_family_has_no_sdpa(tmp_path):
    assert decoder_of(write_tiny("gemma2", tmp_path / "model")).config._attn_implementation == "eager"
    assert decoder_of(write_tiny("gemma3_text", tmp_path / "other")).config._attn_implementation == "sdpa"


def test_experts_are_named_as_the_files_name_them(tmp_path):
    decoder = decoder_of(write_tiny("mixtral", tmp_path / "model"))
    names = [name for name in decoder.linear_shapes(0) if ".3." in name]
    assert names == [f"block_sparse_moe.experts.3.{name}" for name in ("w1", "w3", "w2")]
    assert "model.layers.0.block_sparse_moe.gate.weight" in decoder.layer_tensor_names(0)
    layer = decoder.materialise(0, "cpu")
    assert layer.get_submodule("block_sparse_moe.experts.3.w1") is layer.get_submodule("mlp.experts.3.w1")


def test_neither_routers_nor_gates_of_shared_experts_are_quantized(tmp_path):
    decoder = decoder_of(write_tiny("qwen2_moe", tmp_path / "model"))
    assert {name.rpartition(".")[2] for name in decoder.linear_shapes(0)} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip
    assert "model.layers.0.mlp.shared_expert_gate.weight" in decoder.source.tensors


@pytest.mark.parametrize("family", MIXTURES)
def test_the_grouping_of_experts_changes_no_bit(family, tmp_path):
    decoder = decoder_of(write_tiny(family, tmp_path / "model"))
    sparse = decoder.layer_count - 1
    layer = decoder.materialise(sparse, "cpu")
    experts = next(module for module in layer.modules() if isinstance(module, UnfusedExperts))
    hidden = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(0))
    arguments = decoder.call_arguments(sparse, hidden, None)
    outputs = []
    for size in (1, 3, experts.num_experts):
        numbers = range(experts.num_experts)
        experts.groups = tuple(tuple(numbers[start : start + size]) for start in range(0, len(numbers), size))
        with torch.no_grad():
            output = layer(hidden, **arguments)
        outputs.append(output[0] if isinstance(output, tuple) else output)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


def test_the_check_names_an_experts_weight_and_its_module(tmp_path, monkeypatch):
    path = write_tiny("qwen3_moe", tmp_path / "model")
    honest = Decoder.materialise

    def spoiled(change):
        def materialise(self, i, device, dtype=None):
            layer = honest(self, i, device, dtype)
            change(layer)
            return layer

        monkeypatch.setattr(Decoder, "materialise", materialise)

    def halved(layer):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.get_submodule("3.up_proj").weight.mul_(0.5)

    def swapped(layer):  # gate and up: the same weights in the same places, another computation
        if hasattr(layer.mlp, "experts"):
            experts = layer.mlp.experts
            fused = experts._fused[0]
            experts.__dict__["_fused"] = (torch.nn.Module(),)
            experts._fused[0].has_gate = True
            experts._fused[0]._apply_gate = lambda gate_up: fused._apply_gate(gate_up.flip(-1))

    spoiled(halved)
    with pytest.raises(ReplayError, match=r"weight `model\.layers\.0\.mlp\.experts\.gate_up_proj` differs"):
        check_replay(decoder_of(path))
    spoiled(swapped)
    with pytest.raises(ReplayError, match=r"output of `model\.layers\.0\.mlp\.experts` differs"):
        check_replay(decoder_of(path))


def test_a_missing_and_a_misshapen_expert_are_told_by_name(tmp_path):
    path = write_tiny("qwen3_moe", tmp_path / "model")

    def spoil(tensors):
        del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
        tensors["model.layers.0.mlp.experts.1.down_proj.weight"] = torch.ones(64, 16, dtype=torch.bfloat16)
        tensors["model.layers.0.mlp.experts.8.down_proj.weight"] = torch.ones(64, 32, dtype=torch.bfloat16)

    change_tensors(path, spoil)
    with pytest.raises(SourceError) as caught:
        decoder_of(path)
    assert sorted(caught.value.problems) == [
        "`model.layers.0.mlp.experts.1.down_proj.weight` has the shape [64, 16]; config.json makes it [64, 32]",
        "`model.layers.0.mlp.experts.8.down_proj.weight` is unexpected",
        "`model.layers.2.mlp.experts.5.up_proj.weight` is missing",
    ]


def test_heads_for_further_tokens_are_carried_and_no_other_extra_layer_is(tmp_path):
    path = write_tiny("deepseek_v3", tmp_path / "model", num_nextn_predict_layers=1)
    extra = ("model.layers.3.eh_proj.weight", "model.layers.3.enorm.weight", "model.layers.3.embed_tokens.weight")
    change_tensors(path, lambda tensors: tensors.update({name: torch.ones(4, 4) for name in extra}))
    decoder = decoder_of(path)
    assert sorted(decoder.carried_tensor_names) == sorted(extra)
    assert not set(extra) & {*decoder.outer_tensor_names, *decoder.layer_tensor_names(2)}
    check_replay(decoder)
    change_tensors(path, lambda tensors: tensors.update({"model.layers.4.enorm.weight": torch.ones(4)}))
    with pytest.raises(SourceError, match=r"`model\.layers\.4\.enorm\.weight` is unexpected"):
        decoder_of(path)
