# SPDX-License-Identifier: Apache-2.0
"""How the Python functions call an operator: once, and what torch itself refuses is looked at afterwards.

Checks that torch makes at every call are not repeated in front of it: the good path has none of them.
"""

import re
from typing import Any

import torch
from torch import Tensor

from . import transforms

RULES = {
    "Tensor": "a torch.Tensor",
    "Optional[Tensor]": "a torch.Tensor or None",
    "int": "an integer",
    "Optional[int]": "an integer or None",
    "Optional[float]": "a number or None",
    "bool": "True or False",
}
"""What a value must be, by the type that torch names in its message."""


def shown(value: object) -> str:
    """A value as messages show it: short ones as they are, of others the type."""
    plain = value is None or isinstance(value, (bool, int, float, complex, str))
    text = repr(value)
    return text if plain and len(text) <= 40 else f"of type {type(value).__module__}.{type(value).__qualname__}"


def _explained(error: RuntimeError, named: dict[str, Any]) -> Exception:
    mismatch = re.search(r"Expected a value of type '(.+)' for argument '(\w+)'", str(error))
    if mismatch and mismatch[2] in named:
        value, rule = named[mismatch[2]], RULES.get(mismatch[1], mismatch[1])
        if isinstance(value, int) and "int" in mismatch[1]:
            return ValueError(f"sinkattn: {mismatch[2]} is {value}; it must fit in 64 bits")
        return TypeError(f"sinkattn: {mismatch[2]} is {shown(value)}; it must be {rule}")
    if str(error).startswith("Could not run"):
        for name, value in named.items():
            if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_quantized or value.is_nested):
                kind = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
                return NotImplementedError(f"sinkattn: {name} is a tensor of another kind, {kind}; it must be strided")
    return error


def call(op: Any, *arguments: Any, **options: Any) -> Any:
    """op(*arguments, **options), under torch.func as well, and TypeError for values that no schema takes."""
    try:
        return op(*arguments, **options)
    except RuntimeError as error:
        if function := transforms.function_for(op, error):
            return function.apply(*arguments)  # type: ignore[no-untyped-call]
        names = (x.name for x in op._schema.arguments)
        found = _explained(error, dict(zip(names, arguments, strict=False)) | options)
        if found is error:
            raise
    raise found
