"""Perplexity, distance and generation against what transformers and plain arithmetic say."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tasks.evaluate import dense_model, generate, mean_kl, perplexity
from tasks.quantization import GPTQConfig, RTNConfig
from tests.packed_models import write_packed
from tests.tiny_models import tiny_tokenizer, write_tiny_llama

IDS = torch.arange(3, 3 + 7 * 70, 7) % 320


@pytest.fixture
def source(tmp_path):
    return write_tiny_llama(tmp_path / "source")


def test_a_source_is_loaded_as_transformers_loads_it(source):
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    with torch.inference_mode():
        assert torch.equal(dense_model(source)(IDS[None]).logits, expected(IDS[None]).logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "config", [RTNConfig(group_size=32), GPTQConfig(bits=3, group_size=32, sym=False, desc_act=True)]
)
def test_an_export_gets_the_weights_that_were_packed(tmp_path, config, tied):
    source = write_tiny_llama(tmp_path / "source", tied=tied, attention_bias=True)
    packed = write_packed(source, tmp_path / "export", config)
    expected = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for name, rows in packed.items():
        expected.get_submodule(name).weight.data = rows.dequantize()
        if expected.get_submodule(name).bias is not None:
            expected.get_submodule(name).bias.data = expected.get_submodule(name).bias.data.half().float()
    with torch.inference_mode():
        torch.testing.assert_close(
            dense_model(tmp_path / "export")(IDS[None]).logits, expected(IDS[None]).logits, rtol=0, atol=0
        )


def test_perplexity_is_that_of_the_model_own_loss_on_each_window(source):
    model = dense_model(source)
    with torch.inference_mode():
        losses = [model(window[None], labels=window[None]).loss.item() for window in IDS[:64].split(32)]
    assert perplexity(model, IDS, window=32) == pytest.approx(math.exp(sum(losses) / 2), rel=1e-6)


def test_a_model_without_weights_of_its_own_is_as_perplexed_as_its_vocabulary_is_large(source):
    model = dense_model(source)
    model.lm_head.weight.data.zero_()
    assert perplexity(model, IDS, window=16) == pytest.approx(320, rel=1e-5)


def test_a_model_has_no_distance_from_itself_and_some_from_its_quantized_form(source, tmp_path):
    write_packed(source, tmp_path / "coarse", RTNConfig(bits=2, group_size=32))
    write_packed(source, tmp_path / "fine", RTNConfig(bits=8, group_size=32))
    model = dense_model(source)
    assert mean_kl(model, dense_model(source), IDS, window=32) == 0.0
    fine = mean_kl(model, dense_model(tmp_path / "fine"), IDS, window=32)
    coarse = mean_kl(model, dense_model(tmp_path / "coarse"), IDS, window=32)
    assert 0.0 < fine < 1e-2 < coarse


def test_mean_kl_is_that_of_torch(source, tmp_path):
    write_packed(source, tmp_path / "export", RTNConfig(bits=3, group_size=32))
    model, quantized = dense_model(source), dense_model(tmp_path / "export")
    with torch.inference_mode():
        logs = [torch.log_softmax(each(IDS[None, :64]).logits[0].double(), -1) for each in (model, quantized)]
    expected = torch.nn.functional.kl_div(logs[1], logs[0], reduction="batchmean", log_target=True)
    assert mean_kl(model, quantized, IDS, window=64) == pytest.approx(float(expected), rel=1e-3)


def test_generation_takes_the_likeliest_token_each_time_and_leaves_out_the_prompt(source):
    model, tokenizer = dense_model(source), tiny_tokenizer()
    model.generation_config.do_sample = True
    model.generation_config.eos_token_id = None
    ids = tokenizer("Bread needs")["input_ids"]
    for _ in range(5):
        with torch.inference_mode():
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
    expected = tokenizer.decode(ids[len(tokenizer("Bread needs")["input_ids"]) :], skip_special_tokens=True)
    assert generate(model, tokenizer, "Bread needs", tokens=5) == expected


def test_generation_refuses_a_prompt_without_tokens(source):
    with pytest.raises(ValueError, match="prompt has no tokens"):
        generate(dense_model(source), tiny_tokenizer(), "")


@pytest.mark.parametrize(
    ("ids", "window", "message"),
    [
        (IDS[None], 32, r"shape \(1, 70\)"),
        (IDS, 1, "window of 1 tokens"),
        (IDS, 71, "70 tokens do not fill one window of 71"),
    ],
)
def test_ids_that_fill_no_window_are_refused(source, ids, window, message):
    with pytest.raises(ValueError, match=message):
        perplexity(dense_model(source), ids, window)


def test_a_model_that_gives_nan_is_no_number(source):
    model = dense_model(source)
    model.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or Inf"):
        perplexity(model, IDS, window=32)


def test_a_directory_without_a_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"holds no config\.json"):
        dense_model(tmp_path)


def test_a_source_without_weights_is_named(source):
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        dense_model(source)


def test_a_missing_and_a_left_over_tensor_are_named(source):
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.extra.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys: \['model.layers.1.mlp.up_proj.weight'\].*mlp\.extra"):
        dense_model(source)


def test_a_tensor_of_the_wrong_shape_is_named(source):
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        dense_model(source)


def test_a_shard_that_is_absent_or_cut_is_named(source, tmp_path):
    write_packed(source, tmp_path / "export", RTNConfig(group_size=32))
    shard = tmp_path / "export" / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors.*can't be read"):
        dense_model(tmp_path / "export")
    shard.unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors.*can't be read"):
        dense_model(tmp_path / "export")


@pytest.mark.parametrize("part", ["qweight", "qzeros", "scales", "g_idx"])
def test_a_packed_module_that_lacks_a_part_is_named(source, tmp_path, part):
    write_packed(source, tmp_path / "export", RTNConfig(group_size=32))
    shard = tmp_path / "export" / "model-00001-of-00003.safetensors"
    tensors = load_file(shard)
    del tensors[f"model.layers.0.mlp.up_proj.{part}"]
    save_file(tensors, shard, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"model\.layers\.0\.mlp\.up_proj\.(weight|{part})"):
        dense_model(tmp_path / "export")


def test_another_quantization_method_is_refused_by_name(source, tmp_path):
    write_packed(source, tmp_path / "export", RTNConfig(group_size=32))
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "hqq"
    (tmp_path / "export" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantized with `hqq`"):
        dense_model(tmp_path / "export")


def test_a_quantized_config_over_plain_weights_is_refused(source):
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"holds no \.qweight tensor"):
        dense_model(source)
