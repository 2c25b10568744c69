"""A model uses the cores that it may use: TVM's own default is half of the processors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optifx_tvm.target import default_threads

PROGRAM = """
import numpy as np, tvm, optifx_tvm
from tests.support.small_models import conv_relu
model = optifx_tvm.compile(conv_relu(), "llvm")
model.benchmark(repeat=1)
print(tvm.get_global_func("runtime.NumThreads")())
"""


@pytest.mark.parametrize("chosen", [None, "1"])
def test_threads_of_a_model(chosen: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TVM_NUM_THREADS"}
    environment |= {"TVM_NUM_THREADS": chosen} if chosen else {}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) == (int(chosen) if chosen else default_threads())


def test_default_threads_are_cores_that_may_be_used() -> None:
    assert 1 <= default_threads() <= (os.cpu_count() or 1)
