"""What the footprint analysis and the cost model know about a device.

Units: FLOP/s, bytes/s, bytes, microseconds, bits. A multiply-add is two FLOP. Rates are peaks of
the whole device; the cost model applies efficiencies. "Unit" means a streaming multiprocessor of a
GPU or a core of a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.target import Target, codegen

KB = 1024
MB = 1024 * KB


@dataclass(frozen=True)
class DeviceSpec:
    """One device. Fields that a kind of device lacks are 0."""

    name: str
    kind: str
    """"gpu" or "cpu"."""
    arch: str
    """"sm_90" and the like; "cpu"."""
    units: int
    """SMs of a GPU, cores of a CPU."""
    fp32_flops: float
    """FLOP/s, float32, CUDA cores or vector units, all units together."""
    fp16_flops: float
    """FLOP/s, float16 with float32 accumulation (GPU: tensor cores, dense)."""
    dram_bytes_per_s: float
    l2_bytes_per_s: float
    """L2 of a GPU (whole device); of a CPU: all cores' own L2 caches together."""
    l2_bytes: int
    """GPU: of the device. CPU: of one core."""
    onchip_bytes_per_s: float
    """Shared memory of a GPU, L1 of a CPU; all units together."""
    onchip_bytes: int
    """Shared memory of one SM, L1 data cache of one core."""
    block_bytes: int
    """Most bytes that one block may keep on chip: GPU: shared memory per block (opt-in limit);
    CPU: what of a core's L2 a tile may use."""
    launch_us: float
    """One kernel: a node of a CUDA graph, or one parallel region of TVM's thread pool."""
    task_us: float = 0.0
    """CPU: overhead of one task (tile) of a parallel region."""
    registers: int = 0
    """GPU: 32-bit registers of one SM."""
    l3_bytes: int = 0
    l3_bytes_per_s: float = 0.0
    vector_bits: int = 0
    """CPU: width of a vector register."""

    @property
    def has_mma(self) -> bool:
        """GPU: does it have mma.m16n8k16 of float16 (Ampere and later)?"""
        return self.kind == "gpu" and _version(self.arch) >= 80

    @property
    def clock(self) -> float:
        """GPU: clocks per second (boost), from the peak of 128 multiply-adds per clock and SM."""
        return self.fp32_flops / (256 * self.units)

    @staticmethod
    def from_target(target: Target) -> DeviceSpec:
        """The device that a TVM target means: by its tag, else its arch, else its kind.

        ``num-cores`` of an llvm target sets the number of cores (4 if it has none), its CPU the
        vector width. TVM keeps the tag only of ``Target({"tag": ...})``: a tag given as a string
        means its architecture. An unknown GPU is taken for the nearest architecture below it.
        """
        if target.kind.name == "cuda":
            return _gpu(str(target.tag), str(target.attrs.get("arch", "")))
        return _cpu(int(target.attrs.get("num-cores", 0)) or 4, _vector_bits(target))


def _gpu_spec(
    name: str,
    arch: str,
    units: int,
    teraflops: tuple[float, float],
    gigabytes_per_s: tuple[float, float, float],
    l2_bytes: int,
) -> DeviceSpec:
    """A GPU; ``teraflops`` (fp32, fp16), ``gigabytes_per_s`` (DRAM, L2, shared memory)."""
    dram, l2, shared = gigabytes_per_s
    limit = SHARED_LIMIT[arch]
    return DeviceSpec(
        name=name,
        kind="gpu",
        arch=arch,
        units=units,
        fp32_flops=teraflops[0] * 1e12,
        fp16_flops=teraflops[1] * 1e12,
        dram_bytes_per_s=dram * 1e9,
        l2_bytes_per_s=l2 * 1e9,
        l2_bytes=l2_bytes,
        onchip_bytes_per_s=shared * 1e9,
        onchip_bytes=limit + KB,
        block_bytes=limit,
        launch_us=1.0,
        registers=65536,
    )


SHARED_LIMIT = {
    "sm_70": 96 * KB,
    "sm_75": 64 * KB,
    "sm_80": 163 * KB,
    "sm_86": 99 * KB,
    "sm_87": 163 * KB,
    "sm_89": 99 * KB,
    "sm_90": 227 * KB,
    "sm_100": 227 * KB,
    "sm_103": 227 * KB,
    "sm_110": 227 * KB,
    "sm_120": 99 * KB,
    "sm_121": 99 * KB,
}
"""Shared memory that one block may have, by architecture (CUDA programming guide)."""

# Vendors' data sheets: fp16 is dense tensor-core throughput with float32 accumulation. L2 and
# shared bandwidths: bytes per clock and SM (64 and 128) times the boost clock; L2 is capped at
# what published micro-benchmarks reach.
H200 = _gpu_spec("H200", "sm_90", 132, (67.0, 989.0), (4800, 5500, 30900), 50 * MB)
H100 = _gpu_spec("H100", "sm_90", 132, (67.0, 989.0), (3350, 5500, 30900), 50 * MB)
A100 = _gpu_spec("A100", "sm_80", 108, (19.5, 312.0), (1555, 4500, 19500), 40 * MB)
RTX_4090 = _gpu_spec("RTX 4090", "sm_89", 128, (82.6, 165.0), (1008, 5000, 41300), 72 * MB)
RTX_6000_ADA = _gpu_spec("RTX 6000 Ada", "sm_89", 142, (91.1, 364.0), (960, 5500, 45500), 96 * MB)
ORIN = _gpu_spec("Jetson AGX Orin", "sm_87", 16, (5.3, 42.5), (205, 1300, 2660), 4 * MB)


def _cpu(cores: int, vector_bits: int) -> DeviceSpec:
    """A CPU at 3.3 GHz. Two 256-bit or one 512-bit fused multiply-add a clock (32 FLOP); with 128
    bits: two separate operations a clock."""
    flops = {512: 32, 256: 32}.get(vector_bits, 8) * 3.3e9 * cores
    return DeviceSpec(
        name=f"CPU ({cores} cores, {vector_bits}-bit)",
        kind="cpu",
        arch="cpu",
        units=cores,
        fp32_flops=flops,
        fp16_flops=flops / 4,
        dram_bytes_per_s=10e9 * cores,
        l2_bytes_per_s=100e9 * cores,
        l2_bytes=MB,
        onchip_bytes_per_s=200e9 * cores,
        onchip_bytes=32 * KB,
        block_bytes=768 * KB,
        launch_us=4.0,
        task_us=0.5,
        l3_bytes=16 * MB,
        l3_bytes_per_s=30e9 * cores,
        vector_bits=vector_bits,
    )


def _vector_bits(target: Target) -> int:
    if codegen.llvm_cpu_has_features("avx512f", target):
        return 512
    return 256 if codegen.llvm_cpu_has_features("avx2", target) else 128


GENERIC_CPU = _cpu(4, 256)

_DEVICES: dict[str, DeviceSpec] = {}


def register_device(device: DeviceSpec, *tags: str) -> None:
    """Make ``device`` what targets with these TVM tags mean; without tags: what its ``arch`` means.

    A later registration replaces an earlier one.
    """
    for key in tags or (device.arch,):
        _DEVICES[key] = device


def known_devices() -> tuple[DeviceSpec, ...]:
    """Every registered device, in order of registration, without repetition."""
    return tuple(dict.fromkeys((*_DEVICES.values(), GENERIC_CPU)))


register_device(H200, "sm_90")
register_device(H100, "nvidia/nvidia-h100")
register_device(A100, "sm_80", "nvidia/nvidia-a100")
register_device(RTX_4090, "sm_89", "nvidia/geforce-rtx-4090")
register_device(RTX_6000_ADA, "nvidia/rtx-6000-ada")
register_device(ORIN, "sm_87", "nvidia/jetson-agx-orin-64gb", "nvidia/jetson-agx-orin-32gb")


def _gpu(tag: str, arch: str) -> DeviceSpec:
    if tag in _DEVICES:
        return _DEVICES[tag]
    arch = arch.rstrip("af")  # sm_90a has the resources of sm_90
    if arch in _DEVICES:
        return _DEVICES[arch]
    version = _version(arch)
    below = [d for d in _DEVICES.values() if _version(d.arch) <= version]
    nearest = max(below, key=lambda d: _version(d.arch)) if below else A100
    limit = SHARED_LIMIT.get(arch, 48 * KB if version < 70 else nearest.block_bytes)
    return replace(
        nearest, name=f"GPU {arch}", arch=arch, block_bytes=limit, onchip_bytes=limit + KB
    )


def _version(arch: str) -> int:
    digits = arch.removeprefix("sm_")
    return int(digits) if digits.isdigit() else 0
