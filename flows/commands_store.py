"""The operator's commands on a checkpoint root. All only read, but for `sweep`, `recover`, `import-root` and `verify --quarantine`."""

import argparse
import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoint_store import doctor, maintenance, recovery, transfer
from checkpoint_store.errors import CheckpointDamaged, CheckpointMissing, IdentityMismatch

if TYPE_CHECKING:
    from tasks.job import QuantizationJob

EXIT_FAILED = 1


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add these commands to the parser."""
    from flows.job_arguments import add_job_arguments

    status = _command(commands, "status", _status, "what is published, and how much room it takes")
    status.add_argument("root", metavar="ROOT")

    verify = _command(commands, "verify", _verify, "read and hash everything that the published generations need")
    verify.add_argument("root", metavar="ROOT")
    verify.add_argument("--rate", type=float, metavar="MB", help="read at most so many megabytes a second")
    verify.add_argument("--quarantine", action="store_true", help="move damaged files to ROOT/quarantine")
    _add_network(verify)

    sweep = _command(commands, "sweep", _sweep, "remove what no published generation needs")
    sweep.add_argument("root", metavar="ROOT")
    _add_network(sweep)

    diff = _command(commands, "diff", _diff, "what differs between a job and the one that the checkpoint belongs to")
    diff.add_argument("root", metavar="ROOT")
    add_job_arguments(diff, output_required=False)

    examine = _command(
        commands, "doctor", _doctor, "try whether a directory keeps the promises that a checkpoint needs"
    )
    examine.add_argument("directory", metavar="DIR")

    recover = _command(commands, "recover", _recover, "bring back a root whose CURRENT files are both gone")
    recover.add_argument("root", metavar="ROOT")
    recover.add_argument("--manifest", metavar="NAME", help="publish this one; without it the intact ones are listed")
    _add_network(recover)

    export_root = _command(commands, "export-root", _export_root, "copy a root to a new directory, verified")
    export_root.add_argument("root", metavar="ROOT")
    export_root.add_argument("target", metavar="DIR")

    import_root = _command(commands, "import-root", _import_root, "make a root of an exported copy, verified")
    import_root.add_argument("source", metavar="DIR")
    import_root.add_argument("root", metavar="ROOT")
    _add_network(import_root)


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, command: Any, help_text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_text, description=f"{help_text[0].upper()}{help_text[1:]}.")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else, on stdout")
    parser.add_argument("--verbose", action="store_true", help="show the traceback of an error")
    parser.set_defaults(command=command)
    return parser


def _add_network(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--allow-network-filesystem",
        action="store_true",
        help="accept a root on NFS, SMB, Lustre or FUSE, whose locks and syncs may not hold",
    )


def _print(arguments: argparse.Namespace, value: dict[str, Any], lines: list[str]) -> None:
    print(json.dumps(value, indent=2) if arguments.json else "\n".join(lines))


def _status(arguments: argparse.Namespace) -> int:
    found = maintenance.status(arguments.root)
    layers = (
        f"{found['cursor']} of {found['layer_count']} layers finished" if found["generations"] else "nothing published"
    )
    lines = [f"{found['path']}: {layers}"]
    for generation in found["generations"]:
        problem = generation["problem"]
        told = f"generation {generation['gen']}"
        if "cursor" in generation:
            told += (
                f": {generation['cursor']} layers, {generation['objects']} objects, {_megabytes(generation['bytes'])}, "
            )
            told += str(generation["created_utc"])
        lines.append(told + (f"  DAMAGED: {problem}" if problem else ""))
    lines.append(f"published {_counted(found['referenced'])}; on disk {_counted(found['stored'])}")
    if (writer := found["last_writer"]) is not None:
        run = f", flow run {writer['run_id']}" if writer.get("run_id") else ""
        told = f"process {writer.get('pid')} on host {writer.get('host')}, started {writer.get('started_utc')}{run}"
        lines.append(f"last writer: {told}; it may have ended")
    if found["spare_pointer_in_use"]:
        lines.append(f"CURRENT can't be used, CURRENT.prev is: {found['spare_pointer_in_use']}")
    if found["attempts"] or found["quarantined"]:
        lines.append(f"{len(found['attempts'])} attempt directories, {len(found['quarantined'])} files in quarantine")
    for area, value in (found["identity"] or {}).items():
        lines.append(f"  {area}: {_short(value)}")
    _print(arguments, found, lines)
    is_damaged = found["spare_pointer_in_use"] or any(generation["problem"] for generation in found["generations"])
    return CheckpointDamaged.exit_code if is_damaged else 0


def _verify(arguments: argparse.Namespace) -> int:
    rate = None if arguments.rate is None else arguments.rate * 1e6
    report = maintenance.verify(
        arguments.root,
        bytes_per_second=rate,
        quarantine=arguments.quarantine,
        allow_network_filesystem=arguments.allow_network_filesystem,
    )
    what = f"{len(report.generations)} generations, {report.objects} objects, {_megabytes(report.bytes)} read"
    lines = [f"{arguments.root}: {what} in {report.seconds:.1f} s: {'whole' if report.is_whole else 'DAMAGED'}"]
    lines += [f"  {problem}" for problem in report.problems]
    lines += [f"  moved to {name}" for name in report.quarantined]
    _print(arguments, report.as_json(), lines)
    return 0 if report.is_whole else CheckpointDamaged.exit_code


def _sweep(arguments: argparse.Namespace) -> int:
    report = maintenance.sweep(arguments.root, allow_network_filesystem=arguments.allow_network_filesystem)
    removed = f"removed {report.objects} objects, {report.manifests} manifests, {report.attempts} attempts"
    told = f"nothing removed: {report.deferred}" if report.deferred else f"{removed}, {_megabytes(report.bytes)}"
    _print(arguments, report.as_json(), [f"{arguments.root}: {told}"])
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    from checkpoint_store.differences import differences
    from checkpoint_store.session import peek_identity
    from flows.job_arguments import job_from

    arguments.output = arguments.output or f"{arguments.root}.output"  # no part of what is compared
    published = peek_identity(Path(arguments.root))
    if published is None:
        raise CheckpointMissing(f"nothing is published in `{arguments.root}`, so there is nothing to compare with")
    differing = differences(published, _identity_of(job_from(arguments), Path(arguments.root)))
    lines = differing or [f"{arguments.root} belongs to this job: run would resume it"]
    _print(arguments, {"root": arguments.root, "differences": differing}, lines)
    return IdentityMismatch.exit_code if differing else 0


def _identity_of(job: "QuantizationJob", root: Path) -> dict[str, Any]:
    from tasks import calibration, identity
    from tasks.devices import DevicePool
    from tasks.models.decoder import Decoder
    from tasks.models.source import SourceModel
    from tasks.schemes import needs_activations

    source = SourceModel.open(job.model)
    uses_samples = job.calibration is not None and needs_activations(job.quantization)
    samples = (
        calibration.prepare(job.calibration, source.path, seed=job.seed) if uses_samples and job.calibration else None
    )
    pool = DevicePool.resolve(job.devices)
    return identity.build(job, source, Decoder.from_source(source), samples, pool, identity.cpu_threads(root))


def _doctor(arguments: argparse.Namespace) -> int:
    try:
        found = doctor.examine(arguments.directory)
    except CheckpointMissing as error:  # to this command it is a directory like any other
        raise ValueError(
            f"no such directory: `{arguments.directory}`, so that nothing can be tried there; make it with "
            f"`mkdir -p {shlex.quote(arguments.directory)}` and ask again"
        ) from error
    lines = [f"{found.path}: file system type {found.file_system_type}, {found.free_bytes / 1e9:.1f} GB free"]
    for probe in found.probes:
        mark = "yes" if probe.holds else "NO" if probe.required else "no"
        lines.append(f"  {mark:<4}{probe.name}: {probe.promise}" + (f" ({probe.detail})" if probe.detail else ""))
    lines.append("fit for a checkpoint" if found.is_fit else "NOT fit for a checkpoint: use another directory")
    _print(arguments, found.as_json(), lines)
    return 0 if found.is_fit else EXIT_FAILED


def _recover(arguments: argparse.Namespace) -> int:
    if arguments.manifest:
        chosen = recovery.recover(
            arguments.root, arguments.manifest, allow_network_filesystem=arguments.allow_network_filesystem
        )
        told = f"{arguments.root}: generation {chosen.gen} with {chosen.cursor} of {chosen.layer_count} layers is published"
        _print(arguments, chosen.as_json(), [told])
        return 0
    found = recovery.candidates(arguments.root)
    lines = [_candidate(candidate) for candidate in found] or [
        "no legible manifest is left: restore ROOT from a backup"
    ]
    if found:
        lines.append(f"publish one with: prefect-quantize recover {arguments.root} --manifest NAME")
    _print(arguments, {"candidates": [candidate.as_json() for candidate in found]}, lines)
    return 0


def _candidate(candidate: recovery.Candidate) -> str:
    state = f"NOT whole: {candidate.problem}" if candidate.problem else "whole"
    layers = f"{candidate.cursor} of {candidate.layer_count} layers"
    return f"{candidate.manifest}  {layers}, {candidate.created_utc}, {state}"


def _export_root(arguments: argparse.Namespace) -> int:
    return _copied(arguments, arguments.target, transfer.export_root(arguments.root, arguments.target))


def _import_root(arguments: argparse.Namespace) -> int:
    allowed = arguments.allow_network_filesystem
    report = transfer.import_root(arguments.source, arguments.root, allow_network_filesystem=allowed)
    return _copied(arguments, arguments.root, report)


def _copied(arguments: argparse.Namespace, target: str, report: transfer.TransferReport) -> int:
    what = f"{len(report.generations)} generations, {report.objects} objects, {_megabytes(report.bytes)}, verified"
    _print(arguments, report.as_json(), [f"{target}: {what}", *(f"  left out: {reason}" for reason in report.left_out)])
    return CheckpointDamaged.exit_code if report.left_out else 0  # the copy is whole, what it was made of is not


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _counted(found: dict[str, int]) -> str:
    return f"{found['objects']} objects, {_megabytes(found['bytes'])}"


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= 160 else f"{text[:160]}... (--json shows all)"
