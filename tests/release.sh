#!/usr/bin/env bash
# Builds what a release would upload, into dist/, and tries it. Uploads nothing.
# The sdist and the wheel are built twice and must be equal, byte by byte; twine checks them; then each is installed into a
# fresh environment, with the C core and without, where it records, verifies and reads. PYTHON: for the environments.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}" tools="${BIN:-.venv/bin}"
[ -z "$(git status --porcelain)" ] || { echo "release: there are uncommitted changes; commit or stash them"; exit 1; }
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
SOURCE_DATE_EPOCH="$(git log -1 --format=%ct)"
export SOURCE_DATE_EPOCH PIP_DISABLE_PIP_VERSION_CHECK=1

# From a clean copy: no file that git does not know is published, and other paths make no other bytes.
for turn in first second; do
    git clone --quiet --no-hardlinks . "$scratch/$turn-clone"
    "$tools/python" -m build --no-isolation --outdir "$scratch/$turn" "$scratch/$turn-clone" > "$scratch/$turn.log" 2>&1 ||
        { cat "$scratch/$turn.log"; exit 1; }
done
diff <(cd "$scratch/first" && sha256sum ./*) <(cd "$scratch/second" && sha256sum ./*) ||
    { echo "release: two builds of the same commit differ"; exit 1; }
"$tools/twine" check --strict "$scratch"/first/*

tried() { # name, core (yes or no), what to install; environment variables apply
    "$python" -m venv "$scratch/$1"
    "$scratch/$1/bin/pip" install --quiet "$3"
    (
        cd "$scratch" # not in the checkout, whose packages would be found first
        "$scratch/$1/bin/gym-trace" --version | grep "^C core: $2"
        "$scratch/$1/bin/gym-trace" record CartPole-v1 -o "trace-$1" --episodes 20 --seed 0 --quiet
        "$scratch/$1/bin/gym-trace" verify "trace-$1"
        "$scratch/$1/bin/python" -c "import gym_trace; assert len(gym_trace.open_trace('trace-$1')) == 20"
    )
    echo "release: $1 works; C core: $2"
}

wheel="$(echo "$scratch"/first/*.whl)" sdist="$(echo "$scratch"/first/*.tar.gz)"
tried wheel yes "$wheel"
tried sdist yes "$sdist"
CC=no-such-compiler tried sdist-without-compiler no "$sdist"
GYM_TRACE_PURE=1 tried wheel-in-pure-python no "$wheel"

mkdir -p dist
rm -f dist/gym_trace-*
cp "$scratch"/first/* dist/
(cd dist && sha256sum ./*)
echo "release: dist/ has what to upload, e.g. with: twine upload dist/*"
