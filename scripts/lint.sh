#!/usr/bin/env bash
# Lint and type check, as scripts/test.sh and CI do.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
make_venv

step "ruff check"
.venv/bin/ruff check .
step "ruff format --check"
.venv/bin/ruff format --check .
step "pyright"
.venv/bin/pyright --pythonpath "$VENV_PYTHON"
