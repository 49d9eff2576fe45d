"""The whole job as one flow: check, identify, open the checkpoint, quantize layer by layer, publish, export, report.

Only the published generation says how far a job is. Prefect's database may say anything: finished layers are called like
the others and show as Cached, because their records come from the checkpoint.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, Literal

from prefect import Flow, get_run_logger
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.exceptions import Abort, Pause
from prefect.runtime import flow_run as flow_run_runtime
from prefect.task_runners import ThreadPoolTaskRunner

from checkpoint_store.errors import CheckpointDamaged, CheckpointError, CheckpointStopped, StoreLocked
from checkpoint_store.result_storage import GenerationStorage
from checkpoint_store.session import ADAPTER, LAYER, CheckpointSession
from checkpoint_store.tensors import continuation_batches
from flows import brought_back, stopping
from flows.deadline import Deadline, DeadlineText
from flows.deployed_paths import refuse_paths_into_nowhere
from flows.embedded_server import embedded_server
from flows.layers_at_once import LayersAtOnce
from flows.stopping import StopRequest
from tasks import calibration, hidden_states, identity, output_directory, preflight, running, telemetry
from tasks.allocator import give_large_blocks_back
from tasks.artifacts import Artifacts
from tasks.devices import DeviceBusy, DevicePool
from tasks.export import export_model, outer_names
from tasks.job import QuantizationJob, absolute_path, checkpoint_root
from tasks.models.replay import check_replay
from tasks.models.source import SourceModel
from tasks.models.tensor_check import refuse_not_finite
from tasks.quantize_layer import cache_key, quantize_layer
from tasks.report import LayerReceipt, Report
from tasks.schemes import decoder_of, needs_activations
from tasks.time_estimate import Trial

# Bounds the devices of one pool. Threads are made as they are needed: one for each shard, and for each layer in work.
MAX_DEVICES = 64


class OwnServerFlow(Flow[Any, Any]):
    """A flow that starts Prefect's server beside it when it is called where none is configured."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with embedded_server():
            return super().__call__(*args, **kwargs)


def own_server_flow(**options: Any) -> Callable[[Callable[..., Any]], OwnServerFlow]:
    return lambda function: OwnServerFlow(function, **options)


def _run_name() -> str:
    job = flow_run_runtime.parameters["job"]
    model, quantization = (
        (job["model"], job["quantization"]) if isinstance(job, dict) else (job.model, job.quantization)
    )
    method = quantization.get("method", "gptq") if isinstance(quantization, dict) else quantization.method
    return f"{absolute_path(model).name} {method}"


@own_server_flow(
    name="quantize-model",
    flow_run_name=_run_name,
    retries=0,
    persist_result=False,
    task_runner=ThreadPoolTaskRunner(max_workers=2 * MAX_DEVICES),
)
def quantize_model(job: QuantizationJob, deadline: DeadlineText | None = None) -> Report:
    """Quantize a model layer by layer, publishing progress that survives a kill at any instant; run again to go on.

    SIGINT and SIGTERM finish what is in work, publish it and raise `CheckpointStopped`; so does the last layer that
    ends before the `deadline`.

    Args:
        job: The model to quantize, how, and where the result and the progress are put.
        deadline: When to stop after a layer: a time of day (`06:00`, `06:00 Europe/Berlin`) or a duration (`8h`, `90m`).
            A deployed run goes on when its schedule opens the next window, or a day after its start.
    """
    stopping.refuse_off_main_thread()
    give_large_blocks_back()
    logger = get_run_logger()
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    start, until = datetime.now(UTC), None
    if flow_run is not None and stopping.is_deployed(flow_run):
        brought_back.leave_if_it_was_no_crash(flow_run)
        stopping.outlive_a_lost_slot()
        start = stopping.scheduled_start(flow_run)
    if deadline is not None:
        until = Deadline.after(deadline, start)
    with (
        stopping.suspension_at_boundaries() as suspended,
        StopRequest(logger, _how_far, until, suspended) as stop,
        _failure_told(job, logger),
    ):
        if until is not None:  # told when signals are taken, and not before
            at = until.at.isoformat(" ", "minutes")
            logger.info("deadline %s: no layer that would end after %s is begun", until.text, at)
        if stopping.is_deployed(flow_run):
            refuse_paths_into_nowhere(job)
        return _Quantization(job, logger, stop, flow_run).go()


@contextmanager
def _failure_told(job: QuantizationJob, logger: telemetry.Logger) -> Iterator[None]:
    """An event for any error that leaves the run; a stop that was asked for is none."""
    try:
        yield
    except (CheckpointStopped, Abort, Pause):
        raise
    except BaseException as error:
        try:
            root = checkpoint_root(job)
        except ValueError:  # refused, which may be the very error
            root = absolute_path(job.output)
        telemetry.failed(logger, root, error, device=job.telemetry.device)
        raise


def _how_far() -> str:
    try:
        run = running.current()
    except RuntimeError:
        return "the preparations; no layer is in work"
    left = run.seconds_left()
    estimate = f", about {left:.0f} s to the end of the last" if left is not None else ""
    first, *others = run.layers_in_work
    layers = f"layers {first + 1} to {others[-1] + 1}" if others else f"layer {first + 1}"
    return f"{layers} of {run.decoder.step_count}{estimate}"


class _Quantization:
    """One call of the flow, step by step."""

    def __init__(
        self,
        job: QuantizationJob,
        logger: logging.Logger | logging.LoggerAdapter[Any],
        stop: StopRequest,
        flow_run: FlowRun | None,
    ) -> None:
        self.job, self.logger, self.stop, self.flow_run = job, logger, stop, flow_run
        self.started = time.monotonic()
        self.published = 0  # finished layers in the newest generation
        self.root = checkpoint_root(job)
        self.output = absolute_path(job.output)

    def go(self) -> Report:
        job = self.job
        plan = preflight.check(job)
        source = SourceModel.open(job.model)
        decoder = decoder_of(job.quantization, source)
        pool = DevicePool.resolve(job.devices)
        if len(pool.devices) > MAX_DEVICES:
            raise ValueError(f"{len(pool.devices)} devices are asked for; a pool holds at most {MAX_DEVICES}")
        with self._held(pool):
            samples = None
            if needs_activations(job.quantization):
                assert job.calibration is not None  # preflight has seen to it
                samples = calibration.prepare(job.calibration, source.path, seed=job.seed)
            finished = output_directory.read_report(self.output)
            # A finished export stands for itself, whatever has become of the checkpoint since.
            cpu_threads = (
                identity.cpu_threads(self.root) if finished is None else identity.adopted_cpu_threads(None, finished)
            )
            described = identity.build(job, source, decoder, samples, pool, cpu_threads)
            digest = identity.digest(identity.portable(described))
            if finished is not None:
                return self._verified(finished, digest)
            self._refuse_foreign_files()
            self._stop_if_asked(None)
            with self._open_session(described, decoder.step_count) as session:
                run = running.Run(
                    job=job, logger=self.logger, root=self.root, output=self.output,
                    model_name=absolute_path(job.model).name, source=source, decoder=decoder, pool=pool, calibration=samples,
                    identity_digest=digest, cpu_threads=cpu_threads, session=session, started=self.started,
                    resumed_from=session.cursor or None, spills=plan.spills,
                    most_layers_at_once=min(plan.memory.layers_at_once, max(1, decoder.step_count - session.cursor)),
                )  # fmt: skip
                with running.opened(run), self._artifacts(run) as artifacts:
                    self._tell_time(run, plan.layers_after // plan.layer_count)
                    self._quantize(run, artifacts)
                    report = export_model(run.model_name)
                    artifacts.show(run.receipts, decoder.step_count, None, report)
                    return report

    def _artifacts(self, run: running.Run) -> Artifacts:
        assert self.flow_run is not None  # nothing but a call of the flow comes here
        method = self.job.quantization.method
        return Artifacts(self.logger, self.flow_run.id, run.model_name, method, run.identity_digest)

    @contextmanager
    def _held(self, pool: DevicePool) -> Iterator[None]:
        """The devices, for this run alone; a deployed run comes back when they may be free."""
        with ExitStack() as held:
            try:
                run = self.flow_run
                held.enter_context(pool.lock(f"flow run {run.id} (`{run.name}`)" if run is not None else "a run"))
            except DeviceBusy as error:
                self._reject(error, "Device")
                raise
            yield

    def _reject(self, error: Exception, waits_for: Literal["Root", "Device"] | None) -> None:
        """Tell that the run can't start, and why; a deployed run that only has to wait is scheduled anew."""
        reason = {"reason": type(error).__name__, "message": str(error)}
        telemetry.emit(self.logger, self.root, "rejected", reason)
        if waits_for is not None and self.flow_run is not None and stopping.is_deployed(self.flow_run):
            self.logger.warning("%s", error)
            stopping.wait_for(self.flow_run, waits_for, str(error))

    def _open_session(self, described: dict[str, Any], layer_count: int) -> CheckpointSession:
        """The checkpoint, its identity compared and its newest whole generation pinned, before anything is computed."""
        job, run = self.job, self.flow_run
        try:
            return CheckpointSession.open(
                self.root,
                job.checkpoint,
                described,
                layer_count=layer_count,
                layer_roles=(LAYER,) if job.adapter is None else (LAYER, ADAPTER),
                run_id=str(run.id) if run is not None else None,
                # A retry, from the UI or after a crash, comes back as the same flow run.
                is_retry=run is not None and run.run_count > 1,
                ignore=None if job.checkpoint.strict_device_check else identity.is_physical,
                on_event=telemetry.listener(self.logger, self.root, device=job.telemetry.device),
            )
        except CheckpointError as error:
            self._reject(error, "Root" if isinstance(error, StoreLocked) else None)
            raise

    def _verified(self, finished: dict[str, Any], digest: str) -> Report:
        """The report of an export that this very job has finished before; ValueError when it is another's or damaged."""
        if finished["identity"] != digest:
            raise ValueError(
                f"output {self.output} holds the finished export of another job (identity {finished['identity'][:12]}, "
                f"this job {digest[:12]}); name another output, or move that one away"
            )
        problems = output_directory.damage(self.output, finished)
        if problems:
            raise ValueError(
                f"output {self.output} holds this job's finished export, but it was changed since: {'; '.join(problems)}; "
                f"move the directory away and run again: what is published at {self.root} is not quantized again"
            )
        self.logger.info("output %s holds this job's finished export; every file is as it was written", self.output)
        about = {**finished, "status": "verified", "output": str(self.output), "checkpoint": str(self.root)}
        return Report.model_validate(about)

    def _refuse_foreign_files(self) -> None:
        names = output_directory.foreign_names(self.output)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"output {self.output} is not empty ({', '.join(f'`{name}`' for name in names[:3])}{more}) and holds no "
                f"finished export; name another directory, or move these files away"
            )

    # The layers -------------------------------------------------------------------------------------------------------

    def _quantize(self, run: running.Run, artifacts: Artifacts) -> None:
        """Every layer in order: the finished ones from their records, the others computed and published."""
        layer_count, cursor = run.decoder.step_count, run.session.cursor
        self.published = cursor
        # Before the first layer: the export would meet it after the last.
        refuse_not_finite(run.source, outer_names(run))
        storage = GenerationStorage(root=str(self.root))
        storage.save(f"checkpoint-{hashlib.sha256(str(self.root).encode()).hexdigest()[:16]}", overwrite=True)
        layer_task = quantize_layer.with_options(result_storage=storage)
        if cursor:
            self.logger.info("%d of %d layers are finished at %s", cursor, layer_count, self.root)
        pinned = {role: {ref.key: ref.sha256 for ref in run.session.layer_objects(role)} for role in (LAYER, ADAPTER)}
        model, method = run.model_name, self.job.quantization.method

        def arguments(index: int) -> dict[str, Any]:
            key, name = cache_key(run.identity_digest, index), run.decoder.layer_name(index)
            return {"model": model, "method": method, "name": name, "layer": index, "key": key}

        # Kept: Prefect knows results by their id(), and would draw arrows between layers when one is used again.
        records = []
        for index in range(cursor):
            records.append(layer_task(**arguments(index)))
            receipt = LayerReceipt.model_validate(records[-1])
            run.receipts.append(receipt)
            self._check_pinned(pinned, receipt)
        if cursor < layer_count:
            artifacts.show(run.receipts, layer_count, None)
            self._look_at_the_clock(run)
            self._stop_if_asked(run)
            self._prepare(run)
            self._stop_if_asked(run)
        with LayersAtOnce(run, layer_task, arguments, lambda: self.stop.requested) as layers:
            for record in layers:
                records.append(record)
                receipt = LayerReceipt.model_validate(record)
                run.receipts.append(receipt)
                self._log(receipt, layer_count)
                artifacts.show(run.receipts, layer_count, run.seconds_left())
                self._look_at_the_clock(run)
                if run.session.is_due(len(run.receipts)) or self.stop.requested:  # others may be at work for long
                    self._publish(run)
                if not layers.in_work:
                    self._stop_if_asked(run)
        run.session.drain()  # the export takes what is published

    def _tell_time(self, run: running.Run, layer_bytes_after: int) -> None:
        """How long the unfinished layers will take, by a trial on the devices of the run."""
        if not self.job.time_estimate or run.session.cursor == run.decoder.step_count:
            return
        batches = run.calibration.batches if run.calibration is not None else ()
        trial = Trial(
            run.decoder, run.scheme, run.pool,
            tokens=sum(batch.input_ids.numel() for batch in batches),
            batch_tokens=max((batch.input_ids.numel() for batch in batches), default=0),
            length=max((batch.input_ids.shape[1] for batch in batches), default=0),
            rewinds=run.spills, layer_bytes_after=layer_bytes_after,
        )  # fmt: skip
        try:
            estimate = trial.estimate(run.cpu_threads)
        except Exception as error:  # whatever a trial meets, the run itself may do without it
            self.logger.warning(
                "how long it takes can't be told, the trial failed: %s (%s)", error, type(error).__name__
            )
            return
        self.logger.info("%s, by a trial of %.1f s", estimate.told(run.session.cursor), estimate.trial_seconds)

    def _prepare(self, run: running.Run) -> None:
        """The hidden states that enter the first unfinished layer: embedded anew, or as the checkpoint holds them."""
        if not run.needs_activations:  # no layer is ever run
            return
        check_replay(run.decoder, run.pool.devices[0].torch_device)
        assert run.calibration is not None
        if run.session.cursor:
            restored = continuation_batches(run.session.continuation())
            expected = run.streams * len(run.calibration.batches)
            if len(restored) != expected:
                raise CheckpointDamaged(
                    f"the continuation at {self.root} holds {len(restored)} batches, this job has "
                    f"{expected}: the identity should have told them apart; use a new checkpoint path"
                )
            run.hidden = [run.held(restored.pop(0)) for _ in range(expected)]
            run.hidden_is_restored = True
            kind = "restoration"
        else:
            run.hidden = [
                run.held(run.decoder.embed(batch.input_ids)) for batch in run.calibration.batches
            ] * run.streams
            kind = "capture"
        run.decoder.release()
        telemetry.tensors(self.logger, kind, run.hidden, device=self.job.telemetry.device)

    def _check_pinned(self, pinned: dict[str, dict[str, str]], receipt: LayerReceipt) -> None:
        """The record that Prefect answered with must speak of the object that the generation holds."""
        for role, sha256 in ((LAYER, receipt.sha256), (ADAPTER, receipt.adapter_sha256)):
            held = pinned[role].get(receipt.name)
            if held != sha256:
                raise CheckpointDamaged(
                    f"the record of `{receipt.name}` names {role} object {str(sha256)[:12]}, the generation at {self.root} "
                    f"holds {str(held)[:12]}; run `prefect-quantize verify {self.root}`"
                )

    def _publish(self, run: running.Run) -> None:
        """Publish every finished layer while the next one is computed; the session checks that nothing is missing."""
        finished, layer_count = len(run.receipts), run.decoder.step_count
        run.session.publish(
            finished,
            [receipt.name for receipt in run.receipts],
            [receipt.key for receipt in run.receipts],
            hidden_states.payloads(run.hidden) if finished < layer_count else [],
        )
        self.published = finished

    def _look_at_the_clock(self, run: running.Run) -> None:
        """Whether the next layer fits before the deadline, judged by the slowest of the last ones."""
        if len(run.receipts) < run.decoder.step_count:
            self.stop.look_at_the_clock(max((receipt.seconds for receipt in run.receipts[-4:]), default=None))

    def _stop_if_asked(self, run: running.Run | None) -> None:
        """End the run here when a stop was asked for, with every finished layer published whatever the interval.

        The last layer's publication lets the export follow.
        """
        if not self.stop.requested:
            return
        # Here and not at the interval: a signal may come at any moment, also after that was looked at.
        if run is not None and len(run.receipts) > self.published:
            self._publish(run)
        if run is not None:
            run.session.drain()
        if run is None or not (run.receipts or run.session.cursor):
            how_far = "before the first layer; this run published nothing"
        elif len(run.receipts) == run.decoder.step_count:
            self.logger.info("%s came after the last layer was published: the export follows", self.stop.name)
            return
        else:
            how_far = f"with {len(run.receipts)} of {run.decoder.step_count} layers published"
        message = f"{self.stop.name}: stopped {how_far} at {self.root}; run the same job again to go on"
        telemetry.emit(self.logger, self.root, "stopped", {"message": message})
        stopping.end(self.flow_run, message, self.stop)

    def _log(self, receipt: LayerReceipt, layer_count: int) -> None:
        self.logger.info(
            "layer %d of %d: loss %.3e, %.1f s, %.2f MB, %s",
            receipt.index + 1, layer_count, receipt.loss, receipt.seconds, receipt.size / 1e6, receipt.sha256[:12],
        )  # fmt: skip
        for line in receipt.fallback_lines():
            self.logger.warning("%s", line)
