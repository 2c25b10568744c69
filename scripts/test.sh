#!/usr/bin/env bash
# Everything that must hold before a commit: virtual environment, install, lint, type check, tests.
# Arguments go to pytest (for example: bash scripts/test.sh tests/test_cli.py).
set -euo pipefail
bash "$(dirname "${BASH_SOURCE[0]}")/lint.sh"
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
make_venv

step "pytest"
# Idle threads of TVM's pool spin by default; two test processes on two cores would fight.
export TVM_THREAD_POOL_SPIN_COUNT="${TVM_THREAD_POOL_SPIN_COUNT:-0}"
jobs="$(nproc 2>/dev/null || echo 1)"
[ "$jobs" -le 8 ] || jobs=8
"$VENV_PYTHON" -m pytest -q -n "$jobs" "$@"
