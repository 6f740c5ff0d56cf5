# SPDX-License-Identifier: Apache-2.0
"""What the build leaves behind: facts it reports, the public header on its own, what installs that cannot work say."""

import ctypes
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_kernels import check_every_kernel_is_in_these_tables

import sinkattn
from sinkattn import _C, reference
from sinkattn.__main__ import main
from sinkattn.check import CPU_LEVELS
from tools import check_wheel
from tools.mutations import MUTATIONS

ROOT = Path(__file__).parent.parent
HEADER = ROOT / "csrc" / "include" / "sinkattn.h"
SIZES = {"dtype": "bf16", "batch": 1, "num_q_heads": 8, "num_kv_heads": 2, "head_dim": 64, "q_len": 1, "k_len": 4096}
H200 = {"backend": "cuda", "arch": 90, "workers": 132}


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def with_cuda() -> bool:
    return "cuda" in _C.build_info().partition("backends:")[2]


def test_the_version_is_the_headers() -> None:
    found = re.search(r'SINKATTN_VERSION "(.+)"', HEADER.read_text())
    assert found
    assert found[1] == sinkattn.__version__ == _C.version


def test_check_names_every_fact() -> None:
    text = sinkattn.check()
    level = CPU_LEVELS[_C.query_cpu()["arch"]]
    wanted = [f"sinkattn  +{_C.version}", f"torch  +{re.escape(torch.__version__)}, {torch.get_num_threads()} threads"]
    wanted += [f"cpu  .*level {level}", "backends: cpu", "cuda  "]
    compiled = [variant for variant in sinkattn.variants() if variant["compiled"]]
    wanted += [f"{variant['name']}  .*head_dim up to {variant['max_head_dim']}" for variant in compiled]
    for pattern in wanted:
        assert re.search("^" + pattern if not pattern.startswith("backends") else pattern, text, re.MULTILINE), pattern


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    facts, _, tests = capsys.readouterr().out.partition("\nself-test ")
    assert facts == sinkattn.check()
    assert re.match(r"cpu: forward, backward and decode agree with the formula in fp64 \(\d\.\d s\)", tests)
    assert main(["plan", "decode", "--k-len", "4096", "--num-splits", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"variant +sa_decode_cpu_", out)
    assert re.search(r"reason +sa_decode_cpu_\w+ is the best kernel for bf16, head_dim 64", out)
    assert main(["plan", "fwd", "--k-len", "2048", "--num-q-heads", "8"]) == 0
    assert re.search(r"num_items +256\n", capsys.readouterr().out), "a prefill has as many rows as keys"
    assert main(["plan", "fwd", "--head-dim", "12"]) == 1
    assert "head_dim is 12; it must be a multiple of 8" in capsys.readouterr().err
    assert main(["plan", "fwd", "--arch", "90"]) == 1
    assert "--arch and --sms come together" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "--num-sink-tokens" in capsys.readouterr().out


def test_a_self_test_that_fails_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.ops.sinkattn.flash_decode.default
    monkeypatch.setattr("sinkattn.ops._decode", lambda *a, **k: tuple(x * 1.001 for x in right(*a, **k)))
    assert main([]) == 1
    assert re.search(r"decode on cpu is wrong: its largest error is 1\.0e-03", capsys.readouterr().err)
    assert main(["doctor"]) == 1
    assert re.search(r"\[ok\]  plans .*\n\[no\]  self-tests  decode on cpu is wrong", capsys.readouterr().out)


def test_command_line_for_a_device_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["plan", "fwd", "--arch", "90", "--sms", "132", "--q-len", "4096", "--window-size-right", "0"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    told = "yes" if with_cuda() else "no, this build was made without nvcc"
    assert re.search(rf"^variant +sa_fwd_cuda_sm90_d64\ncompiled +{told}$", shown.out, re.MULTILINE), shown.out
    not_taken = r"^ +not sa_fwd_cuda_sm90_window \(64 x 144\): left \+ right \+ tokens a tile > its tile_k$"
    assert re.search(not_taken, shown.out, re.MULTILINE), shown.out


def test_command_line_as_a_module() -> None:
    done = run(sys.executable, "-m", "sinkattn", "plan", "bwd", SINKATTN_CPU_LEVEL="scalar")
    assert done.returncode == 0, done.stderr
    assert re.search(r"variant +sa_bwd_cpu_scalar", done.stdout)


def test_the_errors_of_a_cpu_are_raised_at_the_call() -> None:
    assert sinkattn.check_errors() is None


@pytest.mark.parametrize("level", CPU_LEVELS)
def test_cpu_levels(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SINKATTN_CPU_LEVEL", raising=False)
    own = _C.query_cpu()["arch"]
    monkeypatch.setenv("SINKATTN_CPU_LEVEL", level)
    if CPU_LEVELS.index(level) > own:
        with pytest.raises(NotImplementedError, match=f"SINKATTN_CPU_LEVEL is {level}; it must be at most"):
            _C.query_cpu()
    else:
        assert _C.query_cpu()["arch"] == CPU_LEVELS.index(level)
        assert f"level {level}" in sinkattn.check()
        assert sinkattn.plan("fwd", **SIZES)["variant"] == f"sa_fwd_cpu_{level}"


def test_an_unknown_cpu_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINKATTN_CPU_LEVEL", "sse")
    with pytest.raises(ValueError, match=r"SINKATTN_CPU_LEVEL is sse; it must be oracle, scalar, avx2, .* or amx_bf16"):
        sinkattn.check()


def test_a_plan_needs_no_device() -> None:
    """The planner is asked about a machine that is not here, by builds with and without CUDA alike."""
    assert sinkattn.plan("fwd", H200, **SIZES)["compiled"] == with_cuda()
    assert {variant["name"] for variant in sinkattn.variants() if not variant["compiled"]} == {
        variant["name"] for variant in sinkattn.variants() if variant["backend"] == "cuda" and not with_cuda()
    }
    scalar = {"backend": "cpu", "arch": 1, "workers": 64}
    plan = sinkattn.plan("decode", scalar, **SIZES)
    assert plan["variant"] == "sa_decode_cpu_scalar"
    assert plan["num_splits"] > 1
    assert 1 <= plan["workers"] <= 64
    row = next(variant for variant in sinkattn.variants() if variant["name"] == plan["variant"])
    assert (plan["tile_q"], plan["tile_k"]) == (row["tile_q"], row["tile_k"])


def test_every_cuda_kernel_has_sizes_in_the_gpu_tests() -> None:
    check_every_kernel_is_in_these_tables(H200)


def test_a_plan_says_why_no_better_row_serves() -> None:
    own = sinkattn.plan("fwd", **SIZES | {"dtype": "fp64"})
    better = [variant["name"] for variant in sinkattn.variants() if variant["op"] == "fwd"][1:]
    arch = _C.query_cpu()["arch"]
    for name in (name for name in better if "cpu" in name):
        level = CPU_LEVELS.index(name.removeprefix("sa_fwd_cpu_"))
        other = rf"{name} \(64 x 128\): it has other dtypes"
        why = other if level <= arch else f"those for cpu level {CPU_LEVELS[level]}"
        assert re.search(f"; not {why}(;|$)", own["reason"]), own["reason"]


def test_the_reason_has_the_closed_forms() -> None:
    sizes = SIZES | {"num_q_heads": 64, "num_kv_heads": 8, "k_len": 65536, "window_size_right": 0}
    for batch in (1, 3, 16, 17, 64):
        reason = sinkattn.plan("decode", H200, **sizes | {"batch": batch})["reason"]
        assert f"B* = 17, P = {132 // (8 * batch)}, P* = " in reason
    for batch, k_len, num_q_heads, told in (
        (1, 8192, 64, "sqrt(512 / 0.56)) = 16"),  # P, where a partial of eight rows is 0.56 of a tile of 16 keys
        (1, 1024, 64, "sqrt(64 / 0.56)) = 10"),
        (1, 1024, 8, "sqrt(64 / 0.07)) = 16"),
        (17, 8192, 64, "sqrt(512 / 0.56)) = 1"),
    ):
        sizes |= {"batch": batch, "k_len": k_len, "num_q_heads": num_q_heads}
        reason = sinkattn.plan("decode", H200, **sizes)["reason"]
        assert f", P* = min(P, {told}" in reason, reason


def test_planner_refusals() -> None:
    with pytest.raises(ValueError, match="op is 'forward'; known are fwd, bwd, decode"):
        sinkattn.plan("forward", **SIZES)
    with pytest.raises(ValueError, match="dtype is 'fp8'; known are bf16, fp16, fp32, fp64"):
        sinkattn.plan("fwd", **SIZES | {"dtype": "fp8"})
    with pytest.raises(NotImplementedError, match=r"no decode kernel serves bf16, head_dim 64 on sm_10; there are sa_"):
        sinkattn.plan("decode", H200 | {"arch": 10}, **SIZES)


@pytest.mark.parametrize("left", [-1, None, 0, 1, 2, 3, 2**31 - 1])
@pytest.mark.parametrize("right", [-1, 0, 1, 2, 3])
@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (4, 4), (2, 7), (7, 2), (5, 9), (9, 5), (40, 40), (0, 3), (3, 0)])
def test_visible_pairs(left: int | None, right: int, q_len: int, k_len: int) -> None:
    for num_sink_tokens in (0, 2, 9, 50):
        lens = torch.tensor([q_len]), torch.tensor([k_len])
        seen = reference.visible(*lens, q_len, k_len, -1 if left is None else left, right, num_sink_tokens)
        assert sinkattn.visible_pairs(q_len, k_len, (left, right), num_sink_tokens) == int(seen.sum())


@pytest.mark.parametrize("arguments", [(-1, 3), (3, -1), (3, 3, (-2, 0)), (3, 3, (0, 0), -1)])
def test_visible_pairs_refuses(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(
        ValueError, match=r"q_len is -?\d, k_len -?\d, window_size \(.*sides at least -1, num_sink_tokens at least 0"
    ):
        sinkattn.visible_pairs(*arguments)
    with pytest.raises(ValueError, match=r"window_size is 3; it must be \(left, right\)"):
        sinkattn.visible_pairs(4, 4, 3)  # type: ignore[arg-type]


COMPILERS = {
    "C11": ("cc", "-x", "c", "-std=c11", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"),
    "C++17": ("c++", "-x", "c++", "-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"),
    "CUDA": ("nvcc", "-x", "cu", "-std=c++17", "-c", "-o", "/dev/null"),
}


@pytest.mark.parametrize("language", COMPILERS)
def test_the_header_stands_alone(language: str, tmp_path: Path) -> None:
    compiler, *flags = COMPILERS[language]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not on PATH")
    source = tmp_path / "alone"
    source.write_text(f'#include "{HEADER}"\n#include "{HEADER}"\nsinkattn_code code = SINKATTN_OK;\n')
    done = run(compiler, *flags, source)
    assert done.returncode == 0, done.stderr


def symbols(library: Path, *options: str) -> list[str]:
    if shutil.which("nm") is None:
        pytest.skip("nm is not on PATH")
    return check_wheel.symbols(library, *options)


def test_the_library_has_nothing_of_torch_and_the_binding_nothing_of_python() -> None:
    """So one library serves every torch, and one binding every Python."""
    (library,) = _C.FOLDER.glob("libsinkattn.so.*")
    assert [line for line in symbols(library) if re.search(r"torch|c10|2at\d|_ZN|Py[A-Z]", line)] == []
    taken = symbols(_C.binding_for(torch.__version__), "--undefined-only")
    assert [line for line in taken if re.search(r" _?Py[A-Z]", line)] == []
    assert {line.split()[-1] for line in taken if " sinkattn_" in line} > {"sinkattn_fwd", "sinkattn_bwd"}


def test_the_binding_exports_nothing_of_its_own() -> None:
    exported = set(
        re.findall(r" [TDBR] (\S+)", "\n".join(symbols(_C.binding_for(torch.__version__), "--defined-only")))
    )
    assert exported - {"_init", "_fini", "__bss_start", "_edata", "_end"} == set()


def test_structs_have_the_headers_layout(tmp_path: Path) -> None:
    """A field that one side lacks would be read from another place."""
    lines = ["#include <stdio.h>", f'#include "{HEADER}"', "int main(void) {"]
    for name, struct in _C.STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            size = f"sizeof((({name} *)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), {size});')
    source = tmp_path / "layout.c"
    source.write_text("\n".join([*lines, "}"]))
    compiled = run("cc", "-std=c11", source, "-o", tmp_path / "layout")
    assert compiled.returncode == 0, compiled.stderr
    mine = []
    for name, struct in _C.STRUCTS.items():
        mine.append(f"{name} {ctypes.sizeof(struct)}")
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            mine.append(f"{name}.{field} {place.offset} {place.size}")
    assert run(tmp_path / "layout").stdout.splitlines() == mine


@pytest.mark.parametrize("batch", [1 << 63, -(1 << 63) - 1])
def test_a_size_beyond_the_librarys_integers_is_no_smaller_one(batch: int) -> None:
    with pytest.raises(ValueError, match=rf"batch is {batch}; it must fit 64 bits"):
        sinkattn.plan("fwd", **SIZES | {"batch": batch})


def package(folder: Path, *commands: str | Path) -> None:
    """setup.py's own files go to the folder; what is compiled already is taken from the build folder."""
    (folder / "egg").mkdir()
    egg = ("egg_info", "--egg-base", folder / "egg")
    with Path(__file__).open() as lock:  # a listing fails over files of a packing beside it
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(sys.executable, "setup.py", "-q", *egg, *commands, SOURCE_DATE_EPOCH="1700000000")
    assert done.returncode == 0, done.stderr


def test_the_sdist_is_the_repository(tmp_path: Path) -> None:
    """So it builds where the repository does, and its tests run."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard")
    if listed.returncode:
        pytest.skip("needs a git checkout: what the sdist is compared with")
    package(tmp_path, "sdist", "-d", tmp_path)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {member.name.partition("/")[2] for member in tar if member.isfile()}
    tracked = {name for name in listed.stdout.splitlines() if not name.startswith(".") and (ROOT / name).exists()}
    assert held - {"PKG-INFO", "setup.cfg"} == tracked


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for stale in (ROOT / "build").glob("lib*"):
        shutil.rmtree(stale)
    folder = tmp_path_factory.mktemp("wheel")
    package(folder, "bdist_wheel", "--bdist-dir", folder / "bdist", "-d", folder)
    return next(folder.glob("*.whl"))


def test_a_wheel_is_as_promised_and_faults_are_found(wheel: Path, tmp_path: Path) -> None:
    if shutil.which("nm") is None:
        pytest.skip("nm is not on PATH")
    package(tmp_path, "bdist_wheel", "--bdist-dir", tmp_path / "bdist", "-d", tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert [fault for fault in check_wheel.faults(wheel, again) if "manylinux" not in fault] == []
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".cdx.json"))
        bom = json.loads(archive.read(name))
        members = {member: archive.read(member) for member in archive.namelist()}
    assert bom["metadata"]["component"]["purl"] == f"pkg:pypi/sinkattn@{_C.version}"
    assert bom["metadata"]["timestamp"] == "2023-11-14T22:13:20Z"
    assert {"type": "framework", "version": torch.__version__.split("+")[0]}.items() <= bom["components"][-1].items()

    binding = _C.binding_for(torch.__version__).name
    members["sinkattn/_lib/libsinkattn.so.9"] = members[f"sinkattn/_lib/{binding}"] + str(ROOT).encode()
    wrong = tmp_path / "sinkattn-0-py3-none-manylinux_2_34_x86_64.whl"
    with zipfile.ZipFile(wrong, "w") as archive:
        for member, data in members.items():
            archive.writestr(member, data)
    found = "\n".join(check_wheel.faults(wrong, wheel))
    for fault in ("differ", "the SBOM's files are not the wheel's", "so.9 names a folder", "so.9 has the symbol _ZN"):
        assert fault in found, found


def test_nvcc_makes_the_same_bytes_in_any_folder(tmp_path: Path) -> None:
    if not shutil.which("nvcc"):
        pytest.skip("needs nvcc")
    objects = []
    for folder in (tmp_path / "one", tmp_path / "another" / "deeper"):
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        shutil.copy(ROOT / "Makefile", folder)
        made = run("make", "-C", folder, "build/native/csrc/cuda/append.cu.o", NVCC="nvcc")
        assert made.returncode == 0, made.stderr
        objects.append((folder / "build" / "native" / "csrc" / "cuda" / "append.cu.o").read_bytes())
    assert objects[0] == objects[1]
    assert str(tmp_path).encode() not in objects[0]


def test_the_wheel_runs_away_from_its_sources(wheel: Path, tmp_path: Path) -> None:
    said = re.search(r"A wheel has ([\d.]+) MB without CUDA and\s([\d.]+) MB with", (ROOT / "README.md").read_text())
    assert said
    assert wheel.stat().st_size / 1e6 == pytest.approx(float(said[1 + with_cuda()]), rel=0.15), "README's wheel size"
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    held, sources = (
        {
            str(path.relative_to(folder))
            for path in (folder / "sinkattn").rglob("*")
            if path.suffix in (".py", ".pyi", ".typed")
        }
        for folder in (installed, ROOT)
    )
    assert held == sources
    assert "sinkattn/py.typed" in held
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    assert "sinkattn = sinkattn.verl_patch" in entry_points.read_text()
    assert "-py3-none-linux" in wheel.name
    code = "import sinkattn, runpy; print(sinkattn._C.FOLDER); runpy.run_module('sinkattn', run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(f"{installed}/sinkattn/_lib"), done.stdout + done.stderr
    assert re.search(rf"^sinkattn +{_C.version}$", done.stdout, re.MULTILINE), done.stdout


def module(folder: Path, name: str, text: str) -> str:
    (folder / f"{name}.py").write_text(text)
    return str(folder)


def test_building_without_torch_says_what_to_install(tmp_path: Path) -> None:
    path = module(tmp_path, "torch", "raise ImportError('hidden by the test')")
    done = run(sys.executable, "setup.py", "--version", PYTHONPATH=path)
    assert done.returncode == 1
    sentence = done.stderr.strip().splitlines()[-1]
    assert "there is none here" in sentence
    assert "pip install torch==" in sentence
    assert "pip install --no-build-isolation ." in sentence


def test_building_with_old_setuptools_says_which(tmp_path: Path) -> None:
    path = module(tmp_path, "setuptools", "__version__ = '65.5.0'")
    done = run(sys.executable, "setup.py", "--version", PYTHONPATH=path)
    assert done.returncode == 1
    assert "sinkattn needs setuptools 77 or newer to build, this is 65.5.0" in done.stderr


def test_another_torch_is_refused() -> None:
    done = run(sys.executable, "-c", "import torch; torch.__version__ = '2.4.1'; import sinkattn")
    inside = ", ".join(re.escape(release) for release in _C.bindings())
    assert re.search(
        rf"ImportError: sinkattn has operators for torch {inside}, this is torch 2\.4\.1; install a sinkattn",
        done.stderr,
    )


def copied(folder: Path) -> Path:
    """The package's files that it is loaded by, without their libraries."""
    package = folder / "sinkattn"
    (package / "_lib").mkdir(parents=True)
    for name in ("__init__.py", "_C.py"):
        shutil.copy(ROOT / "sinkattn" / name, package)
    return package


def import_error(folder: Path) -> str:
    no_finder_of_editable_installs = "sys.meta_path = [x for x in sys.meta_path if 'editable' not in repr(x).lower()]"
    code = f"import sys; {no_finder_of_editable_installs}; sys.path.insert(0, {str(folder)!r}); import sinkattn"
    return run(sys.executable, "-c", code, PYTHONSAFEPATH="1").stderr.strip().splitlines()[-1]


def test_the_source_folder_of_an_installed_package_is_explained(tmp_path: Path) -> None:
    """Python takes the package beside it, which `pip install .` leaves without its libraries."""
    package = copied(tmp_path)
    assert import_error(tmp_path).startswith(
        f"ImportError: sinkattn: {package} has the sources and no library; where sinkattn is installed"
    )


def test_libraries_that_do_not_load_are_explained(tmp_path: Path) -> None:
    package = copied(tmp_path)
    (library,) = _C.FOLDER.glob("libsinkattn.so.*")
    binding = _C.binding_for(torch.__version__)
    shutil.copy(library, package / "_lib")
    (package / "_lib" / binding.name).write_bytes(b"")
    assert re.match(r"ImportError: sinkattn's operators do not load under torch \S+ \(.*", import_error(tmp_path))
    (package / "_lib" / library.name).write_bytes(b"")
    assert import_error(tmp_path).startswith("ImportError: sinkattn's library does not load on this machine (")


def told(folder: Path) -> str:
    done = run(sys.executable, "-m", "sinkattn", "doctor", PYTHONPATH=str(folder), PYTHONSAFEPATH="1")
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def test_the_doctor_says_why_an_import_fails(tmp_path: Path) -> None:
    package = copied(tmp_path)
    shutil.copy(ROOT / "sinkattn" / "doctor.py", package)
    assert re.match(r"\[no\]  library     \S+ has the sources and no library", told(tmp_path))
    (library,) = _C.FOLDER.glob("libsinkattn.so.*")
    shutil.copy(library, package / "_lib")
    (tmp_path / "torch.py").write_text("raise ImportError('hidden by the test')")
    hidden = told(tmp_path)
    assert re.search(r"\[ok\]  library .*\n\[no\]  torch       torch does not import \(hidden by the test\)", hidden)
    (tmp_path / "torch.py").unlink()
    (package / "_lib" / "torch9.9.so").touch()
    assert re.search(r"\[no\]  operators   sinkattn has operators for torch 9\.9, this is torch 2", told(tmp_path))
    (package / "_lib" / _C.binding_for(torch.__version__).name).touch()
    assert re.search(r"\[no\]  operators   torch\S+ does not load under torch \S+ \(", told(tmp_path))


def test_the_doctor_finds_nothing_wrong_here() -> None:
    done = run(sys.executable, "-m", "sinkattn", "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.split()[1] for line in done.stdout.splitlines() if line.startswith("[ok]")] == [
        *("library", "torch", "operators", "sinkattn", "cpu", "cuda", "plans", "self-tests")
    ]
    assert done.stdout.endswith("\nNothing is wrong here.\n")


@pytest.mark.parametrize(
    ("releases", "ordered"), [(["2.9", "2.15", "2.10"], ["2.9", "2.10", "2.15"]), (["3.0", "2.15"], ["2.15", "3.0"])]
)
def test_bindings_are_in_the_releases_order(
    releases: list[str], ordered: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for release in releases:
        (tmp_path / f"torch{release}.so").touch()
    monkeypatch.setattr(_C, "FOLDER", tmp_path)
    assert list(_C.bindings()) == ordered
    assert _C.binding_for(f"{ordered[-1]}.1+cu130") == tmp_path / f"torch{ordered[-1]}.so"


def test_planted_bugs_have_their_place() -> None:
    """tools/mutation_check.py replaces text of the sources; that takes minutes, so here only whether it could."""
    assert len(MUTATIONS) >= 30
    assert [m.name for m in MUTATIONS if m.old not in (ROOT / m.path).read_text()] == []
    entries = "".join(path.read_text() for path in ROOT.glob("tests/c/test_*.c"))
    for m in MUTATIONS:
        file, _, test = m.test.partition("::")
        found = f"TEST({m.test.split()[1]})" in entries if m.of_c_suite else f"def {test}(" in (ROOT / file).read_text()
        assert found, f"{m.name}: there is no {m.test}"
