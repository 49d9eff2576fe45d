"""The demo: a small real model, a text that is shipped here, and a run that invites the reader to kill it.

The text is Alice's Adventures in Wonderland (Lewis Carroll, 1865, in the public domain): chapters I to VI calibrate,
XI and XII are held out to measure perplexity.
"""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checkpoint_store.config import CheckpointConfig
from flows.commands_run import quantize, summary
from flows.demo_model import DemoUnavailable, demo_model, shortened
from tasks.job import CalibrationConfig, QuantizationJob
from tasks.quantization import GPTQConfig

CALIBRATION_TEXT = Path(__file__).with_name("demo_calibration.txt")
HELD_OUT_TEXT = Path(__file__).with_name("demo_held_out.txt")
PROMPT = "The Rabbit took a watch out of its pocket, and"
SEQUENCE_LENGTH = 512
HELD_OUT_TOKENS = 2048
NEW_TOKENS = 24


def demo_job(model: Path, directory: Path) -> QuantizationJob:
    """What the demo quantizes: 4 bit GPTQ in groups of 64 (SmolLM2's width of 576 is a multiple of it)."""
    place = directory.absolute() / model.name
    return QuantizationJob(
        model=str(model),
        output=str(place / "quantized"),
        quantization=GPTQConfig(bits=4, group_size=64),
        calibration=CalibrationConfig(data=str(CALIBRATION_TEXT), samples=32, sequence_length=SEQUENCE_LENGTH),
        checkpoint=CheckpointConfig(path=str(place / "checkpoint")),
    )


def run(
    directory: Path, *, model: Path | None, layers: int | None, verbose: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """Quantize, then compare before and after; returns everything that was said as values."""
    source = _model(model, layers, say)
    job = demo_job(source, directory)
    say(f"Model       {source}")
    say(f"Checkpoint  {job.checkpoint.path}")
    say(f"Result      {job.output}")
    say(
        f"Kill it at any time: Ctrl+C ends after the layer in work, `kill -9 {os.getpid()}` at once. Then run it again:"
    )
    say(f"    {shlex.join(['prefect-quantize', *sys.argv[1:]])}")
    report = quantize(job, verbose=verbose)
    say(summary(report))
    say("Comparing before and after ...")
    before, after = _measured(source, source), _measured(Path(job.output), source)
    for label, key in (("Perplexity on two held-out chapters", "perplexity"), ("Sentence", "sentence")):
        say(f"{label}\n    before  {_shown(before[key])}\n    after   {_shown(after[key])}")
    return {"report": report.model_dump(mode="json"), "before": before, "after": after}


def _model(model: Path | None, layers: int | None, say: Callable[[str], None]) -> Path:
    if model is not None and not (model / "config.json").is_file():
        raise DemoUnavailable(
            f"--model {model}: there is no config.json, so it is no model directory; name one that is"
        )
    source = (model or demo_model(say)).absolute()
    return source if layers is None else shortened(source, layers)


def _measured(model: Path, tokenizer_from: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoTokenizer
    from transformers.utils import logging

    from tasks.evaluate import dense_model, generate, perplexity

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_from)
    held_out_T = torch.tensor(tokenizer(HELD_OUT_TEXT.read_text()).input_ids[:HELD_OUT_TOKENS])
    loaded = dense_model(model)
    return {
        "perplexity": perplexity(loaded, held_out_T, window=SEQUENCE_LENGTH),
        "sentence": PROMPT + generate(loaded, tokenizer, PROMPT, tokens=NEW_TOKENS),
    }


def _shown(value: float | str) -> str:
    return f"{value:.2f}" if isinstance(value, float) else " ".join(value.split())
