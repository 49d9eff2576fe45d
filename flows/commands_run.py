"""`run`, `plan` and `demo`: the commands that describe a job, check it, and quantize."""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flows.deadline import checked
from flows.job_arguments import add_job_arguments, job_from
from tasks.job import QuantizationJob

if TYPE_CHECKING:
    from tasks.report import Report


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add these commands to the parser."""
    demo = commands.add_parser("demo", help="quantize a small model, with nothing but this package and pip")
    demo.add_argument("--layers", type=int, metavar="N", help="keep the first N layers of the model only")
    demo.add_argument("--model", metavar="DIR", help="a model of yours instead of the one that pip can fetch")
    demo.add_argument(
        "--directory",
        metavar="DIR",
        default="prefect-quantize-demo",
        help="where the checkpoint and the result are put (default ./prefect-quantize-demo)",
    )
    _add_output_options(demo)
    demo.set_defaults(command=_demo)

    run = commands.add_parser("run", help="quantize a model; the same command again goes on where it was stopped")
    add_job_arguments(run)
    run.add_argument(
        "--deadline",
        metavar="WHEN",
        help="stop after the last layer that ends before it, with exit code 75: 06:00, '06:00 Europe/Berlin', 8h, 90m",
    )
    _add_output_options(run)
    run.set_defaults(command=_run)

    plan = commands.add_parser("plan", help="check a job and show what it would do; nothing is written")
    add_job_arguments(plan)
    _add_output_options(plan)
    plan.set_defaults(command=_plan)


def quantize(job: QuantizationJob, *, verbose: bool, deadline: str | None = None) -> "Report":
    """Run the flow on this job with its progress on stderr, on the configured Prefect server or one of our own."""
    from flows.console import run_shown
    from flows.embedded_server import embedded_server

    # torch and transformers take as long to import as the server takes to start.
    with (
        embedded_server(while_starting=lambda: importlib.import_module("flows.quantize_model")),
        run_shown(verbose=verbose),
    ):
        from flows.quantize_model import quantize_model

        return quantize_model(job, deadline=deadline)


def _add_output_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else, on stdout")
    parser.add_argument("--verbose", action="store_true", help="show Prefect's log, and the traceback of an error")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.deadline is not None:
        checked(arguments.deadline)
    report = quantize(job_from(arguments), verbose=arguments.verbose, deadline=arguments.deadline)
    print(report.model_dump_json(indent=2) if arguments.json else summary(report))
    return 0


def summary(report: "Report") -> str:
    """The report in the few lines that a person reads."""
    made = sum(receipt.size for receipt in report.layers)
    resumed = f", {report.resumed_from} of them by earlier runs" if report.resumed_from else ""
    verb = "Quantized" if report.status == "done" else "Already there and verified:"
    return "\n".join(
        (
            f"{verb} {len(report.layers)} layers{resumed}: {made / 1e6:.1f} MB, mean loss {report.loss:.4g}, "
            f"{report.fallbacks} fallbacks, {report.seconds:.0f} s",
            f"  model       {report.output}",
            f"  checkpoint  {report.checkpoint}  (may be removed now)",
        )
    )


def _plan(arguments: argparse.Namespace) -> int:
    from tasks.preflight import check

    plan = check(job_from(arguments), trial=True)
    print(json.dumps(plan.as_json(), indent=2) if arguments.json else plan.table())
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from flows import demo

    model = Path(arguments.model) if arguments.model else None
    result = demo.run(
        Path(arguments.directory),
        model=model,
        layers=arguments.layers,
        verbose=arguments.verbose,
        say=lambda text: print(text, file=sys.stderr if arguments.json else sys.stdout, flush=True),
    )
    if arguments.json:
        print(json.dumps(result, indent=2))
    return 0
