#!/usr/bin/env bash
# Loads what export writes with the packages that people train with, in environments of their own: .venv-interop-main,
# .venv-interop-lerobot (Python 3.12), .venv-interop-tfds, .venv-interop-appo and .venv-interop-simulators. Prints their versions at
# the end of each.
# ONLY="main tfds": of these; ONLY=ci: what every change has to pass, in .venv-interop-ci (make check-extras).
# LEROBOT_PYTHON: a Python 3.12. Arguments go to pytest, such as -k minari.
set -uo pipefail
cd "$(dirname "$0")/.."
failed=0
only="${ONLY:-main lerobot tfds appo simulators}"
# On the PATH, or installed by pyenv.
for candidate in "${LEROBOT_PYTHON:-python3.12}" "$HOME/.pyenv/versions/3.12".*/bin/python; do
    "$candidate" -c 'import venv' 2>/dev/null && lerobot_python="$candidate" && break
done
envs=('gymnasium[classic-control,mujoco,toy-text]>=1.3' 'ale-py>=0.12' 'minigrid>=3.2')
tools=(hatchling 'setuptools>=61' pytest pytest-timeout pytest-xdist hypothesis)
loaders=('torch==2.13.0' 'torchrl==0.14.1' 'minari[hdf5,arrow,create]==0.5.4' 'stable-baselines3==2.9.2'
    'duckdb>=2.0' 'polars>=2.1' 'pandas>=2' 'pyarrow==26.0.1' 'h5py>=3.14')

environment() { # name, python, extras of gym-trace, requirements ...
    local directory=".venv-interop-$1" python="$2" extras="$3"
    shift 3
    [ -x "$directory/bin/python" ] || "$python" -m venv "$directory" || return 1
    echo "== $directory: $*"
    "$directory/bin/pip" install --quiet --disable-pip-version-check "${tools[@]}" "${envs[@]}" "$@" || return 1
    "$directory/bin/pip" install --quiet --disable-pip-version-check -e ".[$extras]"
}

without_dependencies() { # name, requirements ...: of packages that would have us install another gymnasium
    local directory=".venv-interop-$1"
    shift
    "$directory/bin/pip" install --quiet --disable-pip-version-check --no-deps "$@"
}

suite() { # name, pytest arguments ...
    local directory=".venv-interop-$1"
    shift
    "$directory/bin/python" -m pytest -q -c tests/interop/pytest.ini "$@" || [ $? = 5 ] || failed=1 # 5: none chosen
}

pages() { # name: the examples of the site that need its packages
    ".venv-interop-$1/bin/python" -m pytest -q tests/test_pages.py -k "adapters or formats" || failed=1
}

for name in $only; do
    case "$name" in
    ci) # mypy with every extra, the training tests, the loaders, and the tests of make test that need an extra
        environment ci "${PYTHON:-python3}" dev,train,sb3,rerun "${loaders[@]}" array-api-compat && {
            .venv-interop-ci/bin/mypy || failed=1
            suite ci -n 2 tests/interop/test_{proof*,train_*,minari,parquet,adapters,torch,torchrl}.py "$@"
            .venv-interop-ci/bin/python -m pytest -q -n 2 \
                tests/test_{public_api,docstrings,readme,pages,layers,benchmarks}.py tests/training \
                tests/recording/test_vector_{tensors,devices}.py tests/exchange/formats/test_{rerun,hostile}_files.py || failed=1
        } || failed=1
        ;;
    main)
        environment main "${PYTHON:-python3}" video,minari,hdf5,parquet,lance,pettingzoo,mcap,rerun,train \
            "${loaders[@]}" 'ray[data]==2.60.0' 'pyspark==4.3.0' 'dask[dataframe]' daft \
            structlog colorama tqdm dataclasses_json datasets sacred 'huggingface_sb3' scikit-learn dm-tree msgpack-numpy ormsgpack tensorboardX \
            rlax 'jax[cpu]' scipy lz4 pyyaml gymnasium-robotics 'cloudpickle>=2.2' 'lancedb==0.40.0' loguru &&  # older ones cannot pickle functions of Python 3.11
            without_dependencies main 'd3rlpy==2.8.1' 'gym==0.26.2' gym_notices 'imitation==1.0.1' 'ray[rllib]==2.60.0' \
                'stable-worldmodel==0.1.1' &&
            suite main tests/interop --ignore tests/interop/test_lerobot.py --ignore tests/interop/test_rlds.py \
                --ignore tests/interop/test_sample_factory.py "$@" &&
            pages main || failed=1
        ;;
    lerobot)
        environment lerobot "${lerobot_python:-python3.12}" lerobot 'lerobot[dataset,av-dep]==0.6.1' && # an older PyAV than [video]
            suite lerobot tests/interop/test_conformance.py tests/interop/test_lerobot.py "$@" &&
            pages lerobot || failed=1
        ;;
    tfds)
        environment tfds "${PYTHON:-python3}" rlds 'tensorflow-cpu==2.21.0' 'tensorflow-datasets==4.9.10' &&
            suite tfds tests/interop/test_conformance.py tests/interop/test_rlds.py "$@" || failed=1
        ;;
    appo) # which needs an older Gymnasium and NumPy than the others
        envs=('gymnasium[classic-control]==0.29.1')
        environment appo "${PYTHON:-python3}" tensorboard 'sample-factory==2.1.1' &&
            suite appo tests/interop/test_sample_factory.py "$@" || failed=1
        ;;
    simulators) # without what drives robots and windows; SAPIEN needs no GPU for its data
        envs=('gymnasium[classic-control]>=1.3')
        environment simulators "${PYTHON:-python3}" hdf5 'torch==2.13.0' 'mujoco==3.3.7' scipy numba opencv-python-headless psutil tqdm \
            termcolor six imageio tensorboardX dacite transforms3d tabulate GitPython huggingface_hub tyro 'pytorch_kinematics==0.7.6' \
            pyyaml defusedxml nvidia-ml-py trimesh requests IPython &&
            without_dependencies simulators 'robosuite==1.5.2' 'robomimic==0.3.0' 'mani_skill==3.0.1' sapien &&
            suite simulators tests/interop/test_simulators_hdf5.py "$@" || failed=1
        ;;
    *)
        echo "interop: there is no $name; there are main, lerobot, tfds, appo, simulators and ci"
        exit 2
        ;;
    esac
done
exit "$failed"
