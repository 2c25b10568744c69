"""Every pass that a test runs is followed by a check that its module is well formed."""

from __future__ import annotations

import pytest
import tvm
from tvm.relax.ir.instrument import WellFormedInstrument


@pytest.fixture(autouse=True)
def well_formed_passes():
    verify = WellFormedInstrument(validate_before_transform=False)
    with tvm.transform.PassContext(instruments=[verify]):
        yield
