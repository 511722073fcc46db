#!/usr/bin/env bash
# Says what the release of this commit lacks; exits with 1 if there is something. TAG: the tag that is released, such as v0.1.0.
set -euo pipefail
version="$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' gym_trace/__init__.py)" lacks=0

lacking() {
    echo "release: $1"
    lacks=1
}

if unset="$(git grep -nE 'OWNER[./]' -- ':!tests' ':!viewer' ':!gym_trace/tools/viewer/static' | grep -v 'hf://datasets/OWNER/')"; then
    echo "$unset"
    lacking "OWNER stands for the account of the repository and for the domain of its addresses; replace it in these lines"
fi
fragments="$(git ls-files changes | grep -v '^changes/README.md$' || true)"
[ -z "$fragments" ] || lacking "changes/ has fragments; run make changelog and commit"
grep -q "^## $version (" CHANGELOG.md || lacking "CHANGELOG.md has no entry of $version; run make changelog and commit"
grep -q "^version: $version$" CITATION.cff || lacking "CITATION.cff has another version than gym_trace/__init__.py: $version"
[ -z "${TAG:-}" ] || [ "$TAG" = "v$version" ] || lacking "the tag $TAG is not v$version of gym_trace/__init__.py"
exit "$lacks"
