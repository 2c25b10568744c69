"""``scripts/blocks.py`` and the scripts that run its blocks, without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
from tvm.target import Target

import optifx_tvm

SCRIPTS = Path(__file__).parents[1] / "scripts"
TARGET = {"kind": "cuda", "arch": "sm_90"}


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def small_block(kind):
    blocks = importlib.import_module("blocks")
    return next(block for block in blocks.SMALL_BLOCKS if block.kind == kind)


def outputs(block, planner):
    module = importlib.import_module("blocks").relax_module(block)
    model = optifx_tvm.compile(module, "llvm", planner=planner)
    rng = np.random.default_rng(0)
    feed = {info.name: rng.standard_normal(info.shape).astype("float32") for info in model.inputs}
    return feed, model.run(feed)[0]


def test_every_kind_has_a_small_block():
    blocks = importlib.import_module("blocks")
    assert {block.kind for block in blocks.SMALL_BLOCKS} == set(blocks.KINDS)
    assert len({block.name for block in blocks.BLOCKS}) == len(blocks.BLOCKS)


def test_work_of_a_fire_module():
    work = importlib.import_module("blocks").work
    flops, size = work(small_block("fire"), 2, "float16")
    products = 32 * 16 + 16 * 32 + 9 * 16 * 32
    assert flops == 2 * 2 * 13 * 13 * products
    assert size == 2 * (2 * 13 * 13 * (32 + 64) + products + 16 + 32 + 32)


def test_work_of_a_transposed_convolution():
    flops, _ = importlib.import_module("blocks").work(
        small_block("transposed-concat"), 1, "float32"
    )
    assert flops == 2 * 8 * 8 * 32 * 16 * 4


@pytest.mark.parametrize("kind", ["fire", "dense-layer", "transposed-concat", "tail"])
def test_fused_and_unfused_agree(kind):
    block = small_block(kind)
    shape = importlib.import_module("blocks").value_shapes(block)[-1]
    _, fused = outputs(block, "search")
    _, unfused = outputs(block, "none")
    assert fused.shape == (1, *shape)
    assert np.abs(unfused).max() > 0.1
    assert np.linalg.norm(fused - unfused) / np.linalg.norm(unfused) < 1e-5


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_blocks_agree_with_torch():
    import torch

    reference = importlib.import_module("torch_blocks").reference
    for block in importlib.import_module("blocks").SMALL_BLOCKS:
        feed, found = outputs(block, "search")
        expected = reference(block, [torch.from_numpy(x) for x in feed.values()]).numpy()
        error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
        assert error < 1e-5, block.name


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_block_becomes_cuda_source(dtype):
    builds = importlib.import_module("gpu_builds")
    case = builds.BlockCase(small_block("fire"), 1, dtype)
    target = Target(TARGET).with_host(Target("llvm"))
    executable, memory = builds.compile_case(case, target, "search")
    assert memory > 0
    assert any("__global__" in source for source in builds.cuda_sources(executable.mod))


def test_floor_is_the_larger_bound():
    bench, builds = importlib.import_module("bench_blocks"), importlib.import_module("gpu_builds")
    blocks = importlib.import_module("blocks")
    unet = next(b for b in blocks.BLOCKS if b.name.startswith("64-64-64, 256"))
    case = builds.BlockCase(unet, 1, "float32")
    flops, size = blocks.work(unet, 1, "float32")
    assert bench.floor_us(case, json.dumps(TARGET)) == pytest.approx(flops / 67e12 * 1e6)
    tail = builds.BlockCase(small_block("tail"), 1, "float16")
    size = blocks.work(tail.block, 1, "float16")[1]
    assert bench.floor_us(tail, json.dumps(TARGET)) == pytest.approx(size / 4.8e12 * 1e6)


def test_report_of_blocks(capsys):
    bench = importlib.import_module("bench_blocks")
    row = {"kind": "fire", "block": "small", "dtype": "float32", "contenders": {}}
    right = {**row, "peer_over_ours": 2.0, "floor_share": 0.25}
    right["contenders"] = {"ours": {"us": 1.5, "right": True}, "inductor": {"error": "no"}}
    bench.report([right])
    text = capsys.readouterr().out
    assert "1.5" in text and "failed" in text and "2.00" in text and "0.25" in text


@pytest.mark.parametrize(
    ("output", "status", "expected"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, 0),
        ("========= ERROR SUMMARY: 3 errors", 86, 3),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", 0, 0),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", 86, 1),
        ("========= ERROR SUMMARY: 0 errors", 1, None),
        ("the tool did not start", 0, None),
    ],
)
def test_errors_that_a_tool_reports(output, status, expected):
    assert importlib.import_module("sanitize").reported_errors(output, status) == expected
