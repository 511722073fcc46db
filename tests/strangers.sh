#!/usr/bin/env bash
# Records, compares and verifies environments of other people's packages, in environments of their own (.venv-strangers*, 8 GB).
# SOURCES=DIR: a directory with checkouts of Gymnasium and Minari, whose own tests are run with a recorder injected.
# Arguments go to pytest, such as -k envpool.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=0

. tests/environment.sh

suite() { # name, pytest arguments ...
    local directory=".venv-$1"
    shift
    "$directory/bin/python" -m pytest -q -n 2 -c tests/strangers/pytest.ini "$@" || [ $? = 5 ] || failed=1  # 5: none chosen
}

environment strangers 'gymnasium[jax,mujoco]' opencv-python-headless torch==2.13.0 'minari[create,hdf5]' envpool supersuit \
    'pettingzoo[butterfly,classic,sisl]' mpe2 mo-gymnasium torchrl stable-baselines3 vizdoom highway-env minigrid ale-py
suite strangers tests/strangers --ignore tests/strangers/test_shimmy.py --ignore tests/strangers/test_gymnasium_robotics.py \
    --ignore tests/strangers/test_dm_control.py --ignore tests/strangers/test_textarena.py --ignore tests/strangers/test_gymnax.py \
    --ignore tests/strangers/test_mjlab.py --ignore tests/strangers/test_simulators.py "$@"
# Gymnasium's own tests, with a recorder injected. What it uploads to PyPI has none of those for vectors and wrappers.
if [ -d "${SOURCES:-}/Gymnasium/tests" ]; then
    injected="$PWD/tests/strangers"
    python="$PWD/.venv-strangers/bin/python"
    (cd "$SOURCES/Gymnasium" &&
        PYTHONPATH="$injected" "$python" -m pytest -q -n 2 -p injected tests/vector tests/wrappers) || failed=1
else
    echo "strangers: Gymnasium's own tests are not run; SOURCES=DIR names a directory with a checkout of Gymnasium in it"
fi
# Shimmy and gymnasium-robotics know no newer MuJoCo, and gymnax no Gymnasium 1.4.
environment strangers-mujoco3 'mujoco<3.5' 'shimmy[dm-control]' gymnasium-robotics 'gymnax>=1' six torch==2.13.0
suite strangers-mujoco3 tests/strangers/test_shimmy.py tests/strangers/test_gymnasium_robotics.py tests/strangers/test_gymnax.py "$@"
environment strangers-dm 'mujoco<4' dm_control textarena
suite strangers-dm tests/strangers/test_dm_control.py tests/strangers/test_textarena.py "$@"
# GPU simulators, on the CPU. mjlab pins MuJoCo.
environment strangers-simulators 'mjlab>=1.6' brax 'mujoco-mjx==3.11.*' newton torch==2.13.0
suite strangers-simulators tests/strangers/test_mjlab.py tests/strangers/test_simulators.py "$@"
exit "$failed"
