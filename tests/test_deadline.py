"""When a deadline is, whether a layer fits before it, and when the next window opens."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from checkpoint_store.errors import CheckpointStopped
from flows import cli
from flows.deadline import Deadline, DeadlineText
from flows.quantize_model import quantize_model
from tests.flow_jobs import contents, tiny_job
from tests.tiny_models import write_tiny_llama

TEN_AT_NIGHT = datetime(2026, 7, 1, 20, 0, tzinfo=UTC)  # in Berlin


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("06:00 Europe/Berlin", datetime(2026, 7, 2, 4, 0, tzinfo=UTC)),
        ("23:30 Europe/Berlin", datetime(2026, 7, 1, 21, 30, tzinfo=UTC)),
        ("22:00 Europe/Berlin", datetime(2026, 7, 2, 20, 0, tzinfo=UTC)),
        ("06:00 UTC", datetime(2026, 7, 2, 6, 0, tzinfo=UTC)),
        ("8h", datetime(2026, 7, 2, 4, 0, tzinfo=UTC)),
        ("90m", datetime(2026, 7, 1, 21, 30, tzinfo=UTC)),
        ("1h30m10s", datetime(2026, 7, 1, 21, 30, 10, tzinfo=UTC)),
    ],
)
def test_a_deadline_is_the_first_such_time_after_the_start(text: str, at: datetime) -> None:
    deadline = Deadline.after(text, TEN_AT_NIGHT)
    assert deadline.at == at
    assert deadline.fits(None, at - timedelta(seconds=1)) and not deadline.fits(None, at)
    assert deadline.fits(59, at - timedelta(minutes=1)) and not deadline.fits(60, at - timedelta(minutes=1))


def test_the_time_of_day_stays_when_the_clocks_change_overnight() -> None:
    start = datetime(2026, 10, 24, 20, 0, tzinfo=UTC)  # summer time ends at three in the morning
    assert Deadline.after("06:00 Europe/Berlin", start).at == datetime(2026, 10, 25, 5, 0, tzinfo=UTC)


def test_a_run_that_had_to_wait_until_the_morning_has_missed_its_window() -> None:
    deadline = Deadline.after("06:00 Europe/Berlin", TEN_AT_NIGHT)
    late = datetime(2026, 7, 2, 5, 0, tzinfo=UTC)
    assert not deadline.fits(None, late)
    assert deadline.next_start(late) == TEN_AT_NIGHT + timedelta(days=1)
    assert deadline.next_start(late + timedelta(days=3)) == TEN_AT_NIGHT + timedelta(days=4)


@pytest.mark.parametrize("text", ["", "6", "25:00", "06:00 Mars/Olympus", "soon", "-8h", "0m", "06:00 ../etc/passwd"])
def test_what_is_no_deadline_is_refused_with_the_ways_to_write_one(text: str) -> None:
    with pytest.raises(ValidationError, match="deadline `"):
        TypeAdapter(DeadlineText).validate_python(text)


def test_the_command_line_refuses_a_deadline_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "model", "--output", "output", "--deadline", "at dawn"]) == 2
    assert "deadline `at dawn` is not understood" in capsys.readouterr().err


def test_a_plain_run_at_its_deadline_publishes_and_raises_checkpoint_stopped_and_the_next_goes_on(
    tmp_path: Path, prefect_server: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_tiny_llama(tmp_path / "model", layers=3)
    whole = tiny_job(model, tmp_path / "whole")
    quantize_model(whole)
    job = tiny_job(model, tmp_path / "stopped", interval="layer:100")
    asked: list[float | None] = []

    def fits(self: Deadline, seconds: float | None) -> bool:
        asked.append(seconds)
        return len(asked) < 2

    with monkeypatch.context() as clock:
        clock.setattr(Deadline, "fits", fits)
        with pytest.raises(CheckpointStopped, match="deadline 8h: stopped with 1 of 3 layers published"):
            quantize_model(job, deadline="8h")
    assert asked[0] is None and asked[1] is not None and asked[1] > 0, "the layers so far tell how long one takes"
    assert quantize_model(job, deadline="8h").resumed_from == 1
    assert contents(job.output) == contents(whole.output)
