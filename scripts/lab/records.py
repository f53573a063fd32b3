"""Records (dataclasses) as the plain values of JSON, and back, with all types checked.

A record rejects values that cannot be right, such as a negative count, in its own `__post_init__`.

A field may be a text, an integer, a float, a bool, a Literal, a device or a dtype of torch, another record, `X | None`,
a union of records that differ in a field `kind`, a tuple[X, ...] or a dict[str, X].
"""

import dataclasses
import reprlib
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch

Record = TypeVar("Record")
# Python's integers are unlimited, and those of a damaged file may be too large for a float.
_LARGEST_INTEGER = 2**64
_NAMES = {str: "a text", int: "an integer", bool: "true or false"}


def to_plain(value: Any) -> Any:
    """Return a record as dicts, lists, texts and numbers, ready for JSON."""
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


def from_plain(kind: type[Record], value: Any, where: str = "") -> Record:
    """Return what `to_plain` was given, with all types checked.

    Args:
        kind: a dataclass.
        value: a dict with a key for each field; other keys are ignored.
        where: the path to the value, for messages.

    Raises:
        ValueError: A key is missing, a value has another type, or a record rejects its values.
    """
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object", value)
    annotations = typing.get_type_hints(kind)
    values = {}
    for each in dataclasses.fields(kind):  # type: ignore[arg-type]
        path = f"{where}.{each.name}" if where else each.name
        if each.name not in value:
            raise ValueError(f"{path} is missing")
        values[each.name] = _read(annotations[each.name], value[each.name], path)
    try:
        return kind(**values)
    except ValueError as error:
        message = f"{where}: {error}" if where else str(error)
        raise ValueError(message) from None


def require_at_least(least: float, **values: float | None) -> None:
    """Raise a ValueError for a value below `least`. None, which is not measured, is right."""
    for name, value in values.items():
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")


def _read(annotation: Any, value: Any, where: str) -> Any:
    """Return a value as the annotation of its field describes it; raise a ValueError if it is something else."""
    origin = typing.get_origin(annotation)
    arguments = typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        return from_plain(typing.cast(type, annotation), value, where)
    if origin in (typing.Union, types.UnionType):
        return _read_one_of(arguments, value, where)
    if origin is Literal:
        return _read_literal(arguments, value, where)
    if origin is tuple:
        # tuple[X, ...]
        return _read_tuple(arguments[0], value, where)
    if origin is dict:
        # dict[str, X]
        return _read_dict(arguments[1], value, where)
    return _read_plain(annotation, value, where)


def _read_literal(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    if value not in choices:
        raise _wrong(where, f"one of {', '.join(choices)}", value)
    return value


def _read_tuple(annotation: Any, value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    items = []
    for index, item in enumerate(value):
        items.append(_read(annotation, item, f"{where}[{index}]"))
    return tuple(items)


def _read_dict(annotation: Any, value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _wrong(where, "an object", value)
    return {
        key: _read(annotation, item, f"{where}.{key}") for key, item in value.items()
    }


def _read_one_of(annotations: tuple[Any, ...], value: Any, where: str) -> Any:
    """Return a value that may be null, or one of several records, which differ in their `kind`."""
    if value is None and type(None) in annotations:
        return None
    choices = [each for each in annotations if each is not type(None)]
    if len(choices) == 1:
        return _read(choices[0], value, where)
    kinds = {choice.kind: choice for choice in choices}
    found = value.get("kind") if isinstance(value, Mapping) else None
    # Not `found in kinds`: a list has no hash.
    if found not in list(kinds):
        raise _wrong(f"{where}.kind", f"one of {', '.join(kinds)}", found)
    return _read(kinds[found], value, where)


def _read_plain(annotation: Any, value: Any, where: str) -> Any:
    """Return a text, a number, a bool, a device or a dtype."""
    if annotation is torch.device:
        return _read_device(_read_plain(str, value, where), where)
    if annotation is torch.dtype:
        return _read_dtype(_read_plain(str, value, where), where)
    if annotation is float:
        return _read_float(value, where)
    # Python's bool is an int, but no integer of a record may be one.
    is_other_bool = isinstance(value, bool) and annotation is not bool
    if is_other_bool or not isinstance(value, annotation):
        raise _wrong(where, _NAMES[annotation], value)
    if annotation is int and abs(value) >= _LARGEST_INTEGER:
        raise _wrong(where, "an integer below 2**64", value)
    return value


def _read_device(name: str, where: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise _wrong(where, "a device of torch", name) from None


def _read_dtype(name: str, where: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise _wrong(where, "a dtype of torch", name)
    return dtype


def _read_float(value: Any, where: str) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # math.isfinite raises an OverflowError for an integer that is too large for a float.
    if not is_number or not abs(value) <= sys.float_info.max:
        raise _wrong(where, "a finite number", value)
    return float(value)


def _wrong(where: str, expected: str, value: Any) -> ValueError:
    # reprlib cuts what is long or nested deeply.
    return ValueError(f"{where or 'it'} must be {expected}, got {reprlib.repr(value)}")
