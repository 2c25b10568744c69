"""resolve_target: what users write, and what they get wrong."""

from __future__ import annotations

import pytest
import tvm
from tvm.target import Target, codegen

from optifx_tvm.errors import TargetError
from optifx_tvm.target import host_architecture, host_target, is_cuda, resolve_target

no_gpu = pytest.mark.skipif(tvm.cuda(0).exist, reason="a GPU is here")


def test_llvm_has_the_features_of_this_cpu():
    target = resolve_target("llvm")
    assert target.kind.name == "llvm"
    assert target.attrs["mcpu"] == codegen.llvm_get_system_cpu()
    assert target.attrs["num-cores"] >= 1


@no_gpu
def test_default_without_gpu_is_this_cpu():
    assert str(resolve_target(None)) == str(host_target())


@no_gpu
def test_cuda_without_gpu_says_what_to_give():
    with pytest.raises(TargetError, match="no GPU found.*nvidia/nvidia-h100"):
        resolve_target("cuda")


def test_a_target_is_taken_as_it_is():
    target = Target({"kind": "llvm", "num-cores": 3})
    assert resolve_target(target) is target


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("nvidia/nvidia-a100", "sm_80"),
        ("nvidia/nvidia-h100", "sm_90a"),
        ("nvidia/jetson-agx-orin-64gb", "sm_87"),
        ('{"kind": "cuda", "arch": "sm_89"}', "sm_89"),
        ({"kind": "cuda", "arch": "sm_90"}, "sm_90"),
    ],
)
def test_cuda_by_tag_and_json(text, arch):
    target = resolve_target(text)
    assert is_cuda(target)
    assert target.attrs["arch"] == arch
    assert target.host.kind.name == "llvm"


def test_host_of_a_tag_is_kept():
    assert host_architecture(resolve_target("nvidia/jetson-agx-orin-64gb")) == "aarch64"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpu", "unknown target 'gpu': supported: llvm, cuda"),
        ("nvidia/nvidia-h10", "did you mean nvidia/nvidia-h100"),
        ("cuda -arch=sm_90", "unknown target"),
        ('{"kind":', "is not valid JSON"),
        ('{"arch": "sm_90"}', 'neither "kind" nor "tag"'),
        ('{"kind": "cuda"}', 'needs "arch"'),
        ('{"kind": "llvm", "mcpu": "nonsense"}', "LLVM knows no CPU 'nonsense'"),
        ('{"kind": "llvm", "colour": 1}', "Unknown config option 'colour'"),
        ('{"kind": 3}', "target"),
        ('{"tag": "nvidia/none"}', "target"),
        ("apple/m1-gpu", "is of kind metal"),
    ],
)
def test_errors_are_one_clear_line(text, said):
    with pytest.raises(TargetError) as raised:
        resolve_target(text)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)
