# Sourced: found=(...) are the interpreters of the versions that we claim, oldest first: on the PATH, or installed by pyenv.
found=()
for version in 3.10 3.11 3.12 3.13 3.14; do
    for candidate in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python; do
        if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then
            found+=("$("$candidate" -c 'import sys; print(sys.executable)')")
            break
        fi
    done
done
[ "${#found[@]}" -gt 0 ] || { echo "no Python from 3.10 to 3.14 found" >&2; exit 1; }
