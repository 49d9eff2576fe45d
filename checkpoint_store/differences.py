"""Which leaves of two identities differ, told with both values."""

import json
from collections.abc import Callable
from typing import Any

from checkpoint_store.canonical import canonical

_VALUE_CHARACTERS_MOST = 200
_ABSENT = object()


def differences(expected: Any, actual: Any, ignore: Callable[[tuple[str, ...]], bool] | None = None) -> list[str]:
    """One line `area.leaf: checkpoint X, this run Y` for every leaf in which `actual` is not the checkpoint's value.

    Values are compared as the JSON that a manifest holds: a tuple equals a list, 1 does not equal 1.0 or true. `ignore`
    is asked with the path of each differing leaf.
    """
    return list(_differences(_plain(expected), _plain(actual), (), ignore or (lambda _: False)))


def _plain(value: Any) -> Any:
    return json.loads(canonical(value))


def _differences(
    expected: Any, actual: Any, path: tuple[str, ...], ignore: Callable[[tuple[str, ...]], bool]
) -> list[str]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        pairs = [
            (key, expected.get(key, _ABSENT), actual.get(key, _ABSENT))
            for key in sorted(expected.keys() | actual.keys())
        ]
    elif isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        pairs = [(str(index), *both) for index, both in enumerate(zip(expected, actual, strict=True))]
    elif _is_same(expected, actual) or ignore(path):
        return []
    else:
        return [f"{'.'.join(path)}: checkpoint {_shown(expected)}, this run {_shown(actual)}"]
    return [line for key, one, other in pairs for line in _differences(one, other, (*path, key), ignore)]


def _is_same(expected: Any, actual: Any) -> bool:
    if expected is _ABSENT or actual is _ABSENT:
        return False
    return canonical(expected) == canonical(actual)


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "has none"
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    if len(text) <= _VALUE_CHARACTERS_MOST:
        return text
    return f"{text[:_VALUE_CHARACTERS_MOST]}... ({len(text)} characters)"
