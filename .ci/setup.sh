#!/bin/sh
# Makes the virtual environment $1 and installs trainwright with its tools, once for each state of pyproject.toml and
# constraints.txt, or of the file that CONSTRAINTS names. A half-made environment, or one whose checkout or interpreter
# has moved, is rebuilt. PYTHON names the interpreter; by default the first good one on PATH.
set -eu

venv=$1
mark=$venv/.made-by-make
stamp=$venv/.set-up
constraints=${CONSTRAINTS:-constraints.txt}

fail() {
    printf 'trainwright: %s\n' "$@" >&2
    exit 1
}

good() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

describe() {
    version=$("$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || return 0
    if good "$1"; then return 0; fi
    case $version in
    3.1[1-3].*) echo "$1 is $version but lacks venv (on Debian and Ubuntu: apt-get install python3-venv)" ;;
    *) echo "$1 is $version" ;;
    esac
}

choose() {
    candidates=${PYTHON:-python3 python3.11 python3.12 python3.13 python}
    for candidate in $candidates; do
        if good "$candidate"; then
            command -v "$candidate"
            return 0
        fi
    done
    found=$(for candidate in $candidates; do describe "$candidate"; done)
    fail "Python 3.11, 3.12 or 3.13 is needed; found: ${found:-none of $candidates}" \
        "install it, or name one: make PYTHON=/path/to/python3.11"
}

# What the environment stands on: the place that it and the editable install point to, then the requirements.
state() {
    echo "$venv in $(pwd)"
    cat pyproject.toml "$constraints" | cksum
}

# Compiles to bytecode only what gets imported, which is a tenth of what is installed; the imports are also the proof.
# PYTHONDONTWRITEBYTECODE, which containers like to set, would make each of Ray's processes compile it all again.
install() {
    {
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-input --no-compile \
            --constraint "$constraints" --editable '.[dev]' &&
            (
                unset PYTHONDONTWRITEBYTECODE
                "$venv/bin/python" -c 'if True:
                    import compileall, pathlib
                    import trainwright.cli.main  # before the frameworks: it keeps them apart
                    import matplotlib.pyplot, pandas, ray.data, tensorflow, torch._dynamo
                    for part in ("_common", "_private", "dashboard"):
                        compileall.compile_dir(pathlib.Path(ray.__file__).parent / part, quiet=2)'
            )
    } >"$venv/set-up.log" 2>&1 </dev/null || {
        tail -n 20 "$venv/set-up.log" >&2
        fail "the packages could not be installed: the reason is above, all of it in $venv/set-up.log"
    }
}

make_anew() {
    if [ -e "$venv" ]; then
        [ -f "$mark" ] || rmdir "$venv" 2>/dev/null ||
            fail "$venv was not made by make: move it away, or give another folder: make VENV=.venv-make"
        rm -rf "$venv"
    fi
    python=$(choose)
    echo "setting up $venv with $python (once, a few minutes)"
    mkdir -p "$venv"
    touch "$mark"
    "$python" -m venv "$venv"
}

now=$(state)
before=$(cat "$stamp" 2>/dev/null || true)
"$venv/bin/python" -c '' 2>/dev/null || before=
if [ "$before" = "$now" ]; then
    exit 0
fi
started=$(date +%s)
if [ "$(echo "$before" | head -n 1)" = "$(echo "$now" | head -n 1)" ]; then
    echo "bringing $venv up to date: pyproject.toml or $constraints has changed"
    rm "$stamp"
else
    make_anew
    echo "installing torch, TensorFlow, Ray and the tools of $constraints"
fi
install
echo "$now" >"$stamp"
echo "set up in $(($(date +%s) - started)) s"
