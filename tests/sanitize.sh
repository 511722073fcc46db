#!/usr/bin/env bash
# Builds the C core with AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the sources, runs the tests that use it, and
# gives it odd objects for FUZZ seconds. Reports end the run. PYTHON is an interpreter that has what the tests need; arguments are tests,
# if not all that use the core. tests/recording/test_fork.py is left out: AddressSanitizer of GCC 12 deadlocks in a fork beside threads.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
[[ $PYTHON != */* || $PYTHON = /* ]] || PYTHON=$PWD/$PYTHON

copy=$PWD/build/sanitized
rm -rf "$copy"
mkdir -p "$copy"
cp -r gym_trace cli tests sample_traces examples hatch_build.py pyproject.toml README.md CHANGELOG.md docs "$copy"
cd "$copy"
rm -f gym_trace/*/_*.so

sanitizers="-fsanitize=address,undefined -fno-sanitize-recover=undefined"
CFLAGS="$sanitizers -fno-omit-frame-pointer -O1 -UNDEBUG" LDFLAGS="$sanitizers" "$PYTHON" hatch_build.py "$copy/objects"
cp objects/_core*.so gym_trace/recording/
cp objects/_kernels*.so gym_trace/format/

cc=${CC:-cc}
LD_PRELOAD="$($cc -print-file-name=libasan.so) $($cc -print-file-name=libubsan.so)"
export LD_PRELOAD PYTHONPATH=$copy:$copy/cli PYTHONMALLOC=malloc # or Python would hand out memory that is not watched
export ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=print_stacktrace=1
"$PYTHON" -c 'from gym_trace.recording import core, _core; assert core.CORE == "compiled"; print(_core.__file__)'
tests=("$@")
[ $# -gt 0 ] || tests=(tests/recording/test_{core,core_lanes,core_trees,text_rows,roundtrip,any_value,gaps,infos_and_annotations,episode_ends,frames,vector,vector_filters}.py tests/format/ring/test_lane_ring.py tests/format/test_{blocks,codec,hostile_traces,kernels,limits}.py)
"$PYTHON" -m pytest -q -p no:cacheprovider --capture=sys "${tests[@]}"
"$PYTHON" tests/recording/fuzz_core.py "${FUZZ:-60}"
