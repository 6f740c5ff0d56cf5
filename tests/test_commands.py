# SPDX-License-Identifier: Apache-2.0
"""Every command line prints its help, and says in one sentence what is wrong with an argument."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

import sinkattn
from benchmarks import harness
from benchmarks.__main__ import STUDIES

ROOT = Path(__file__).parent.parent
# module, what its usage begins with, its commands
COMMANDS = (
    ("sinkattn.__main__", "python -m sinkattn", ("", "plan")),
    ("sinkattn.verl_patch", "python -m sinkattn.verl_patch", ("",)),
    ("sinkattn._testing.__main__", "python -m sinkattn._testing", ("",)),
    ("benchmarks.__main__", "python -m benchmarks", ("", *STUDIES)),
    ("tools.mutation_check", "python -m tools.mutation_check", ("",)),
)
# on_policy needs the environment of vLLM, where tests/test_vllm_engine.py runs it.
EXAMPLES = sorted({path.stem for path in ROOT.glob("examples/*.py")} - {"on_policy"})


@pytest.mark.parametrize(
    ("module", "usage", "command"), [(module, usage, word) for module, usage, words in COMMANDS for word in words]
)
def test_help(module: str, usage: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main = importlib.import_module(module).main
    with pytest.raises(SystemExit) as done:
        main([*filter(None, [command]), "--help"])
    shown = capsys.readouterr().out
    assert done.value.code == 0
    assert shown.startswith(f"usage: {usage} {command}".rstrip() + " "), shown
    assert "%%" not in shown


@pytest.mark.parametrize("name", EXAMPLES)
def test_help_of_an_example(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for needed in ("transformers", "matplotlib", "rich", "tqdm", "tokenizers"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install '.[demo]'")
    monkeypatch.syspath_prepend(ROOT / "examples")
    with pytest.raises(SystemExit) as done:
        importlib.import_module(name).main(["--help"])
    assert done.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    from sinkattn.__main__ import main

    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"sinkattn {sinkattn.__version__}\n"


def test_generate_says_where_its_model_comes_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install '.[hf]'")
    monkeypatch.syspath_prepend(ROOT / "examples")
    with pytest.raises(SystemExit, match=r"no model in .*nowhere: run `make demo` first, .* or give --model"):
        importlib.import_module("generate_gpt_oss").main(["--model", str(tmp_path / "nowhere")])


def test_rows_of_a_tree_without_git_name_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert harness.commit() == "unknown"


def test_the_cpu_s_rows_name_the_commit_that_is_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import cases, peers
    from benchmarks.__main__ import main

    monkeypatch.setattr(cases, "CPU_QUICK", [cases.Case(32, 16, "fp32")])
    monkeypatch.setattr(peers, "CPU", [peers.OURS])
    path = tmp_path / "rows.json"
    assert main(["cpu", "--quick", "--commit", "abc", "--json", str(path)]) == 0
    assert {row.commit for row in harness.load(path, harness.Row)[1]} == {"abc"}


def config(folder: Path, **extra: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps({"attn_implementation": "sinkattn", **extra}))
    return path


@pytest.mark.parametrize(
    "places",
    [("",), ("huggingface",), ("actor/huggingface",), ("actor/huggingface", "critic/huggingface")],
    ids="+".join,
)
def test_a_checkpoint_s_models_are_found(
    places: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """verl's SFT writes huggingface/ in a step's folder, its PPO trainer actor/huggingface/ and critic/huggingface/."""
    from sinkattn import verl_patch

    step = tmp_path / "global_step_40"
    paths = [config(step / place, n=1) for place in places]
    assert verl_patch.main([str(step)]) == 0
    assert [json.loads(path.read_text()) for path in paths] == [{"n": 1}] * len(paths)
    assert capsys.readouterr().out.splitlines() == [f"{path}: cleaned" for path in paths]
    assert verl_patch.main([str(step)]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{path}: nothing to clean" for path in paths]


def test_what_is_no_checkpoint_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sinkattn import verl_patch

    (tmp_path / "empty").mkdir()
    broken, right = config(tmp_path / "broken"), config(tmp_path / "right")
    broken.write_text("{")
    folders = [str(tmp_path / name) for name in ("nowhere", "empty", "broken", "right")]
    assert verl_patch.main(folders) == 1
    shown = capsys.readouterr()
    assert shown.out == f"{right}: cleaned\n"
    nowhere, empty, unread = shown.err.splitlines()
    assert nowhere == f"sinkattn: {tmp_path / 'nowhere'} is not a folder"
    assert empty.startswith(f"sinkattn: {tmp_path / 'empty'} has no config.json, nor has its huggingface/,")
    assert unread.startswith(f"sinkattn: {broken} is not JSON: Expecting")
    with pytest.raises(SystemExit) as done:
        verl_patch.main([])
    assert done.value.code == 2


def test_verl_patch_as_a_module(tmp_path: Path) -> None:
    import subprocess

    command = [sys.executable, "-m", "sinkattn.verl_patch", str(tmp_path / "nowhere")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"sinkattn: {tmp_path}/nowhere is not a folder\n")
