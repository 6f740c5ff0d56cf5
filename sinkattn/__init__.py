# SPDX-License-Identifier: Apache-2.0
"""Attention with learned sinks, in flash-attention's argument order."""

from pathlib import Path

import torch

_REBUILD = "rebuild it here: pip install --no-build-isolation --no-deps --force-reinstall <sinkattn's source folder>"

try:
    from . import _C
except ImportError as error:
    _folder = Path(__file__).parent
    if not any(_folder.glob("_C.*.so")):
        raise ImportError(
            f"sinkattn: {_folder} has the sources and no extension; where sinkattn is installed, start Python in"
            " another folder, or build it in place: pip install --no-build-isolation --editable ."
        ) from None
    raise ImportError(
        f"sinkattn's extension does not load under torch {torch.__version__} ({error}); it is compiled for one torch"
        f" release, {_REBUILD}"
    ) from error
if _C.torch_version.split(".")[:2] != torch.__version__.split(".")[:2]:
    raise ImportError(
        f"sinkattn's extension was compiled for torch {_C.torch_version}, this is torch {torch.__version__}; {_REBUILD}"
    )

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
