"""The build stamp: what `fusedops._C` was built for, and whether that is what runs now.

setup.py runs this file by path, before the package is built, so it imports nothing but the standard library at
the top. The stamp is `fusedops/_build_info.py`: one dictionary, `STAMP`.
"""

import functools
import hashlib
import importlib
import sys
import sysconfig
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict, cast

STAMP_FILE = "_build_info.py"


class Stamp(TypedDict):
    """What one build holds."""

    python: str  # extension suffix tag, as "cpython-311-x86_64-linux-gnu"
    torch: str  # version of the torch built against, "" without native code
    cuda: str  # version of the toolkit, "" without CUDA kernels
    archs: list[str]  # as "80", "90a", "120+PTX"
    csrc: str  # hash of csrc/
    why_not: str  # why there is no native code, "" when there is
    why_no_cuda: str  # why there are no CUDA kernels, "" when there are


def python_tag() -> str:
    """Return the tag that this Python's extension modules carry."""
    return str(sysconfig.get_config_var("SOABI") or sys.implementation.cache_tag)


def new_stamp() -> Stamp:
    """Return the stamp of a build that holds nothing yet."""
    return Stamp(python=python_tag(), torch="", cuda="", archs=[], csrc="", why_not="", why_no_cuda="")


def stamp_source(stamp: Stamp) -> str:
    """Return the text of `_build_info.py`."""
    lines = "".join(f"    {key!r}: {value!r},\n" for key, value in stamp.items())
    return f'"""Written by setup.py."""\n\nSTAMP = {{\n{lines}}}\n'


def csrc_hash(folder: Path) -> str:
    """Return a hash over the names and contents of the sources in `folder`."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".cpp", ".cu", ".cuh", ".h")):
        digest.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def read_stamp() -> Stamp | None:
    """Return the stamp of this installation, None where nothing was ever built."""
    try:
        found = importlib.import_module("fusedops._build_info").STAMP
    except (ImportError, AttributeError, SyntaxError, ValueError, OSError):  # not there, cut short, zeros, not ours
        return None
    if not isinstance(found, dict):
        return None
    stamp: dict[str, Any] = dict(new_stamp())  # an older one may lack keys
    stamp.update({key: found[key] for key, value in stamp.items() if type(found.get(key)) is type(value)})
    return cast("Stamp", stamp)


def rebuild_command() -> str:
    """Return the command that builds this installation anew."""
    root = Path(__file__).resolve().parents[1]
    if (root / "setup.py").exists() and (root / "csrc").exists():
        return f"cd {root} && pip install --no-build-isolation --no-deps -e ."
    return "pip install --no-build-isolation --no-deps --no-cache-dir --force-reinstall <where fusedops came from>"


def misfit(stamp: Stamp, torch_version: str, python: str) -> str | None:
    """Say why a binary must not be loaded into this process.

    torch keeps its C++ ABI within a minor version; a CPU and a CUDA build of the same one are alike to us.

    Args:
        stamp: of the binary.
        torch_version: of the running torch, as "2.13.0+cu130".
        python: tag of the running Python.

    Returns:
        A clause naming both versions, None when the binary fits.
    """
    if torch_version.split(".")[:2] != stamp["torch"].split(".")[:2]:
        return f"the native kernels were built for torch {stamp['torch']}, running is torch {torch_version}"
    if stamp["python"] != python:
        return f"the native kernels were built for {stamp['python']}, running is {python}"
    return None


def covers(archs: list[str], capability: tuple[int, int]) -> bool:
    """Say whether kernels for `archs` run on a GPU of a compute capability.

    Machine code runs on its own major version from its own minor on; PTX runs on everything newer; "a" and "f"
    code is for its own version alone.
    """
    for arch in archs:
        name, _, ptx = arch.partition("+")
        built = divmod(int(name.rstrip("af")), 10)
        if name[-1].isdigit():
            if (built[0] == capability[0] and built[1] <= capability[1]) or (ptx and built <= capability):
                return True
        elif built == capability:
            return True
    return False


@functools.cache
def _load() -> tuple[ModuleType | None, str | None]:
    """Import `_C` once: (module, None) or (None, reason)."""
    import torch

    stamp = read_stamp()
    if stamp is None:
        return None, f"the native kernels were not built; to build them: {rebuild_command()}"
    if stamp["why_not"]:
        return None, f"there are no native kernels: {stamp['why_not']}"
    problem = misfit(stamp, torch.__version__, python_tag())
    if problem is None:
        try:
            module = importlib.import_module("fusedops._C")
        except (ImportError, OSError) as error:
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            problem = f"the native kernels do not load (built for torch {stamp['torch']}): {first}"
        else:
            sources = Path(__file__).resolve().parents[1] / "csrc"
            if sources.is_dir() and csrc_hash(sources) != stamp["csrc"]:
                _warn(f"csrc/ was edited after the native kernels were built; to rebuild: {rebuild_command()}")
            return module, None
    _warn(f"{problem}; plain torch and Triton serve instead. To rebuild: {rebuild_command()}")
    return None, problem


def _warn(message: str) -> None:
    warnings.warn(f"fusedops: {message}", RuntimeWarning, stacklevel=4)


def load_native() -> ModuleType | None:
    """Return `fusedops._C`, or None where it is absent or does not fit; `native_problem` then says why.

    A binary that was built but cannot be used here is warned about once.
    """
    return _load()[0]


def native_problem(device_type: str = "cpu", index: int | None = None) -> str | None:
    """Say why the native kernels cannot run on a device, None when they can.

    Args:
        device_type: "cpu" or "cuda".
        index: of the CUDA device, whose architecture is looked at; None: of any that is visible.

    Returns:
        The reason as one clause, or None.
    """
    import torch

    problem = _load()[1]
    stamp = read_stamp()
    if problem or stamp is None or device_type == "cpu":
        return problem
    if device_type != "cuda":
        return f"there are no native kernels for {device_type}"
    if not stamp["cuda"]:
        return f"the native kernels have no CUDA part: {stamp['why_no_cuda']}"
    if not torch.cuda.is_available():
        return "no CUDA GPU is visible to torch"
    gpus = range(torch.cuda.device_count()) if index is None else [index]
    capabilities = {gpu: torch.cuda.get_device_capability(gpu) for gpu in gpus}
    if any(covers(stamp["archs"], capability) for capability in capabilities.values()):
        return None
    found = ", ".join(
        f"{torch.cuda.get_device_name(gpu)} is sm_{major}{minor}" for gpu, (major, minor) in capabilities.items()
    )
    return f"the native kernels were built for {' '.join(stamp['archs'])}, {found}; to rebuild: {rebuild_command()}"
