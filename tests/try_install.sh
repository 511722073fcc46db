#!/usr/bin/env bash
# Tries the gym-trace on the PATH: it records, verifies and reads a trace. try_install.sh yes|no: whether its C core must be in use.
set -euo pipefail
cd "$(mktemp -d)" # not in the checkout, whose packages would be found first
trap 'rm -rf "$PWD"' EXIT
gym-trace --version | grep "^C core: $1"
gym-trace record CartPole-v1 -o trace --episodes 20 --seed 0 --quiet
gym-trace verify trace
python -c "import gym_trace; assert len(gym_trace.open_trace('trace')) == 20"
