# SPDX-License-Identifier: Apache-2.0
"""A part of tools/sweep_models.py, whose table of all models is in docs/models.md."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed: pip install --no-build-isolation '.[hf]'", allow_module_level=True)

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("sweep_models", ROOT / "tools" / "sweep_models.py")
assert spec is not None
assert spec.loader is not None
sweep: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sweep)

UNCOMPILED = [check for check in sweep.CHECKS if check != "compiled"]
ALL = dict.fromkeys(UNCOMPILED, "right")
WANTED = {
    "llama": ALL,
    "gpt_oss": ALL,
    "phimoe": ALL,
    "qwen2_moe": ALL,
    "gpt_bigcode": ALL | {"packed, cached": "as eager"},
    "bart": ALL | {"packed": "-", "packed, cached": "-"},
    "gemma2": "softcap is 50.0",
    "llama4_text": "the mask of Llama4TextConfig",
    "doge": "DogeConfig has keep_window_size",
}


@pytest.mark.parametrize("name", WANTED)
def test_a_part_of_the_sweep(name: str) -> None:
    wanted, found = WANTED[name], sweep.compare(name, UNCOMPILED)
    if isinstance(wanted, dict):
        assert found == wanted
    else:
        assert all(x.startswith(f"no: {wanted}") for x in found.values()), found


def test_a_wrong_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sweep.hf.attention_forward

    def without_window(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        return right(module, query, key, value, None, **kwargs | {"sliding_window": None})

    monkeypatch.setattr(sweep.hf, "attention_forward", without_window)
    found = sweep.compare("phimoe", ["dense", "padded", "generated"])
    monkeypatch.undo()
    sweep.hf.register()  # which the comparison called with the wrong one
    assert all(x.startswith("wrong") for x in found.values()), found


def test_docs_have_the_models() -> None:
    page = (ROOT / "docs" / "models.md").read_text().partition("## Every causal language model")[2]
    for name, wanted in WANTED.items():
        row = next(
            line
            for line in page.splitlines()
            if line.startswith("| ") and name in line.split("|")[1].strip().split(", ")
        )
        cells = [cell.strip() for cell in row.split("|")[2:-2]]
        if isinstance(wanted, dict):
            assert cells == [*(sweep.SHOWN.get(x, x) for x in wanted.values()), "yes"], row  # the last: compiled
        else:
            assert set(cells) == {"no"}, row
