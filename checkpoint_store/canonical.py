"""JSON as the store's files hold it: equal values have equal bytes, and what is read must have a single meaning."""

import json
import math
import re
from typing import Any

from checkpoint_store.errors import CheckpointDamaged


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, ASCII only, no NaN: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True).encode("ascii")


def parse(raw: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `raw`; CheckpointDamaged for a duplicate key, NaN, infinity, or what is no JSON object."""
    try:
        value = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_without_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"`{what}` is damaged: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointDamaged(f"`{what}` is damaged: it is not a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice in one JSON object")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is too large for a number")
    return number


def typed(value: Any, key: str, kind: type | tuple[type, ...], what: str) -> Any:
    """What stands under `key` in a parsed JSON object; CheckpointDamaged when it is absent or of another type."""
    if not isinstance(value, dict) or not isinstance(found := value.get(key, typed), kind):
        raise CheckpointDamaged(f"`{what}` is damaged: `{key}` is absent or of the wrong type")
    return found


def count(value: Any, key: str, what: str) -> int:
    found = typed(value, key, int, what)
    if isinstance(found, bool) or not 0 <= found < 2**63:
        raise CheckpointDamaged(f"`{what}` is damaged: `{key}` is not a size or a number of things")
    return int(found)


def matching(value: Any, key: str, pattern: re.Pattern[str], what: str) -> str:
    found = typed(value, key, str, what)
    if not pattern.fullmatch(found):
        raise CheckpointDamaged(f"`{what}` is damaged: `{key}` is not a name of this format")
    return str(found)
