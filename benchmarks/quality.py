"""What each method costs in quality: perplexity and mean KL of a quantized model, beside other quantizers' figures.

    python benchmarks/quality.py MODEL [--methods rtn,fp8] [--directory DIR] [--json]

MODEL is SmolLM2-135M-Instruct: the peers' figures hold for it alone. Every setting is quantized by the flow as a user's job
would be, exported, read back and judged on the first four windows of 512 tokens of the LGPL 2.1, which Debian keeps in
/usr/share/common-licenses; GPTQ, AWQ, ParoQuant and adapters look at quality_calibration.jsonl, 32 excerpts of about 1,000
characters of other licence texts and of the documentation strings of Python's library. The peers, on the same texts with
torch 2.13.0 on the CPU and their defaults: GPTQModel 7.7.0 (group-aware order, damp_percent 0.05), and llm-compressor
0.14.0.1 (`oneshot`, 32 samples of at most 512 tokens, the head left out; its AWQ with `Tensor.pin_memory` made to do nothing,
which has no meaning without a GPU), whose exports were judged here too. The command fails when a setting loses to the better
one. QQQ and EXL3 are not here: the model's width of 576 fills no tile of theirs (see quality_of_tiles.py).

`--directory` keeps exports and checkpoints, so that an interrupted benchmark goes on where it was.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoTokenizer

from checkpoint_store.config import CheckpointConfig
from flows.quantize_model import quantize_model
from tasks.evaluate import dense_model, mean_kl, perplexity
from tasks.formats import peft
from tasks.job import CalibrationConfig, QuantizationJob
from tasks.quantization import (
    AWQConfig,
    BitsAndBytesConfig,
    EoRAConfig,
    FOEMConfig,
    FP8Config,
    GGUFConfig,
    GPTAQConfig,
    GPTQConfig,
    ParoQuantConfig,
    Quantization,
    RTNConfig,
)

CALIBRATION = Path(__file__).with_name("quality_calibration.jsonl")
HELD_OUT = Path("/usr/share/common-licenses/LGPL-2.1")
WINDOW = 512
WINDOWS = 4
# A ratio of perplexities that 2,044 predicted tokens do not tell from 1.
NOISE = 0.005


@dataclass(frozen=True)
class Setting:
    """One line of the table; the peers' perplexities for the same, where they were measured."""

    name: str  # begins with the method
    quantization: Quantization
    gptqmodel: float | None = None
    llm_compressor: float | None = None
    adapter: EoRAConfig | None = None


SETTINGS = (
    Setting("rtn 4 bit g64", RTNConfig(group_size=64), 27.757, 27.592),
    Setting("rtn 8 bit g64", RTNConfig(bits=8, group_size=64, checkpoint_format="compressed-tensors"), None, 19.646),
    Setting("fp8 e4m3 per row", FP8Config()),
    Setting("bitsandbytes nf4", BitsAndBytesConfig()),
    Setting("bitsandbytes fp4", BitsAndBytesConfig(quant_type="fp4")),
    Setting("bitsandbytes int8", BitsAndBytesConfig(quant_type="int8")),
    Setting("gguf q4_0", GGUFConfig(quant_type="q4_0")),
    Setting("gguf q4_k_m", GGUFConfig()),
    Setting("gguf q4_k_m imatrix", GGUFConfig(imatrix=True)),
    Setting("gguf q8_0", GGUFConfig(quant_type="q8_0")),
    Setting("gptq 4 bit g64", GPTQConfig(group_size=64), 21.808, 23.121),
    Setting("gptq 4 bit g64 in column order", GPTQConfig(group_size=64, act_group_aware=False)),
    Setting("gptq 4 bit g32", GPTQConfig(group_size=32)),
    Setting("gptq 4 bit g64 with gptaq", GPTQConfig(group_size=64, gptaq=GPTAQConfig())),
    Setting("gptq 4 bit g64 with foem", GPTQConfig(group_size=64, foem=FOEMConfig())),
    Setting("gptq 4 bit g64 with gptaq and foem", GPTQConfig(group_size=64, foem=FOEMConfig(alpha=0.25))),
    Setting(
        "rtn 4 bit g64 with zero points", RTNConfig(group_size=64, sym=False, checkpoint_format="awq"), None, 26.070
    ),
    Setting("awq 4 bit g64", AWQConfig(group_size=64), 33.162, 22.898),
    Setting("awq 4 bit g64 symmetric", AWQConfig(group_size=64, sym=True)),
    Setting("paroquant 4 bit g64", ParoQuantConfig(group_size=64)),
    Setting("gptq 4 bit g64 with adapter", GPTQConfig(group_size=64), adapter=EoRAConfig()),
    Setting(
        "gptq 4 bit g64 with gptaq and adapter", GPTQConfig(group_size=64, gptaq=GPTAQConfig()), adapter=EoRAConfig()
    ),
    Setting("awq 4 bit g64 with adapter", AWQConfig(group_size=64), adapter=EoRAConfig()),
)
# GPTQModel's figure for the source, on the same text.
PEER_SOURCE = 19.547
METHODS = tuple(dict.fromkeys(setting.quantization.method for setting in SETTINGS))


@dataclass(frozen=True)
class Result:
    """What came out of one setting."""

    name: str
    perplexity: float
    kl: float | None
    gptqmodel: float | None
    llm_compressor: float | None
    seconds: float | None

    @property
    def ratio(self) -> float | None:
        """Ours over the better peer's; under 1 is better."""
        peers = [peer for peer in (self.gptqmodel, self.llm_compressor) if peer is not None]
        return self.perplexity / min(peers) if peers else None

    def row(self) -> str:
        """A line of a Markdown table."""
        cells = (
            self.name, self.perplexity, self.kl, self.gptqmodel, self.llm_compressor, self.ratio, self.seconds
        )  # fmt: skip
        return f"| {' | '.join(_shown(cell) for cell in cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="directory of SmolLM2-135M-Instruct")
    parser.add_argument(
        "--methods", type=_methods, default=METHODS, help=f"some of {','.join(METHODS)}, separated by commas"
    )
    parser.add_argument("--directory", type=Path, help="where exports and checkpoints are kept")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if not HELD_OUT.is_file():
        parser.error(f"{HELD_OUT} is not there; take it from Debian's package base-files")
    settings = [setting for setting in SETTINGS if setting.quantization.method in arguments.methods]
    if arguments.directory is not None:
        results = measure(arguments.model, arguments.directory.absolute(), settings, PEER_SOURCE)
    else:
        with tempfile.TemporaryDirectory() as directory:
            results = measure(arguments.model, Path(directory), settings, PEER_SOURCE)
    if arguments.json:
        print(json.dumps([asdict(result) | {"ratio": result.ratio} for result in results], indent=2))
    else:
        show(results)
    worse = [result.name for result in results if result.ratio is not None and result.ratio > 1 + NOISE]
    if worse:
        print(f"worse than the better peer: {', '.join(worse)}", file=sys.stderr)
    return 1 if worse else 0


def show(results: Iterable[Result]) -> None:
    """Print a Markdown table."""
    print("| setting | perplexity | KL | GPTQModel | llm-compressor | ratio | seconds |\n|---|---|---|---|---|---|---|")
    print("\n".join(result.row() for result in results))


def measure(
    model: Path, directory: Path, settings: Sequence[Setting], peer_source: float | None = None
) -> list[Result]:
    """Quantize with every setting below `directory` and judge the exports; the source comes first."""
    input_ids = torch.tensor(AutoTokenizer.from_pretrained(model)(HELD_OUT.read_text())["input_ids"])
    input_ids = input_ids[: WINDOWS * WINDOW]
    source = dense_model(model)
    results = [Result("source", perplexity(source, input_ids, WINDOW), None, peer_source, None, None)]
    for setting in settings:
        report = quantize_model(job(model, directory / setting.name.replace(" ", "-"), setting))
        exported = dense_model(report.output)
        if setting.adapter is not None:
            exported = PeftModel.from_pretrained(exported, Path(report.output) / peft.DIRECTORY)
        results.append(
            Result(
                setting.name,
                perplexity(exported, input_ids, WINDOW),
                mean_kl(source, exported, input_ids, WINDOW),
                setting.gptqmodel,
                setting.llm_compressor,
                report.seconds,
            )
        )
    return results


def job(model: Path, place: Path, setting: Setting) -> QuantizationJob:
    """The job of one setting; its checkpoint and its export lie in `place`."""
    return QuantizationJob(
        model=str(model),
        output=str(place / "export"),
        quantization=setting.quantization,
        adapter=setting.adapter,
        calibration=CalibrationConfig(data=str(CALIBRATION), samples=32, sequence_length=WINDOW),
        checkpoint=CheckpointConfig(path=str(place / "checkpoint")),
    )


def _methods(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    for method in chosen:
        if method not in METHODS:
            raise argparse.ArgumentTypeError(f"`{method}` is none of {', '.join(METHODS)}")
    return chosen


def _shown(cell: str | float | None) -> str:
    if isinstance(cell, float):
        return f"{cell:.4f}" if cell < 10 else f"{cell:.3f}"
    return cell or ""


if __name__ == "__main__":
    sys.exit(main())
