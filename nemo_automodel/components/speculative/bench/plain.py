# SPDX-License-Identifier: Apache-2.0
"""Plain JSON values -> the frozen dataclasses they were made from (`dataclasses.asdict` is the other direction)."""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Union, get_args, get_origin, get_type_hints


def from_plain(kind: Any, value: Any) -> Any:
    """`value` as a `kind`: dataclasses, tuples of them, optional ones and enums, all by their annotations.

    Keys that the class does not have are passed over, so that a newer file can be read.

    Raises:
        TypeError: a field without a default is missing.
    """
    if value is None:
        return None
    if get_origin(kind) in (Union, types.UnionType):
        return from_plain(next(arg for arg in get_args(kind) if arg is not type(None)), value)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{f.name: from_plain(hints[f.name], value[f.name]) for f in fields(kind) if f.name in value})
    if get_origin(kind) is tuple:
        args = get_args(kind)
        inner = [args[0]] * len(value) if args[-1] is Ellipsis else args
        return tuple(from_plain(one, item) for one, item in zip(inner, value, strict=True))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    return value
