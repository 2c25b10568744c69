from __future__ import annotations

import pytest
from tvm.target import Target

from optifx_tvm import device as devices
from optifx_tvm.device import DeviceSpec, known_devices, register_device


@pytest.mark.parametrize(
    ("target", "name", "kilobytes"),
    [
        ({"kind": "cuda", "arch": "sm_90"}, "H200", 227),
        ({"kind": "cuda", "arch": "sm_90a"}, "H200", 227),
        ({"kind": "cuda", "arch": "sm_80"}, "A100", 163),
        ({"kind": "cuda", "arch": "sm_87"}, "Jetson AGX Orin", 163),
        ({"kind": "cuda", "arch": "sm_89"}, "RTX 4090", 99),
        ({"tag": "nvidia/nvidia-h100"}, "H100", 227),
        ("nvidia/nvidia-a100", "A100", 163),
        ("nvidia/geforce-rtx-4090", "RTX 4090", 99),
        ("nvidia/jetson-agx-orin-64gb", "Jetson AGX Orin", 163),
        ({"kind": "cuda", "arch": "sm_86"}, "GPU sm_86", 99),
        ({"kind": "cuda", "arch": "sm_120"}, "GPU sm_120", 99),
        ({"kind": "cuda", "arch": "sm_61"}, "GPU sm_61", 48),
    ],
)
def test_gpus(target, name, kilobytes):
    found = DeviceSpec.from_target(Target(target))
    assert (found.name, found.block_bytes) == (name, kilobytes * 1024)
    assert found.kind == "gpu"


@pytest.mark.parametrize(
    ("target", "cores", "bits"),
    [
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "znver4", "num-cores": 2}, 2, 512),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell"}, 4, 256),
        ({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"}, 4, 128),
    ],
)
def test_cpus(target, cores, bits):
    found = DeviceSpec.from_target(Target(target))
    assert (found.kind, found.units, found.vector_bits) == ("cpu", cores, bits)


def test_cores_and_vectors_scale_the_peak():
    wide, narrow = (
        DeviceSpec.from_target(
            Target({"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": cpu, "num-cores": n})
        )
        for cpu, n in (("znver4", 8), ("x86-64", 2))
    )
    assert wide.fp32_flops == 16 * narrow.fp32_flops
    assert wide.block_bytes == narrow.block_bytes


def test_the_table_is_plausible():
    for found in known_devices():
        assert found.fp32_flops > 1e10
        assert found.dram_bytes_per_s < found.l2_bytes_per_s < found.onchip_bytes_per_s
        assert found.block_bytes > 0
        assert found.units > 0
    assert len({d.name for d in known_devices()}) == len(known_devices()) >= 7


def test_register_device(monkeypatch):
    monkeypatch.setattr(devices, "_DEVICES", dict(devices._DEVICES))
    mine = DeviceSpec.from_target(Target({"kind": "cuda", "arch": "sm_86"}))
    register_device(mine)
    assert DeviceSpec.from_target(Target({"kind": "cuda", "arch": "sm_86"})) is mine
    register_device(devices.RTX_6000_ADA, "sm_89")
    assert DeviceSpec.from_target(Target("nvidia/geforce-rtx-4090")) is devices.RTX_6000_ADA
