# SPDX-License-Identifier: Apache-2.0
"""Attention with learned sinks, in flash-attention's argument order."""

import sys

if sys.argv[:1] == ["-m"] and sys.orig_argv[-3:] == ["-m", "sinkattn", "doctor"]:
    from .doctor import stop_where_the_import_would_fail as _stop

    _stop()

import torch

from . import _C

_binding = _C.binding_for(torch.__version__)
try:
    torch.ops.load_library(str(_binding))  # type: ignore[no-untyped-call]
except OSError as _error:
    raise ImportError(f"sinkattn's operators do not load under torch {torch.__version__} ({_error})") from _error

from .check import check, check_errors, plan, variants, visible_pairs  # noqa: E402
from .ops import (  # noqa: E402
    apply_sink,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_attn_states,
)

__version__ = _C.version
__all__ = [
    "apply_sink",
    "check",
    "check_errors",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_attn_states",
    "plan",
    "variants",
    "visible_pairs",
]
