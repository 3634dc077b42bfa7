"""The machine code of CUDA kernels: which instructions access memory, and how wide."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest


def tool(name: str) -> str | None:
    """Path of a CUDA tool: in PATH, in the toolkit, or of Triton's own."""
    folders = [Path(root, "bin") for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if root]
    folders += sorted(Path("/usr/local").glob("cuda-*/bin"), reverse=True)
    if triton := importlib.util.find_spec("triton"):
        folders.append(Path(str(triton.origin)).parent / "backends" / "nvidia" / "bin")
    return shutil.which(name) or next((str(f / name) for f in folders if (f / name).is_file()), None)


def instructions(cubin: Path) -> dict[str, Counter[str]]:
    """Mnemonics that access memory, by the kernel's name and template arguments."""
    disassembler = tool("cuobjdump")
    if disassembler is None:
        pytest.skip("no disassembler: cuobjdump of a CUDA toolkit, or Triton's")
    said = subprocess.run([disassembler, "-sass", str(cubin)], capture_output=True, text=True, check=True).stdout
    said = subprocess.run(["c++filt"], input=said, capture_output=True, text=True, check=True).stdout
    found = {}
    for part in said.split("Function : ")[1:]:
        mnemonics = re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?(\S+)", part, re.MULTILINE)
        accesses = (m for m in mnemonics if re.match(r"(LD|ST|ATOM|RED)", m) and not m.startswith("LDC"))
        line = part.splitlines()[0].strip()
        name = re.search(r"(\w+_kernel(<.*>)?)\(", line)
        short = name[1].replace("__nv_bfloat16", "bf16").replace("fusedops::cuda::", "") if name else line
        found[short] = Counter(accesses)
    return found


def bits(mnemonic: str) -> int:
    """Width of an access."""
    sizes = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128}
    return next((sizes[part] for part in mnemonic.split(".")[1:] if part in sizes), 32)


def widths(accesses: Counter[str], kind: str) -> Counter[int]:
    """How many accesses of each width: `load`, `stream` (of what is read once), `copy` (to shared memory), `store`."""
    patterns = {"load": r"LDG\.", "stream": r"LDG\..*LTC128B\b", "copy": r"LDGSTS\.", "store": r"STG\."}
    found: Counter[int] = Counter()
    for mnemonic, count in accesses.items():
        if re.match(patterns[kind], mnemonic):
            found[bits(mnemonic)] += count
    return found
