# SPDX-License-Identifier: Apache-2.0
"""The verl plugin: what it registers, puts back and refuses; a stand-in for verl serves where it is not installed."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hf_cases import Calls
from tiny_gpt_oss import tiny_gpt_oss
from transformers import AttentionInterface, AttentionMaskInterface, GptOssForCausalLM, PreTrainedModel

from sinkattn import hf, verl_patch

REGISTRIES = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)


@pytest.fixture(autouse=True)
def unregistered() -> Iterator[None]:
    verl_patch.remove()
    before = [registry.pop("sinkattn", None) for registry in REGISTRIES]
    yield
    verl_patch.remove()
    for registry, function in zip(REGISTRIES, before, strict=True):
        registry.pop("sinkattn", None)
        if function is not None:
            registry["sinkattn"] = function


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("verl")
    module.__version__ = "0.9.1"
    monkeypatch.setitem(sys.modules, "verl", module)
    return module


def registered() -> list[object]:
    return [registry.get("sinkattn") for registry in REGISTRIES]


@pytest.mark.usefixtures("verl")
def test_apply_and_remove_are_idempotent() -> None:
    everything = [dict(registry) for registry in REGISTRIES]
    verl_patch.apply()
    assert registered() == [verl_patch.attention_forward, hf.attention_mask]
    verl_patch.apply()
    verl_patch.remove()
    assert [dict(registry) for registry in REGISTRIES] == everything
    verl_patch.remove()
    assert [dict(registry) for registry in REGISTRIES] == everything


@pytest.mark.usefixtures("verl")
def test_remove_restores_what_was_there() -> None:
    for registry in REGISTRIES:
        registry["sinkattn"] = print
    verl_patch.apply()
    assert registered() == [verl_patch.attention_forward, hf.attention_mask]
    verl_patch.remove()
    assert registered() == [print, print]


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize(
    "calls",
    [
        [partial(hf.register, invariant=True), verl_patch.apply],
        [verl_patch.apply, partial(hf.register, invariant=True), hf.register, verl_patch.apply],
        [verl_patch.apply, partial(verl_patch.apply, invariant=True)],
        [partial(hf.register, invariant=False), partial(verl_patch.apply, invariant=True), hf.register],
    ],
)
def test_invariance_is_kept(calls: list[Callable[[], None]]) -> None:
    """In whatever order; and apply() always puts the function there that serves Ulysses."""
    for call in calls:
        call()
    function = AttentionInterface._global_mapping["sinkattn"]
    last = hf if calls[-1] is hf.register else verl_patch
    assert isinstance(function, partial)
    assert function.func is last.attention_forward
    query, key = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 9, 16)
    with Calls() as seen, torch.no_grad():
        function(torch.nn.Module(), query, key, key, None)
    assert [arguments["invariant"] for arguments, _ in seen.named("flash_decode")] == [True]


@pytest.mark.parametrize("version", ["0.9.0", "0.9.2", "1.0.0"])
def test_untested_verl_is_refused(verl: ModuleType, version: str) -> None:
    verl.__version__ = version
    with pytest.raises(NotImplementedError, match=version):
        verl_patch.apply()
    assert registered() == [None, None]


@pytest.mark.usefixtures("verl")
def test_replace(caplog: pytest.LogCaptureFixture) -> None:
    check = PreTrainedModel._check_and_adjust_attn_implementation

    def attention(name: str) -> str:
        return str(tiny_gpt_oss(name).config._attn_implementation)

    verl_patch.apply()
    assert attention("flex_attention") == "flex_attention"
    verl_patch.replace("flash_attention_2", "flex_attention")
    assert [attention(name) for name in ("flash_attention_2", "flex_attention")] == ["sinkattn"] * 2
    assert "flash_attention_2 or flex_attention get sinkattn" in caplog.text
    verl_patch.remove()
    assert PreTrainedModel._check_and_adjust_attn_implementation is check
    assert attention("flex_attention") == "flex_attention"


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize("names", [(), ("flash_attention2",), ("sdpa", "")])
def test_replace_refuses_unknown_names(names: tuple[str, ...]) -> None:
    check = PreTrainedModel._check_and_adjust_attn_implementation
    with pytest.raises(ValueError, match=r"is to be replaced, which transformers does not know; it knows .*sdpa"):
        verl_patch.replace(*names)
    assert PreTrainedModel._check_and_adjust_attn_implementation is check


def test_without_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl", None)
    with pytest.raises(ImportError, match="verl"):
        verl_patch.apply()
    assert registered() == [None, None]


def run_python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path[:0] = {[str(p) for p in path]}\n{code}"
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)


SHOW = "\nfrom transformers import AttentionInterface\nprint('sinkattn' in AttentionInterface._global_mapping)"


@pytest.mark.parametrize("version", ["0.9.1", "0.0.1"])
def test_plugin_loading(tmp_path: Path, version: str) -> None:
    """As verl loads plugins: import the module, drop what it raises. The failure must be heard all the same."""
    (tmp_path / "verl.py").write_text(
        f"__version__ = {version!r}\n"
        "import importlib\n"
        "try:\n"
        "    importlib.import_module('sinkattn.verl_patch')\n"
        "except Exception:\n"
        "    pass\n"
    )
    done = run_python("import verl" + SHOW, tmp_path)
    assert done.stdout.strip() == str(version == "0.9.1")
    assert ("verl is 0.0.1" in done.stderr) == (version == "0.0.1")


@pytest.mark.usefixtures("verl")
@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            "flash_attention2",
            "SINKATTN_VERL_REPLACE is flash_attention2 and has no effect: sinkattn: ['flash_attention2'] is",
        ),
        (" sdpa , flash_attention_2", "models that ask for sdpa or flash_attention_2 get sinkattn"),
    ],
)
def test_a_wrong_name_is_not_a_missing_sinkattn(
    names: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SINKATTN_VERL_REPLACE", names)
    verl_patch._load()
    assert said in caplog.text
    assert "not available" not in caplog.text
    assert registered() == [verl_patch.attention_forward, hf.attention_mask]


def test_import_without_verl_does_nothing() -> None:
    done = run_python("import sinkattn.verl_patch; assert 'transformers' not in sys.modules" + SHOW)
    assert done.stdout.strip() == "False"
    assert done.stderr == ""


def ulysses_of(size: int, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for verl's Ulysses group of that size; what it does is tested with verl itself."""
    ulysses = ModuleType("verl.utils.ulysses")
    ulysses.get_ulysses_sequence_parallel_world_size = lambda: size
    ulysses.get_ulysses_sequence_parallel_group = lambda: "group"
    monkeypatch.setitem(sys.modules, "verl.utils.ulysses", ulysses)
    return ulysses


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_takes_its_slice_of_the_sinks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank gives is its heads of the whole, and the gradient of s_aux is zero outside of them."""
    size, heads, tokens = 2, 8, 10
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, n, tokens, 8, generator=generator) for n in (heads, 4, 4)]
    s_aux, expected_s_aux = (
        (4 * torch.randn(heads, generator=generator.manual_seed(1))).requires_grad_() for _ in range(2)
    )
    module, positions = torch.nn.Module(), torch.arange(tokens)[None]
    module.sinks, module.is_causal = torch.nn.Parameter(torch.zeros(heads)), True
    expected, _ = hf.attention_forward(module, *whole, None, s_aux=expected_s_aux, position_ids=positions)
    mine = slice(rank * heads // size, (rank + 1) * heads // size)
    expected[:, :, mine].sum().backward()

    ulysses, exchanged = ulysses_of(size, monkeypatch), iter(whole)
    ulysses.get_ulysses_sequence_parallel_rank = lambda: rank
    ulysses.gather_seq_scatter_heads = lambda *_, **__: next(exchanged).chunk(size, 1)[rank].transpose(1, 2)
    ulysses.gather_heads_scatter_seq = lambda x, **_: x
    ulysses.all_gather_tensor = lambda _: positions
    part = slice(rank * tokens // size, (rank + 1) * tokens // size)
    local = [x[:, :, part] for x in whole]
    out, _ = verl_patch.attention_forward(module, *local, None, s_aux=s_aux, position_ids=positions[:, part])
    out.sum().backward()
    torch.testing.assert_close(out, expected[:, :, mine].detach())
    torch.testing.assert_close(s_aux.grad, expected_s_aux.grad)
    assert s_aux.grad is not None
    assert s_aux.grad[mine].abs().min() > 0
    assert s_aux.grad.count_nonzero() == heads // size


def test_positions_are_gathered_again_once_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the mask that a forward made; without one, in each layer."""
    gathered = []
    ulysses = ulysses_of(2, monkeypatch)
    ulysses.all_gather_tensor = lambda x: gathered.append(x.clone()) or torch.cat([x, x])
    positions, mask = torch.arange(4)[None], hf.attention_mask(1, 4, 4)
    for _ in range(2):
        assert verl_patch._all_position_ids(positions, mask, ulysses).tolist() == [[0, 1, 2, 3] * 2]
    assert len(gathered) == 1
    positions[0, 2:] = torch.arange(2)  # a sequence ends here now
    for _ in range(2):
        assert verl_patch._all_position_ids(positions, mask, ulysses).tolist() == [[0, 1, 0, 1] * 2]
    assert len(gathered) == 2
    positions.data[0, 1:] = 0  # which torch does not count
    mask = hf.attention_mask(1, 4, 4)
    for _ in range(2):
        assert verl_patch._all_position_ids(positions, mask, ulysses).tolist() == [[0, 0, 0, 0] * 2]
    assert len(gathered) == 3
    for _ in range(2):
        verl_patch._all_position_ids(positions, None, ulysses)
    assert len(gathered) == 5


REFUSED = {
    "query heads": ({"size": 3, "heads": (8, 3)}, "8:3 heads; the size must divide the query heads"),
    "key heads": ({"size": 4, "heads": (12, 6)}, "12:6 heads; .*divide the key heads or be a multiple"),
    "s_aux": ({"s_aux": torch.zeros(4)}, r"s_aux has shape \(4,\) and query 8 heads"),
    "padding": ({"attention_mask": torch.ones(1, 6)}, "with an attention_mask; set .*use_remove_padding"),
    "batch": ({"batch": 2}, "the batch is 2 without an attention_mask; set .*use_remove_padding"),
    "cache": ({"k_len": 9}, "6 queries and 9 keys; a cache is not shared out"),
    "no positions": ({"position_ids": None}, "position_ids has shape None"),
    "all positions": ({"position_ids": torch.zeros(1, 12)}, r"position_ids has shape \(1, 12\)"),
    "bounds": ({"cu_seq_lens_q": torch.tensor([0, 6])}, r"\['cu_seq_lens_q'\] do not say of which part"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_ulysses_refuses(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    changed, message = REFUSED[case]
    given = {"size": 2, "heads": (8, 2), "batch": 1, "k_len": 6, "attention_mask": None}
    given |= {"s_aux": torch.zeros(8), "position_ids": torch.arange(6)[None]} | changed
    size, (num_q_heads, num_kv_heads), batch, k_len, mask = (given.pop(x) for x in tuple(given)[:5])
    ulysses_of(size, monkeypatch)
    module = torch.nn.Module()
    module.sinks = torch.nn.Parameter(torch.zeros(8))
    query, key = torch.zeros(batch, num_q_heads, 6, 8), torch.zeros(batch, num_kv_heads, k_len, 8)
    with pytest.raises((NotImplementedError, ValueError), match=message):
        verl_patch.attention_forward(module, query, key, key, mask, **given)


@pytest.mark.parametrize("size", [1, 2])
def test_ulysses_is_refused(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Without the plugin: a rank that holds a part of the sequence would attend to that part only."""
    ulysses_of(size, monkeypatch)
    hf.register()
    model = tiny_gpt_oss()
    ids = torch.arange(1, 9)[None]
    if size == 1:
        assert model(ids).logits.isfinite().all()
    else:
        with pytest.raises(NotImplementedError, match="ulysses_sequence_parallel_size"):
            model(ids)


def checkpoint(folder: Path) -> Path:
    """As verl writes it: the name set as an attribute of the config."""
    hf.register()
    model = tiny_gpt_oss()
    model.config.attn_implementation = "sinkattn"
    model.save_pretrained(folder)
    for registry in REGISTRIES:
        del registry["sinkattn"]
    return folder


def test_clean_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    with pytest.raises(ValueError, match="sinkattn"):
        GptOssForCausalLM.from_pretrained(folder)
    before = json.loads((folder / "config.json").read_text())
    assert verl_patch.clean_checkpoint(folder)
    after = json.loads((folder / "config.json").read_text())
    assert after == {name: value for name, value in before.items() if name != "attn_implementation"}
    GptOssForCausalLM.from_pretrained(folder)
    assert not verl_patch.clean_checkpoint(folder)


def test_clean_checkpoint_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"attn_implementation": "eager", "text_config": {"attn_implementation": "sinkattn", "n": 1}})
    )
    command = [sys.executable, "-m", "sinkattn.verl_patch", str(tmp_path)]
    assert "cleaned" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    left = json.loads((tmp_path / "config.json").read_text())
    assert left == {"attn_implementation": "eager", "text_config": {"n": 1}}
    assert subprocess.run(command[:-1], capture_output=True, text=True).returncode == 2
