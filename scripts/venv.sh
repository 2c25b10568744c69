# Sourced by the other scripts: makes .venv once and installs the package with its test extra there.
# PYTHON chooses the interpreter (default python3). Leaves $VENV_PYTHON and step() behind.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

step() { printf '== %s\n' "$*"; }

make_venv() {
    local python="${PYTHON:-python3}" stamp=.venv/optifx-installed version wanted
    VENV_PYTHON=.venv/bin/python
    "$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' || {
        echo "error: $("$python" --version 2>&1) found; Python 3.10 to 3.13 is needed:" \
            "set PYTHON=/path/to/python3.x" >&2
        return 2
    }
    version='import sys; print(sys.version)'
    if [ "$("$VENV_PYTHON" -c "$version" 2>/dev/null)" != "$("$python" -c "$version")" ]; then
        step "virtual environment in .venv"
        "$python" -m venv --clear .venv
    fi
    # The stamp holds what was installed from: a second run with the same files installs nothing.
    wanted="$PWD $(cat setup.py pyproject.toml optifx_tvm/__init__.py | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        step "install"
        "$VENV_PYTHON" -m pip install -qq --disable-pip-version-check --upgrade 'pip>=23.1'
        "$VENV_PYTHON" -m pip install -qq --disable-pip-version-check -e '.[test]'
        printf '%s' "$wanted" > "$stamp"
    fi
}
