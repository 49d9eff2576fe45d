"""A deadline: until when a run may work, told as a time of day or as a duration, and when a deployed run goes on after it."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Annotated
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import AfterValidator, Field

_TIME_OF_DAY = re.compile(r"([01]?[0-9]|2[0-3]):([0-5][0-9])(?: ([A-Za-z0-9_+\-/]+))?")
_DURATION = re.compile(r"(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?")
DAY = timedelta(days=1)


@dataclass(frozen=True)
class Deadline:
    """The moment after which no layer is worked on, and when the next such window opens."""

    text: str
    at: datetime
    next_window: datetime

    @classmethod
    def after(cls, text: str, start: datetime) -> "Deadline":
        """The first time of day after `start`, or `start` and a duration; `start` is when the run was to begin.

        The scheduled start and not the real one: a run that had to wait until the morning has missed its window, and
        must not take the whole day instead.
        """
        parsed = _parsed(text)
        if isinstance(parsed, timedelta):
            return cls(text, start + parsed, start + max(DAY, parsed))
        at = datetime.combine(start.astimezone(parsed.tzinfo).date(), parsed.replace(tzinfo=None), parsed.tzinfo)
        if parsed.tzinfo is None:
            at = at.astimezone()
        if at <= start:
            # By the calendar, so that the time of day stays when the clocks are changed overnight.
            at = (at.replace(tzinfo=parsed.tzinfo) + DAY).astimezone(parsed.tzinfo)
        return cls(text, at, start + DAY)

    def fits(self, seconds: float | None, now: datetime | None = None) -> bool:
        """Whether a layer of about so many seconds (None: nobody knows) ends before the deadline."""
        return (now or datetime.now(UTC)) + timedelta(seconds=seconds or 0) < self.at

    def next_start(self, now: datetime | None = None) -> datetime:
        """The first opening of the window that is still to come."""
        start, now = self.next_window, now or datetime.now(UTC)
        while start <= now:
            start += DAY
        return start


def _parsed(text: str) -> time | timedelta:
    """A time of day, with a zone or in the machine's; or a duration. ValueError tells how to write them."""
    if found := _TIME_OF_DAY.fullmatch(text):
        hour, minute, zone = found.groups()
        try:
            return time(int(hour), int(minute), tzinfo=ZoneInfo(zone) if zone else None)
        except (ZoneInfoNotFoundError, ValueError, IsADirectoryError):
            raise ValueError(f"deadline `{text}`: no time zone is called `{zone}`; write e.g. Europe/Berlin") from None
    found = _DURATION.fullmatch(text)
    duration = timedelta()
    if found:
        hours, minutes, seconds = (int(part or 0) for part in found.groups())
        duration = timedelta(hours=hours, minutes=minutes, seconds=seconds)
    if not duration:
        raise ValueError(
            f"deadline `{text}` is not understood; write a time of day (06:00, 06:00 Europe/Berlin) or how long the run "
            f"may work (8h, 90m, 1h30m)"
        )
    return duration


def checked(text: str) -> str:
    """`text` when it is a deadline; ValueError tells how to write one."""
    _parsed(text)
    return text


# What a form refuses; `checked` tells why, and knows the time zones.
_PATTERN = f"^(?:{_TIME_OF_DAY.pattern}|(?=.){_DURATION.pattern})$"
DeadlineText = Annotated[str, AfterValidator(checked), Field(json_schema_extra={"pattern": _PATTERN})]
