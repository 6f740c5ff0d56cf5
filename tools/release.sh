#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# tools/release.sh: the checklist of a release, as far as a machine can tick it off. It stops at the first thing that is missing, changes
# nothing in git and publishes nothing.
set -euo pipefail
cd "$(dirname "$0")/.."

have() { echo "[ok] $1"; }
need() { echo "[  ] $1"; exit 1; }

version=$(sed -n 's/^#define SINKATTN_VERSION "\(.*\)"/\1/p' csrc/include/sinkattn.h)
[ -z "$(git status --porcelain)" ] && have 'the work tree is clean' || need 'commit or drop what git status shows'
grep -q "^## $version, [0-9]" CHANGELOG.md && have "CHANGELOG.md dates $version" || need "CHANGELOG.md must have a line \"## $version, DATE\""
newest=$(python3 -m pip index versions torch 2> /dev/null | sed -n 's/^torch (\([0-9]*\.[0-9]*\).*/\1/p')
make --no-print-directory -s show-torches | tr ' ' '\n' | grep -qx "$newest" && have "TORCHES has torch $newest, the newest" ||
    need "TORCHES of the Makefile lacks torch $newest, the newest"

.ci/run && have '.ci/run' || need '.ci/run passes'
make wheel && mkdir -p build/first && mv dist/*.whl build/first
rm -rf build/native && make wheel && have 'make wheel, twice, the second from nothing'
build/wheel-env/bin/python tools/check_wheel.py dist/*.whl build/first/*.whl && have 'the wheel is as promised, its two builds have the same bytes' ||
    need 'tools/check_wheel.py'
make test-wheel && have 'the wheel under each torch and Python of WHEEL_LEGS' || need 'make test-wheel'
sha256sum dist/*.whl
cat << END
What a person does then:
[  ] make test-gpu on an H200, from the installed wheel; its last lines into tests/results/
[  ] python -m benchmarks on the H200: no named case slower than the last release
[  ] git tag -s v$version && git push --tags: the release workflow builds, attests and publishes
[  ] compare the published wheel's sha256 with the one above
END
