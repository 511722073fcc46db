#!/usr/bin/env bash
# Records golden traces of every environment of the packages below in golden/PACKAGE, in environments of their own
# (.venv-corpus*, 2 GB), and verifies them. Environments that have a trace are not recorded again.
# WITH="mujoco==3.3.5 …": only verifies, with these versions. PACKAGES="gymnasium minigrid": of these packages alone.
set -uo pipefail
cd "$(dirname "$0")/.."
. tests/environment.sh
failed=0

corpus() { # name, its packages, requirements ...
    local python=".venv-$1/bin/python" package chosen=() importable=()
    for package in $2; do
        [[ " ${PACKAGES:-$2} " != *" $package "* ]] || chosen+=("$package")
    done
    [ ${#chosen[@]} -gt 0 ] || return 0
    environment "$1" "${@:3}"
    for package in "${chosen[@]}"; do
        if "$python" -c "import $package" 2>/dev/null; then importable+=("$package"); else echo "corpus: cannot import $package"; fi
    done
    [ ${#importable[@]} -gt 0 ] || return 0
    if [ -z "${WITH:-}" ]; then
        "$python" tests/corpus.py record golden "${importable[@]}" || failed=1
        "$python" tests/corpus.py verify golden "${importable[@]}" || failed=1
    else # Python finds these versions first; those of .venv-* stay as they are
        rm -rf build/versions
        "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target build/versions $WITH || exit 1
        PYTHONPATH="$PWD/build/versions" "$python" tests/corpus.py verify golden "${importable[@]}" || failed=1
    fi
}

corpus corpus 'gymnasium ale_py minigrid mo_gymnasium highway_env envpool pettingzoo mpe2' \
    'gymnasium[box2d,classic-control,mujoco,toy-text]' ale-py minigrid mo-gymnasium highway-env envpool \
    'pettingzoo[butterfly,classic,sisl]' mpe2
# As in tests/strangers.sh, Shimmy and gymnasium-robotics know no newer MuJoCo.
corpus corpus-mujoco3 'shimmy gymnasium_robotics' 'mujoco<3.5' 'shimmy[dm-control]' gymnasium-robotics
exit "$failed"
