#!/usr/bin/env bash
# Records golden traces of every environment of the packages below in golden/PACKAGE, in environments of their own
# (.venv-corpus*, 4 GB), and verifies them. Environments that have a trace are not recorded again.
# WITH="mujoco==3.3.5 …": only verifies, with these versions. PACKAGES="gymnasium minigrid": of these packages alone.
set -uo pipefail
cd "$(dirname "$0")/.."
. tests/environment.sh
failed=0

corpus() { # name, package ...; the arguments of tests/corpus.py
    local python="$PWD/.venv-$1/bin/python" package chosen=()
    shift
    for package in "$@"; do
        if [[ " ${PACKAGES:-$*} " == *" $package "* ]]; then
            "$python" -c "import $package" 2>/dev/null && chosen+=("$package") || echo "corpus: $package cannot be imported"
        fi
    done
    [ ${#chosen[@]} -gt 0 ] || return 0
    if [ -z "${WITH:-}" ]; then
        "$python" tests/corpus.py record golden "${chosen[@]}" || failed=1
        "$python" tests/corpus.py verify golden "${chosen[@]}" || failed=1
    else # other versions are found first; those of .venv-* stay as they are
        rm -rf build/versions
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target build/versions $WITH || exit 1
        PYTHONPATH="$PWD/build/versions" "$python" tests/corpus.py verify golden "${chosen[@]}" || failed=1
    fi
}

environment corpus 'gymnasium[box2d,classic-control,mujoco,toy-text]' ale-py minigrid mo-gymnasium highway-env envpool \
    'pettingzoo[butterfly,classic,sisl]' mpe2
corpus corpus gymnasium ale_py minigrid mo_gymnasium highway_env envpool pettingzoo mpe2
# As in tests/strangers.sh, Shimmy and gymnasium-robotics know no newer MuJoCo.
environment corpus-mujoco3 'mujoco<3.5' 'shimmy[dm-control]' gymnasium-robotics
corpus corpus-mujoco3 shimmy gymnasium_robotics
exit "$failed"
