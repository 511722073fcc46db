#!/usr/bin/env bash
# Runs the tests under every minor version of Gymnasium that we claim, each on the oldest and on the newest Python found
# here, and prints a line for each pair; exits with 1 if one failed. The oldest and the newest Gymnasium get all tests,
# those between them what depends on Gymnasium. Environments are made in .venv-compat-*.
#
# ONLY="1.2 1.3" runs these versions alone.
set -euo pipefail
cd "$(dirname "$0")/.."

versions=(0.29 1.0 1.1 1.2 1.3 newest)
between=(
    test_vector test_vector_tensors test_vector_filters test_vector_copies test_foreign_environments test_wrappers
    test_episode_ends test_filters test_playback test_replay_env test_verification test_spaces test_make_env test_layers
    test_limits test_rollout test_readme test_cli_record test_cli_replay test_public_api test_written_bytes
)

. tests/pythons.sh
pythons=("${found[0]}")
[ "${#found[@]}" -eq 1 ] || pythons+=("${found[${#found[@]} - 1]}")

tried() { # version of gymnasium, python; says how it went
    local version=$1 python=$2 short requirements files=()
    short=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    requirements=("gymnasium==$version.*")
    case $version in
        0.29)
            # It uses names that NumPy 2 does not have, and no NumPy 1 is made for Python 3.13 and later.
            [ "${short#3.}" -le 12 ] || { echo "skipped: needs NumPy 1"; return; }
            requirements+=("numpy==1.26.*")
            ;;
        newest) requirements=(gymnasium numpy) ;;
        *) for name in "${between[@]}"; do files+=($(find tests -name "$name.py")); done ;;
    esac
    local directory=".venv-compat-$version-$short"
    echo "== gymnasium $version, Python $short" >&2
    [ -x "$directory/bin/python" ] || "$python" -m venv "$directory" >&2 || { echo "failed: no environment"; return; }
    "$directory/bin/pip" install --quiet --disable-pip-version-check -e '.[test]' "${requirements[@]}" >&2 ||
        { echo "failed: does not install"; return; }
    local status=0 log="$directory/tests.log"
    "$directory/bin/python" -m pytest -q -n 2 "${files[@]:-tests}" >"$log" 2>&1 || status=$?
    cat "$log" >&2
    # "in" is where the counts end: 5 passed, 1 skipped in 3.21s
    if [ "$status" -eq 0 ]; then echo "passed: $(tail -1 "$log" | sed 's/ in .*//; s/^=* //')"; else
        echo "failed: $(tail -1 "$log" | sed 's/ in .*//; s/^=* //')"
    fi
}

table=() failed=0
for version in "${versions[@]}"; do
    [ -z "${ONLY:-}" ] || [[ " $ONLY " == *" $version "* ]] || continue
    for python in "${pythons[@]}"; do
        outcome=$(tried "$version" "$python")
        table+=("$(printf 'gymnasium %-7s %-14s %s' "$version" "$("$python" --version)" "$outcome")")
        [[ $outcome != failed* ]] || failed=1
    done
done
printf '%s\n' "" "${table[@]}"
exit "$failed"
