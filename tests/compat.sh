#!/usr/bin/env bash
# Runs the suite for single environments where users are who cannot upgrade: gymnasium 0.29 with NumPy 1.26, and the
# oldest and the newest Python found here. Environments are made in .venv-compat-*.
set -euo pipefail
cd "$(dirname "$0")/.."

# The interpreters of the versions that we claim, oldest first: on the PATH, or installed by pyenv.
found=()
for version in 3.10 3.11 3.12 3.13 3.14; do
    for candidate in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python; do
        if "$candidate" -c 'import venv' 2>/dev/null; then
            found+=("$(command -v "$candidate")")
            break
        fi
    done
done
[ "${#found[@]}" -gt 0 ] || { echo "compat: no Python from 3.10 to 3.14 found" >&2; exit 1; }
oldest=${found[0]}
newest=${found[${#found[@]} - 1]}

suite() { # name, python, requirements ...
    local directory=".venv-compat-$1" python=$2
    shift 2
    echo "== $directory: $("$python" --version), $*"
    [ -x "$directory/bin/python" ] || "$python" -m venv "$directory"
    "$directory/bin/pip" install --quiet --disable-pip-version-check -e '.[test]' "$@"
    "$directory/bin/python" -m pytest -q -n 2 tests
}

suite oldest "$oldest" 'gymnasium==0.29.*' 'numpy==1.26.*'
suite oldest-latest "$oldest" gymnasium numpy
[ "$newest" = "$oldest" ] || suite newest "$newest" gymnasium numpy
