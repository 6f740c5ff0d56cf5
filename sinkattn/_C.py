# SPDX-License-Identifier: Apache-2.0
"""libsinkattn by ctypes: the planner, the variant table, devices and build facts. torch is not needed here.

The operators are another library's, of which sinkattn/_lib has one for each torch release: `binding_for` finds it, and
`import sinkattn` loads it.
"""

import ctypes
import operator
from collections.abc import Mapping
from ctypes import c_bool, c_char, c_char_p, c_double, c_int, c_int32, c_int64, c_uint32
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "_lib"

_OPS = {"fwd": 0, "bwd": 1, "decode": 2}
_DTYPES = {"bf16": 1, "fp16": 2, "fp32": 3, "fp64": 4}
_BACKENDS = {"cpu": 0, "cuda": 1}
_ERRORS = {1: ValueError, 2: NotImplementedError, 3: RuntimeError}


# sinkattn.h's structs, field by field; tests/test_build.py compares their layouts with a C compiler's.


class _Status(ctypes.Structure):
    _fields_ = (("code", c_int), ("message", c_char * 508))


class _Mask(ctypes.Structure):
    _fields_ = (
        *(("has_left", c_bool), ("has_right", c_bool)),
        *(("left", c_int64), ("right", c_int64), ("num_sink_tokens", c_int64)),
    )


class _Problem(ctypes.Structure):
    _fields_ = (
        *(("op", c_int), ("dtype", c_int), ("s_aux_dtype", c_int), ("packed", c_bool), ("batch", c_int64)),
        *(("num_q_heads", c_int64), ("num_kv_heads", c_int64), ("head_dim", c_int64)),
        *(("q_len", c_int64), ("k_len", c_int64)),
        *(("page_size", c_int64), ("num_pages", c_int64), ("softmax_scale", c_double), ("mask", _Mask)),
        *(("num_splits", c_int64), ("invariant", c_bool), ("extras", c_bool), ("head_dim_v", c_int32)),
    )


class _Device(ctypes.Structure):
    _fields_ = (("backend", c_int), ("arch", c_int32), ("workers", c_int32), ("name", c_char * 64))


class _VariantInfo(ctypes.Structure):
    _fields_ = (
        *(("name", c_char_p), ("op", c_int), ("backend", c_int), ("arch", c_int32), ("dtypes", c_uint32)),
        *(("max_head_dim", c_int64), ("tile_q", c_int64), ("tile_k", c_int64), ("compiled", c_bool)),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        *(("variant", c_int32), ("workers", c_int32), ("num_splits", c_int64), ("num_items", c_int64)),
        *(("workspace_bytes", c_int64), ("reason", c_char * 640)),
    )


STRUCTS = {
    "sinkattn_status": _Status,
    "sinkattn_mask": _Mask,
    "sinkattn_problem": _Problem,
    "sinkattn_device": _Device,
    "sinkattn_variant_info": _VariantInfo,
    "sinkattn_plan": _Plan,
}


def _load() -> ctypes.CDLL:
    found = sorted(FOLDER.glob("libsinkattn.so.*"))
    if not found:
        raise ImportError(
            f"sinkattn: {FOLDER.parent} has the sources and no library; where sinkattn is installed, start Python in"
            " another folder, or build it in place: pip install --no-build-isolation --editable ."
        )
    library = ctypes.CDLL(str(found[-1]))
    pointer = ctypes.POINTER
    for name, result, *arguments in (
        ("query_cpu", _Status, c_int32, pointer(_Device)),
        ("query_cuda", _Status, c_int32, pointer(_Device)),
        ("variant", pointer(_VariantInfo), c_int32),
        ("make_plan", _Status, pointer(_Problem), pointer(_Device), pointer(_Plan)),
        ("check_errors", _Status, c_int32),
        ("build_info", c_char_p),
        ("visible_pairs", c_int64, pointer(_Mask), c_int64, c_int64),
    ):
        function = getattr(library, f"sinkattn_{name}")
        function.restype, function.argtypes = result, arguments
    return library


try:
    _library = _load()
except OSError as _error:
    raise ImportError(f"sinkattn's library does not load on this machine ({_error})") from _error


def _raise_on(status: _Status) -> None:
    if status.code:
        raise _ERRORS[status.code](f"sinkattn: {status.message.decode()}")


def _value_of(names: Mapping[str, int], name: str, argument: str) -> int:
    if name not in names:
        raise ValueError(f"sinkattn: {argument} is '{name}'; known are {', '.join(names)}")
    return names[name]


def _name_of(names: Mapping[str, int], value: int) -> str:
    return next(name for name, known in names.items() if known == value)


def _integer(name: str, value: Any, bits: int = 64) -> int:
    """ctypes would cut it to fit."""
    whole: int = operator.index(value)
    if not -(1 << bits - 1) <= whole < 1 << bits - 1:
        raise ValueError(f"sinkattn: {name} is {whole}; it must fit {bits} bits")
    return whole


def _mask_of(left: int, right: int, num_sink_tokens: int) -> _Mask:
    left, right = _integer("window_size_left", left), _integer("window_size_right", right)
    return _Mask(
        has_left=left != -1,
        has_right=right != -1,
        left=left if left != -1 else 0,
        right=right if right != -1 else 0,
        num_sink_tokens=_integer("num_sink_tokens", num_sink_tokens),
    )


def build_info() -> str:
    return str(_library.sinkattn_build_info().decode())


version = build_info().split(";")[0].removeprefix("sinkattn ")


def _device_dict(device: _Device) -> dict[str, Any]:
    return {
        "backend": _name_of(_BACKENDS, device.backend),
        "arch": device.arch,
        "workers": device.workers,
        "name": device.name.decode(),
    }


def query_cpu(workers: int = 1) -> dict[str, Any]:
    device = _Device()
    _raise_on(_library.sinkattn_query_cpu(_integer("workers", workers, 32), device))
    return _device_dict(device)


def query_cuda(ordinal: int) -> dict[str, Any]:
    device = _Device()
    _raise_on(_library.sinkattn_query_cuda(_integer("ordinal", ordinal, 32), device))
    return _device_dict(device)


def check_cuda_errors(ordinal: int) -> None:
    _raise_on(_library.sinkattn_check_errors(_integer("ordinal", ordinal, 32)))


def variants() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    while row := _library.sinkattn_variant(len(rows)):
        info = row.contents
        rows.append(
            {
                "name": info.name.decode(),
                "op": _name_of(_OPS, info.op),
                "backend": _name_of(_BACKENDS, info.backend),
                "arch": info.arch,
                "dtypes": [name for name, value in _DTYPES.items() if info.dtypes >> value & 1],
                "max_head_dim": info.max_head_dim,
                "tile_q": info.tile_q,
                "tile_k": info.tile_k,
                "compiled": info.compiled,
            }
        )
    return rows


def plan(
    op: str,
    device: Mapping[str, Any],
    *,
    dtype: str,
    s_aux_dtype: str | None = None,
    packed: bool = False,
    invariant: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    num_sink_tokens: int = 0,
    batch: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int = 0,
    q_len: int,
    k_len: int,
    page_size: int = 0,
    num_pages: int = 0,
    num_splits: int = 0,
    extras: bool = False,
) -> dict[str, Any]:
    sizes = {
        **{"batch": batch, "num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim},
        **{"q_len": q_len, "k_len": k_len},
        **{"page_size": page_size, "num_pages": num_pages, "num_splits": num_splits},
    }
    problem = _Problem(
        op=_value_of(_OPS, op, "op"),
        dtype=_value_of(_DTYPES, dtype, "dtype"),
        s_aux_dtype=0 if s_aux_dtype is None else _value_of(_DTYPES, s_aux_dtype, "s_aux_dtype"),
        packed=packed,
        mask=_mask_of(window_size_left, window_size_right, num_sink_tokens),
        invariant=invariant,
        extras=extras,
        head_dim_v=_integer("head_dim_v", head_dim_v, 32),
        **{name: _integer(name, value) for name, value in sizes.items()},
    )
    facts = _Device(
        backend=_value_of(_BACKENDS, device["backend"], "backend"),
        arch=_integer("arch", device["arch"], 32),
        workers=_integer("workers", device["workers"], 32),
    )
    chosen = _Plan()
    _raise_on(_library.sinkattn_make_plan(problem, facts, chosen))
    row = _library.sinkattn_variant(chosen.variant).contents
    return {
        "variant": row.name.decode(),
        "compiled": row.compiled,
        "tile_q": row.tile_q,
        "tile_k": row.tile_k,
        "workers": chosen.workers,
        "num_splits": chosen.num_splits,
        "num_items": chosen.num_items,
        "workspace_bytes": chosen.workspace_bytes,
        "reason": chosen.reason.decode(),
    }


def visible_pairs(
    q_len: int, k_len: int, window_size_left: int = -1, window_size_right: int = -1, num_sink_tokens: int = 0
) -> int:
    mask = _mask_of(window_size_left, window_size_right, num_sink_tokens)
    pairs = int(_library.sinkattn_visible_pairs(mask, _integer("q_len", q_len), _integer("k_len", k_len)))
    if pairs < 0:
        raise ValueError(
            f"sinkattn: q_len is {q_len}, k_len {k_len}, window_size ({window_size_left}, {window_size_right}),"
            f" num_sink_tokens {num_sink_tokens}; lengths must be from 0 to 2^31 - 1, sides at least -1,"
            " num_sink_tokens at least 0"
        )
    return pairs


def bindings() -> dict[str, Path]:
    """The library of operators for each torch release that is inside, in the releases' order."""
    found = {path.name.removeprefix("torch").removesuffix(".so"): path for path in FOLDER.glob("torch*.so")}
    return {release: found[release] for release in sorted(found, key=lambda name: [int(x) for x in name.split(".")])}


def binding_for(torch_version: str) -> Path:
    release = ".".join(torch_version.split(".")[:2])
    inside = bindings()
    if release not in inside:
        raise ImportError(
            f"sinkattn has operators for torch {', '.join(inside)}, this is torch {torch_version}; install a sinkattn"
            " that has them, or build it here: pip install --no-build-isolation --no-deps --force-reinstall"
            " <sinkattn's source folder>"
        )
    return inside[release]
