# Sourced by the scripts beside it. Finds a Python, makes a virtual environment for it once, and says in one
# line what is missing when it cannot.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
everything=dev,cli,metrics,redis # the extras that tests, checks and benchmarks need

fail() { # message
    printf '%s: %s\n' "${0##*/}" "$1" >&2
    exit 1
}

misused() { # the argument that is not understood
    printf '%s: unknown argument: %s\n%s\n' "${0##*/}" "$1" "$usage" >&2
    exit 2
}

# Look at an interpreter: sets version, new_enough, base (where it is installed) and found (its path, or that of
# the one it was made from when it is an environment's), or fails if it does not run.
look_at() {
    local seen
    seen=$("$1" -c 'import sys
print("%d.%d.%d" % sys.version_info[:3])
print(sys.version_info >= (3, 11))
print(getattr(sys, "base_prefix", sys.prefix))
print(getattr(sys, "_base_executable", sys.executable))' 2>/dev/null </dev/null) || return 1
    { read -r version && read -r new_enough && read -r base && read -r found; } <<<"$seen"
}

find_python() {
    local candidate too_old=
    if [ -n "${PYTHON:-}" ]; then
        look_at "$PYTHON" || fail "PYTHON=$PYTHON does not run"
        [ "$new_enough" = True ] || fail "Python 3.11 or later is needed; PYTHON=$PYTHON is $version"
        return
    fi
    for candidate in python3 python3.13 python3.12 python3.11; do
        look_at "$candidate" || continue
        [ "$new_enough" = True ] && return
        too_old="$too_old; $candidate is $version"
    done
    fail "Python 3.11 or later is needed and was not found$too_old (PYTHON=/path/to/python names one)"
}

# Make sure of an environment with the given extras: sets venv. It is filled again when pyproject.toml or
# constraints.txt has changed, and made anew when the interpreter or the place of the checkout has.
prepare() { # cli | $everything
    local extras=$1 wanted place have
    find_python
    venv=$root/.venv-${version%.*}
    place="$root $base $version"
    wanted="$place $(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum)"
    have=$(cat "$venv/installed" 2>/dev/null || true)
    [ -x "$venv/bin/python" ] || have=
    case $have in "$wanted $everything" | "$wanted $extras") return ;; esac

    if [ -e "$venv" ]; then [ -w "$venv" ]; else [ -w "$root" ]; fi || fail "cannot write to $venv"
    "$found" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "$found lacks the module venv or ensurepip (on Debian and Ubuntu: install python3-venv)"
    printf '%s: preparing %s (once; this may take a minute)\n' "${0##*/}" "${venv##*/}" >&2
    case $have in
        "$place "*) rm -f "$venv/installed" ;;
        *) "$found" -m venv --clear "$venv" || fail "$found could not make $venv" ;;
    esac
    (cd "$root" && "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
        -c constraints.txt -e ".[$extras]") || fail "pip could not fill $venv"
    printf '%s\n' "$wanted $extras" >"$venv/installed"
}

# Programs that tests run, beside what pip brings: installed where that is possible. Elsewhere the tests say what is
# missing.
provide_programs() {
    local program packages=()
    for program in systemd-analyze:systemd memcached:memcached; do # :the Debian package that has it
        command -v "${program%:*}" >/dev/null || packages+=("${program#*:}")
    done
    [ ${#packages[@]} != 0 ] || return 0
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then return; fi
    printf '%s: installing %s, for the tests (once)\n' "${0##*/}" "${packages[*]}" >&2
    local install="env DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends ${packages[*]}"
    if ! { $install || { apt-get -qq update && $install; }; } </dev/null >/dev/null 2>&1; then
        printf '%s: apt-get could not install %s\n' "${0##*/}" "${packages[*]}" >&2
    fi
}
