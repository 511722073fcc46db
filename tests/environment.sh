# environment NAME REQUIREMENT ...: make .venv-NAME with gym-trace and these packages. Sourced by scripts in the repository's root.
environment() {
    local directory=".venv-$1" requirement
    shift
    [ -x "$directory/bin/python" ] || "${PYTHON:-python3}" -m venv "$directory" || exit 1
    echo "== $directory: $*"
    "$directory/bin/pip" install --quiet --disable-pip-version-check -e . pytest pytest-timeout pytest-xdist || exit 1
    "$directory/bin/pip" install --quiet --disable-pip-version-check "$@" && return
    for requirement in "$@"; do # a package that does not install is reported, and the others are installed
        "$directory/bin/pip" install --quiet --disable-pip-version-check "$requirement" ||
            echo "$requirement does not install on $("$directory/bin/python" --version)"
    done
}
