# SPDX-License-Identifier: Apache-2.0
"""python -m sinkattn doctor: why an import or a plan fails. Its steps build on each other, so the first failure counts.

The first three run before the rest of the package is imported, so that an import that fails is explained too.
"""

import contextlib
import importlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LARGEST_ERROR = {"cpu": 2e-5, "cuda": 2e-2}
"""Of outputs and gradients of about 1: fp32 on a CPU, bf16 on a GPU."""


def devices() -> list[str]:
    import torch

    return ["cpu", *(f"cuda:{ordinal}" for ordinal in range(torch.cuda.device_count()))]


def self_test(device: str) -> str:
    """A forward, a backward and a decode against the formula in fp64; raises RuntimeError where they differ."""
    import torch

    from . import flash_attn_func, flash_attn_with_kvcache, reference

    start = time.perf_counter()
    kind = device.partition(":")[0]
    dtype = torch.float32 if kind == "cpu" else torch.bfloat16
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(2, 96, heads, 64, generator=generator) for heads in (8, 2, 2)]
    s_aux = torch.randn(8, generator=generator)
    q, k, v = (x.to(device, dtype).requires_grad_() for x in drawn)
    sink = s_aux.to(device).requires_grad_()
    exact = q64, k64, v64, sink64 = [x.detach().cpu().double().requires_grad_() for x in (q, k, v, sink)]

    window = (31, 0)
    out = flash_attn_func(q, k, v, window_size=window, s_aux=sink)
    wanted = reference.flash_attn_func(q64, k64, v64, window_size=window, s_aux=sink64)
    assert isinstance(wanted, torch.Tensor)
    weights = torch.randn(out.shape, generator=generator)
    (out.float() * weights.to(device)).sum().backward()  # type: ignore[no-untyped-call]
    (wanted * weights.double()).sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        decoded = flash_attn_with_kvcache(q[:, -1:], k, v, causal=True, window_size=window, s_aux=sink)

    errors = {"forward": out, "decode": decoded, "dq": q.grad, "dk": k.grad, "dv": v.grad, "ds_aux": sink.grad}
    rights = (wanted, wanted[:, -1:], *(x.grad for x in exact))
    for (name, got), right in zip(errors.items(), rights, strict=True):
        assert got is not None
        assert right is not None
        right = right.detach()
        error = float((got.detach().cpu().double() - right).abs().max() / right.abs().max())
        if not error <= LARGEST_ERROR[kind]:
            raise RuntimeError(
                f"sinkattn: {name} on {device} is wrong: its largest error is {error:.1e} of the largest value"
            )
    took = time.perf_counter() - start
    return f"forward, backward and decode agree with the formula in fp64 ({took:.1f} s)"


def self_tests() -> Iterator[str]:
    for device in devices():
        yield f"self-test {device}: {self_test(device)}"


def _library() -> str:
    core = importlib.import_module("sinkattn._C")
    return f"{core.build_info()}, in {core.FOLDER}"


def _torch() -> str:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ImportError(f"torch does not import ({error}); first pip install torch") from error
    return f"{torch.__version__}, in {Path(str(torch.__file__)).parent}"


def _operators() -> str:
    core, torch = importlib.import_module("sinkattn._C"), importlib.import_module("torch")
    binding = core.binding_for(torch.__version__)
    try:
        torch.ops.load_library(str(binding))
    except OSError as error:
        raise ImportError(
            f"{binding.name} does not load under torch {torch.__version__} ({error}); build sinkattn here, where this"
            " torch is"
        ) from error
    return f"{binding.name}, of {', '.join(core.bindings())}"


def _package() -> str:
    package = importlib.import_module("sinkattn")
    return f"{package.__version__}, in {Path(str(package.__file__)).parent}"


def _cpu() -> str:
    cpu = importlib.import_module("sinkattn._C").query_cpu()
    return f"{cpu['name']}, level {importlib.import_module('sinkattn.check').CPU_LEVELS[cpu['arch']]}"


def _cuda() -> str:
    core, torch = importlib.import_module("sinkattn._C"), importlib.import_module("torch")
    if not torch.cuda.is_available():
        why = "was built without CUDA" if torch.version.cuda is None else "finds no CUDA device or driver"
        return f"none, and none is needed: torch {why}"
    lines = []
    for ordinal in range(torch.cuda.device_count()):
        device = core.query_cuda(ordinal)
        if device["arch"] < 80:
            raise RuntimeError(f"{device['name']} has compute capability {device['arch'] / 10}; kernels need 8.0")
        lines.append(f"{device['name']}, sm_{device['arch']}")
    return "; ".join(lines)


def _plans() -> str:
    core, check = importlib.import_module("sinkattn._C"), importlib.import_module("sinkattn.check")
    sizes: dict[str, Any] = {
        "batch": 1,
        "num_q_heads": 64,
        "num_kv_heads": 8,
        "head_dim": 64,
        "q_len": 1,
        "k_len": 8192,
    }
    plans = []
    for name in devices():
        device = None if name == "cpu" else core.query_cuda(int(name.partition(":")[2]))
        plans += [check.plan(op, device, dtype="bf16", **sizes)["variant"] for op in ("fwd", "bwd", "decode")]
    return "gpt-oss's heads in bf16 run by " + ", ".join(plans)


def _self_tests() -> str:
    return "\n".join(self_tests()).replace("\n", "\n" + " " * 18).replace("self-test ", "")


STEPS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("library", _library),
    ("torch", _torch),
    ("operators", _operators),
    ("sinkattn", _package),
    ("cpu", _cpu),
    ("cuda", _cuda),
    ("plans", _plans),
    ("self-tests", _self_tests),
)


def main(steps: tuple[tuple[str, Callable[[], str]], ...] = STEPS) -> int:
    for name, step in steps:
        try:
            print(f"[ok]  {name:10}  {step()}")
        except (ImportError, OSError, RuntimeError, ValueError) as error:
            print(f"[no]  {name:10}  {str(error).removeprefix('sinkattn: ')}")
            return 1
    print("Nothing is wrong here.")
    return 0


def stop_where_the_import_would_fail() -> None:
    """Before the package's own imports. Says nothing where they will work."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        failed = main(STEPS[:3])
    if failed:
        print(said.getvalue(), end="")
        sys.exit(failed)
