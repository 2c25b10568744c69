#!/usr/bin/env bash
# From a fresh checkout to a fused SqueezeNet: installs everything into .venv, compiles a real ONNX
# model, runs it, checks it against onnxruntime, prints the fusion plan and times fused against
# unfused. TARGET chooses the target (default: the GPU found, else this CPU).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
make_venv
out=build/demo
mkdir -p "$out"
target=()
[ -z "${TARGET:-}" ] || target=(--target "$TARGET")

step "model: SqueezeNet from the onnx package, with seeded random weights"
"$VENV_PYTHON" scripts/make_squeezenet.py "$out/squeezenet.onnx" "$out/inputs.npz"

step "fusion plan (optifx explain)"
.venv/bin/optifx explain "$out/squeezenet.onnx" "${target[@]}"

step "compile, fused and unfused (optifx compile)"
.venv/bin/optifx compile "$out/squeezenet.onnx" "${target[@]}" -o "$out/fused.so"
.venv/bin/optifx compile "$out/squeezenet.onnx" "${target[@]}" --planner none -o "$out/unfused.so"

step "run (optifx run)"
.venv/bin/optifx run "$out/fused.so" --inputs "$out/inputs.npz" --outputs "$out/outputs.npz"

step "check against onnxruntime, and times"
"$VENV_PYTHON" scripts/compare_onnxruntime.py "$out/squeezenet.onnx" "$out/inputs.npz" \
    "$out/fused.so" "$out/unfused.so"

step "done: try .venv/bin/optifx --help, or '. .venv/bin/activate' and then optifx"
