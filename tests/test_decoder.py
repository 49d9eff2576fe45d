"""A model one layer at a time: bit for bit what transformers computes with the whole, and refusals by name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_families import write_tiny
from tiny_models import write_tiny_llama
from transformers import AutoModelForCausalLM

from tasks.models.calls import StandIn
from tasks.models.decoder import Decoder
from tasks.models.families import SUPPORTED
from tasks.models.replay import ReplayError, check_replay
from tasks.models.source import SourceError, SourceModel

VARIANTS = [
    {"dtype": torch.float32, "tied": True},
    {"attention_bias": True, "mlp_bias": True, "shards": 3},
    {"llama3_rope": True, "key_value_heads": 1, "dtype": torch.float16},
    {"key_value_heads": 4, "layers": 3, "head_dim": 8},
    {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, "max_position_embeddings": 8},
]
LLAMA_SUBSETS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)


def decoder_of(path: Path) -> Decoder:
    return Decoder.from_source(SourceModel.open(str(path)))


def problems_of(path: Path) -> tuple[str, ...]:
    with pytest.raises(SourceError) as caught:
        decoder_of(path)
    return caught.value.problems


def change_tensors(path: Path, change) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def change_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


def ids_and_mask(rows=3, tokens=20, lengths=(20, 13, 7)):
    input_ids = torch.randint(0, 300, (rows, tokens), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(tokens)[None] < torch.tensor(lengths)[:, None]
    return input_ids, mask


@torch.no_grad()
def replayed(decoder: Decoder, input_ids, mask) -> list[torch.Tensor]:
    """The hidden states entering each layer, and those leaving the last."""
    states = [decoder.embed(input_ids).float()]
    for i in range(decoder.layer_count):
        layer = decoder.materialise(i, "cpu")
        states.append(layer(states[-1], **decoder.call_arguments(i, states[-1], mask)))
    return states


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("is_padded", [True, False])
def test_replaying_layer_by_layer_is_bit_identical_to_the_whole_model(tmp_path, options, is_padded):
    path = write_tiny_llama(tmp_path / "model", **options)
    input_ids, mask = ids_and_mask(lengths=(20, 13, 7) if is_padded else (20, 20, 20))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    seen = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, output: seen.extend([args[0], output]))
    with torch.no_grad():
        model(input_ids, attention_mask=mask)
    states = replayed(decoder_of(path), input_ids, mask)
    assert len(seen) == 2 * (len(states) - 1)
    for i in range(len(states) - 1):
        assert torch.equal(seen[2 * i], states[i]), f"input of layer {i}"
        assert torch.equal(seen[2 * i + 1], states[i + 1]), f"output of layer {i}"


@pytest.mark.parametrize("options", VARIANTS)
def test_the_check_passes_for_every_variant(tmp_path, options):
    check_replay(decoder_of(write_tiny_llama(tmp_path / "model", **options)))


def test_the_check_names_the_weight_that_differs(tmp_path, monkeypatch):
    decoder = decoder_of(write_tiny_llama(tmp_path / "model"))
    honest = Decoder.materialise

    def halved(self, i, device, dtype=None):
        layer = honest(self, i, device, dtype)
        layer.mlp.up_proj.weight.mul_(0.5)
        return layer

    monkeypatch.setattr(Decoder, "materialise", halved)
    with pytest.raises(ReplayError, match=r"weight `model\.layers\.0\.mlp\.up_proj\.weight` differs"):
        check_replay(decoder)


@pytest.mark.parametrize(
    ("value", "first"),
    [
        (float("nan"), r"weight `model\.layers\.0\.self_attn\.q_proj\.weight`"),
        (float("inf"), r"input of `model\.layers\.0\.self_attn\.o_proj`"),
    ],
)
def test_the_check_takes_a_damaged_source_for_what_it_is(tmp_path, value, first):
    path = write_tiny_llama(tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"][1, 1] = value
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ReplayError, match=f"^{first} holds NaN in transformers' own forward: the source's weights"):
        check_replay(decoder_of(path))


def test_the_check_names_a_wrong_argument_of_a_layer(tmp_path, monkeypatch):
    decoder = decoder_of(write_tiny_llama(tmp_path / "model"))
    honest = Decoder.call_arguments

    def without_mask(self, i, hidden, mask):
        return honest(self, i, hidden, mask) | {"attention_mask": None}

    monkeypatch.setattr(Decoder, "call_arguments", without_mask)
    with pytest.raises(ReplayError, match=r"`attention_mask` given to `model\.layers\.0`"):
        check_replay(decoder)


def test_the_check_names_a_layer_that_is_called_otherwise_than_the_one_that_stands_for_it(tmp_path, monkeypatch):
    decoder = decoder_of(write_tiny("gemma3_text", tmp_path / "model"))
    assert decoder.kinds == (0, 1, 0)
    monkeypatch.setattr(decoder, "kinds", (0, 0, 0))
    with pytest.raises(ReplayError, match=r"calls `model\.layers\.1` with other arguments than `model\.layers\.0`"):
        check_replay(decoder)


def test_the_check_names_the_linear_behind_the_first_wrong_step(tmp_path, monkeypatch):
    decoder = decoder_of(write_tiny_llama(tmp_path / "model"))
    honest = Decoder.materialise

    def other_activation(self, i, device, dtype=None):
        layer = honest(self, i, device, dtype)
        layer.mlp.act_fn = torch.nn.GELU()
        return layer

    monkeypatch.setattr(Decoder, "materialise", other_activation)
    with pytest.raises(ReplayError, match=r"input of `model\.layers\.0\.mlp\.down_proj` differs"):
        check_replay(decoder)


def test_names_shapes_and_subsets_come_from_the_model_itself(tmp_path):
    decoder = decoder_of(write_tiny_llama(tmp_path / "model", layers=3, attention_bias=True))
    assert decoder.layer_count == 3
    assert decoder.layer_name(2) == "model.layers.2"
    assert decoder.subsets(2) == LLAMA_SUBSETS
    assert list(decoder.linear_shapes(2).items()) == [
        ("self_attn.q_proj", (64, 64)),
        ("self_attn.k_proj", (32, 64)),
        ("self_attn.v_proj", (32, 64)),
        ("self_attn.o_proj", (64, 64)),
        ("mlp.gate_proj", (128, 64)),
        ("mlp.up_proj", (128, 64)),
        ("mlp.down_proj", (64, 128)),
    ]
    assert decoder.layers_of_each_kind == (0,)
    names = [name for i in range(3) for name in decoder.layer_tensor_names(i)]
    assert sorted([*names, *decoder.outer_tensor_names]) == sorted(decoder.source.tensors)


def test_no_weights_exist_until_a_layer_is_asked_for_and_each_copy_is_its_own(tmp_path):
    decoder = decoder_of(write_tiny_llama(tmp_path / "model"))
    assert all(parameter.is_meta for parameter in decoder._model.parameters())
    one, two = decoder.materialise(1, "cpu"), decoder.materialise(1, "cpu")
    one.mlp.up_proj.weight.zero_()
    assert not two.mlp.up_proj.weight.eq(0).any()
    assert all(parameter.dtype == torch.float32 and not parameter.requires_grad for parameter in two.parameters())
    assert decoder.materialise(0, "cpu", torch.bfloat16).mlp.up_proj.weight.dtype == torch.bfloat16


def test_hidden_states_are_in_the_source_dtype_and_computing_on_the_cpu_is_float32(tmp_path):
    decoder = decoder_of(write_tiny_llama(tmp_path / "model", dtype=torch.float16))
    input_ids, _ = ids_and_mask()
    assert decoder.embed(input_ids).dtype == decoder.source_dtype == torch.float16
    assert decoder.compute_dtype("cpu") == torch.float32
    assert decoder.compute_dtype("cuda:1") == torch.float16


def test_the_embedding_is_dropped_on_release_and_loaded_again_on_demand(tmp_path):
    decoder = decoder_of(write_tiny_llama(tmp_path / "model"))
    input_ids, _ = ids_and_mask()
    before = decoder.embed(input_ids)
    decoder.release()
    assert decoder._frame._embedding is None
    assert decoder.embed(input_ids).equal(before)


def test_arguments_depend_on_the_batch_alone_and_not_on_the_ones_before(tmp_path):
    """Dynamic rotary tables grow with the longest batch seen; a resumed run has seen fewer."""
    options = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    path = write_tiny_llama(tmp_path / "model", max_position_embeddings=8, **options)
    long, short = torch.zeros(1, 40, 64), torch.zeros(1, 12, 64)
    used, fresh = decoder_of(path), decoder_of(path)
    used.call_arguments(0, long, None)
    for mine, yours in zip(
        used.call_arguments(0, short, None)["position_embeddings"],
        fresh.call_arguments(0, short, None)["position_embeddings"],
        strict=True,
    ):
        assert torch.equal(mine, yours)


def test_the_arguments_of_a_late_layer_take_no_longer_than_those_of_the_first(tmp_path, monkeypatch):
    decoder = decoder_of(write_tiny_llama(tmp_path / "model", layers=12))
    made = []
    honest = StandIn.__init__
    monkeypatch.setattr(StandIn, "__init__", lambda self, *args: (made.append(self), honest(self, *args))[1])
    for i in (0, 11):
        decoder.release()
        made.clear()
        decoder.call_arguments(i, torch.zeros(1, 5, 64), None)
        assert len(made) == 1, f"layer {i}"


def test_arguments_follow_the_mask_the_dtype_and_the_shape_of_each_batch(tmp_path):
    decoder = decoder_of(write_tiny_llama(tmp_path / "model"))
    _, mask = ids_and_mask()
    hidden = torch.zeros(3, 20, 64)
    padded = decoder.call_arguments(0, hidden, mask)
    expected = torch.ones(20, 20).tril().bool() & mask[:, None, None, :]
    assert padded["attention_mask"].expand(3, 1, 20, 20).equal(expected)
    assert decoder.call_arguments(0, hidden, mask)["attention_mask"] is padded["attention_mask"]
    assert decoder.call_arguments(0, hidden, torch.ones_like(mask))["attention_mask"] is None
    assert decoder.call_arguments(0, hidden, None)["attention_mask"] is None
    assert decoder.call_arguments(0, hidden, mask)["attention_mask"].equal(padded["attention_mask"])
    halves = decoder.call_arguments(0, hidden.bfloat16(), mask)["position_embeddings"]
    assert {table.dtype for table in halves} == {torch.bfloat16}
    assert decoder.call_arguments(0, hidden[:1, :5], None)["position_embeddings"][0].shape == (1, 5, 16)


def test_missing_unexpected_and_misshapen_tensors_are_all_listed(tmp_path):
    path = write_tiny_llama(tmp_path / "model")

    def spoil(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(128, 32, dtype=torch.bfloat16)
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(64, 128, dtype=torch.int8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)

    change_tensors(path, spoil)
    assert sorted(problems_of(path)) == [
        "`model.layers.0.mlp.down_proj.weight` is I8, not a plain float: the source is quantized already",
        "`model.layers.0.mlp.up_proj.weight` has the shape [128, 32]; config.json makes it [128, 64]",
        "`model.layers.0.self_attn.q_norm.weight` is unexpected",
        "`model.layers.1.mlp.up_proj.weight` is missing",
        "`model.norm.weight` is missing",
    ]


def test_rotary_tables_of_old_checkpoints_are_ignored(tmp_path):
    path = write_tiny_llama(tmp_path / "model")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(path, lambda tensors: tensors.update({name: torch.zeros(8)}))
    decoder = decoder_of(path)
    assert name not in decoder.layer_tensor_names(0) + decoder.outer_tensor_names
    check_replay(decoder)


@pytest.mark.parametrize("has_copy", [True, False])
def test_a_tied_head_is_never_among_the_outer_tensors(tmp_path, has_copy):
    path = write_tiny_llama(tmp_path / "model", tied=True)
    if has_copy:
        change_tensors(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    decoder = decoder_of(path)
    assert decoder.outer_tensor_names == ("model.embed_tokens.weight", "model.norm.weight")
    check_replay(decoder)


@pytest.mark.parametrize(
    "change", [lambda weight: weight + 1, lambda weight: weight.float(), lambda weight: weight[1:]]
)
def test_a_tied_model_with_another_head_is_refused(tmp_path, change):
    path = write_tiny_llama(tmp_path / "model", tied=True)
    change_tensors(path, lambda t: t.update({"lm_head.weight": change(t["model.embed_tokens.weight"]).clone()}))
    (problem,) = problems_of(path)
    assert "tie_word_embeddings=true, but `lm_head.weight` differs from `model.embed_tokens.weight`" in problem


def test_an_untied_model_without_head_is_refused_with_the_way_out(tmp_path):
    path = write_tiny_llama(tmp_path / "model")
    change_tensors(path, lambda tensors: tensors.pop("lm_head.weight"))
    missing, advice = problems_of(path)
    assert missing == "`lm_head.weight` is missing"
    assert "tie_word_embeddings=false: set it to true if the embedding is the head" in advice


def test_another_family_is_refused_by_name(tmp_path):
    path = write_tiny_llama(tmp_path / "model")
    change_config(path, model_type="gpt2")
    assert problems_of(path) == (f"its model_type is 'gpt2'; supported are: {', '.join(sorted(SUPPORTED))}",)


@pytest.mark.parametrize("family", [["llama"], {"llama": 1}, None, 3])
def test_a_family_that_is_no_name_is_refused_like_another(tmp_path, family):
    path = write_tiny_llama(tmp_path / "model")
    change_config(path, model_type=family)
    assert problems_of(path) == (f"its model_type is {family!r}; supported are: {', '.join(sorted(SUPPORTED))}",)


@pytest.mark.parametrize("value", [[1], "awq", {}])
def test_a_quantized_source_is_refused_whatever_describes_it(tmp_path, value):
    path = write_tiny_llama(tmp_path / "model")
    change_config(path, quantization_config=value)
    (problem,) = problems_of(path)
    assert problem.startswith("it is quantized already (unknown method), which can't be read")


def test_a_quantization_config_of_null_is_none(tmp_path):
    path = write_tiny_llama(tmp_path / "model")
    change_config(path, quantization_config=None)
    assert decoder_of(path).layer_count == 2


def test_a_quantized_source_is_refused_by_name(tmp_path):
    path = write_tiny_llama(tmp_path / "model")
    change_config(path, quantization_config={"quant_method": "awq"})
    (problem,) = problems_of(path)
    assert problem.startswith("it is quantized already (awq), which can't be read")
    assert "name the original model, or load this one with transformers, dequantize it" in problem


@pytest.mark.parametrize(
    "changes", [{"hidden_act": "no-such-thing"}, {"num_attention_heads": 3}, {"hidden_size": "many"}]
)
def test_a_config_that_transformers_refuses_is_told_as_the_users(tmp_path, changes):
    path = write_tiny_llama(tmp_path / "model")
    change_config(path, **changes)
    problems = problems_of(path)
    assert any("config.json" in problem for problem in problems)


def test_a_model_without_layers_is_refused(tmp_path):
    path = write_tiny_llama(tmp_path / "model")
    change_config(path, num_hidden_layers=0)
    assert problems_of(path) == ("config.json gives it 0 layers",)


def test_peak_memory_does_not_grow_with_the_depth_of_the_model(tmp_path):
    """Layers of 13 MB in float32: six more of them must cost less than one."""
    script = """
import sys, torch
from tasks.models.calls import StandIn
from tasks.models.decoder import Decoder
from tasks.models.source import SourceModel
decoder = Decoder.from_source(SourceModel.open(sys.argv[1]))
hidden = decoder.embed(torch.arange(64)[None])
with torch.no_grad():
    for i in range(decoder.layer_count):
        layer = decoder.materialise(i, "cpu")
        hidden = layer(hidden.float(), **decoder.call_arguments(i, hidden.float(), None))
        del layer
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))  # ru_maxrss counts the parent's
print(int(peak.split()[1]) // 1024)
"""
    peaks = []
    for layers in (2, 8):
        path = write_tiny_llama(tmp_path / str(layers), layers=layers, hidden_size=512, intermediate_size=1536)
        run = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
        peaks.append(int(run.stdout))
    assert peaks[1] - peaks[0] < 12, f"{peaks} MB"
