"""The CPU kernels of the instruction sets below this machine's: each has vectors, tails and sums of its own length."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fusedops.backends import native

CHECK = """
import sys
from fusedops import _C
from fusedops.cli import main
print(_C.build_info()["cpu_isa"])
sys.exit(main(["parity", "--device", "cpu", "--backend", "native"]))
"""


@pytest.mark.parametrize("cap", ["default", "avx2"])
def test_lower_instruction_sets_keep_the_bound(cap, need_backend):
    """Every op's quick cases, in a process that may use no more than ``cap``."""
    need_backend("native")
    found = native._C.build_info()["cpu_isa"]
    if found == "default" or (found, cap) == ("avx2", "avx2"):
        pytest.skip(f"this machine's own is {found}")
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": cap}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == cap
    assert done.returncode == 0, done.stdout + done.stderr
