# SPDX-License-Identifier: Apache-2.0
"""`make install`: its files, what the shared library exports, and programs that link as sinkattn.pc says."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from string import Template

import pytest

import sinkattn

ROOT = Path(__file__).parent.parent
SONAME = "libsinkattn.so." + sinkattn.__version__.rpartition(".")[0]


def run(*command: str | Path, **environment: str) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("install") / "usr"
    run("make", "install", f"PREFIX={folder}", "WERROR=")
    return folder


def pkg_config(prefix: Path) -> dict[str, str]:
    values: dict[str, str] = {}
    for line in (prefix / "lib/pkgconfig/sinkattn.pc").read_text().splitlines():
        name, sign, value = line.partition("=" if "=" in line.partition(":")[0] else ":")
        if sign:
            values[name] = Template(value.strip()).substitute(values)
    return values


def test_files(prefix: Path) -> None:
    library = f"libsinkattn.so.{sinkattn.__version__}"
    assert sorted(path.name for path in (prefix / "lib").iterdir()) == sorted(
        ["libsinkattn.a", "libsinkattn.so", SONAME, library, "pkgconfig"]
    )
    assert (prefix / "lib/libsinkattn.so").resolve() == (prefix / "lib" / library).resolve()
    assert (prefix / "include/sinkattn.h").read_text() == (ROOT / "csrc/include/sinkattn.h").read_text()


def test_destdir_is_no_part_of_the_prefix(tmp_path: Path) -> None:
    run("make", "install", f"DESTDIR={tmp_path}", "PREFIX=/opt/sinkattn", "WERROR=")
    found = pkg_config(tmp_path / "opt/sinkattn")
    assert (found["prefix"], found["Version"]) == ("/opt/sinkattn", sinkattn.__version__)


def test_the_shared_library_exports_the_header_alone(prefix: Path) -> None:
    if not shutil.which("nm"):
        pytest.skip("nm is not on PATH")
    listed = run("nm", "-D", "--defined-only", prefix / "lib/libsinkattn.so").splitlines()
    exported = {line.split()[-1] for line in listed}
    assert exported == {
        "sinkattn_" + name
        for name in (
            *("query_cpu", "query_cuda", "variant", "make_plan", "fwd", "bwd", "decode", "append"),
            *("check_errors", "build_info", "visible_pairs"),
        )
    }
    if shutil.which("readelf"):
        assert f"soname: [{SONAME}]" in run("readelf", "-d", prefix / "lib/libsinkattn.so")


def test_programs_link_both(prefix: Path, tmp_path: Path) -> None:
    found = pkg_config(prefix)
    printed = []
    for kind in ("Libs", "static_libs"):
        program = tmp_path / kind
        flags = shlex.split(
            f"{found['Cflags']} {ROOT}/examples/attention.c {found[kind]} -lm"
        )  # the example itself calls exp
        run("cc", "-std=c11", "-o", program, *flags)
        printed.append(run(program, LD_LIBRARY_PATH=str(prefix / "lib") if kind == "Libs" else ""))
    assert "sink's share of each row" in printed[0]
    assert printed[0] == printed[1]
    if shutil.which("pkg-config"):
        path = str(prefix / "lib/pkgconfig")
        asked = run("pkg-config", "--cflags", "--libs", "sinkattn", PKG_CONFIG_PATH=path)
        assert asked.split() == shlex.split(f"{found['Cflags']} {found['Libs']}")
        assert (
            run("pkg-config", "--variable=static_libs", "sinkattn", PKG_CONFIG_PATH=path).strip()
            == found["static_libs"]
        )
