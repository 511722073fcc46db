#!/usr/bin/env bash
# Builds what a release uploads, into dist/, and tries it: the sdist, the wheel in pure Python, and on Linux a wheel with the C core for
# each interpreter of PYTHONS (all that are found; "none" for none). Uploads nothing.
# All are built twice and must be equal, byte by byte; auditwheel gives the wheels the oldest manylinux tag that they keep; twine
# checks them; then each is installed into a fresh environment, where it records, verifies and reads. PYTHON: for sdist and pure Python.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}" tools="${BIN:-$PWD/.venv/bin}"
[ -z "$(git status --porcelain)" ] || { echo "wheels: there are uncommitted changes; commit or stash them"; exit 1; }
case "${PYTHONS:-}" in
    "") . tests/pythons.sh ;;
    none) found=() ;;
    *) read -ra found <<< "$PYTHONS" ;;
esac
checkout="$PWD" scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)"
export SOURCE_DATE_EPOCH PIP_DISABLE_PIP_VERSION_CHECK=1

# From a clean copy: no file that git does not know is published, and other paths make no other bytes.
for turn in first second; do
    git clone --quiet --no-hardlinks . "$scratch/$turn-clone"
    mkdir "$scratch/$turn" "$scratch/$turn-linux"
done

logged() { # a command whose output is shown if it fails
    "$@" > "$scratch/log" 2>&1 || { cat "$scratch/log"; exit 1; }
}

built() { # python with the build tools, kind (sdist or wheel), folder; environment variables apply
    for turn in first second; do
        logged "$1" -m build "--$2" --no-isolation --outdir "$scratch/$turn$3" "$scratch/$turn-clone"
    done
}

fresh() { # name, python, what to install
    "$2" -m venv --without-pip "$scratch/$1" # a pip of its own would take longer than all else
    logged "$tools/python" -m pip --python "$scratch/$1/bin/python" install --quiet "${@:3}"
}

tried() { # name, python, core (yes or no), what to install; environment variables apply
    fresh "$1" "$2" "$4"
    PATH="$scratch/$1/bin:$PATH" logged bash "$checkout/tests/try_install.sh" "$3"
    rm -rf "${scratch:?}/$1"
    echo "wheels: $1 works; C core: $3"
}

built "$tools/python" sdist ""
GYM_TRACE_PURE=1 built "$tools/python" wheel ""
for each in "${found[@]}"; do
    fresh tools "$each" build hatchling 'numpy>=2' setuptools
    built "$scratch/tools/bin/python" wheel -linux
    rm -rf "$scratch/tools"
done
for turn in first second; do
    for wheel in "$scratch/$turn-linux"/*.whl; do
        [ -e "$wheel" ] || continue # no interpreter
        PATH="$tools:$PATH" logged "$tools/auditwheel" repair --wheel-dir "$scratch/$turn" "$wheel"
    done
done
diff <(cd "$scratch/first" && sha256sum ./*) <(cd "$scratch/second" && sha256sum ./*) ||
    { echo "wheels: two builds of the same commit differ"; exit 1; }
"$tools/twine" check --strict "$scratch"/first/*

for each in "${found[@]}"; do
    tag="$("$each" -c 'import sys; print("cp%d%d" % sys.version_info[:2])')"
    tried "$tag" "$each" yes "$(echo "$scratch"/first/*-"$tag"-*.whl)"
done
pure="$(echo "$scratch"/first/*-none-any.whl)" sdist="$(echo "$scratch"/first/*.tar.gz)"
tried sdist "$python" yes "$sdist"
CC=no-such-compiler tried sdist-without-compiler "$python" no "$sdist"
tried pure-python "$python" no "$pure"

mkdir -p dist
rm -f dist/gym_trace-*
cp "$scratch"/first/* dist/
(cd dist && sha256sum ./* && ls -l)
