"""`fusedops report`: what is installed here, which backends can run, and why the others cannot."""

import argparse
import getpass
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import torch

import fusedops
from fusedops import _build
from fusedops.backends import backends
from fusedops.config import BACKENDS, CONFIG
from fusedops.machine import cpu_name

# Beside our own variables: what changes how kernels are built or run.
VARIABLES = ("CUDA_HOME", "CUDA_VISIBLE_DEVICES", "TORCH_CUDA_ARCH_LIST", "TRITON_INTERPRET", "OMP_NUM_THREADS")
Facts = dict[str, dict[str, str]]


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "report", help="what is installed here and which backends can run", description=__doc__
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--issue", action="store_true", help="print a block for a bug report, without names and paths")
    parser.add_argument(
        "--require",
        metavar="BACKENDS",
        type=_backend_names,
        default=[],
        help="exit with 1 unless all of these can run here, as in native,triton",
    )


def run(args: argparse.Namespace) -> int:
    """Print the report; 1 when a required backend cannot run."""
    facts = collect()
    if args.json:
        print(json.dumps(facts, indent=2))
    elif args.issue:
        print(issue_block(facts))
    else:
        _print_table(facts)
    missing = [f"{name}: {reason}" for name in args.require if (reason := facts["backends"][name]) != "yes"]
    for line in missing:
        print(f"required, but cannot run here: {line}", file=sys.stderr)
    return 1 if missing else 0


def report() -> None:
    """Print what is installed here: GPU, driver, versions, every backend or why it cannot run, build, settings."""
    print(as_text(collect()))


def collect() -> Facts:
    """Gather the facts, section by section; a backend's value is "yes" or the reason why it cannot run here."""
    return {
        "versions": _versions(),
        "hardware": _hardware(),
        "backends": {name: reason or "yes" for name, reason in backends().items()},
        "build": _build_facts(),
        "settings": {"dispatch table": _table_source()} | _environment(),
    }


def as_text(facts: Facts) -> str:
    """Lay the facts out as plain text, one section after the other."""
    width = max(len(key) for rows in facts.values() for key in rows)
    blocks = [
        [section, *(f"  {key:<{width}}  {value}" for key, value in rows.items())] for section, rows in facts.items()
    ]
    return "\n\n".join("\n".join(block) for block in blocks)


def issue_block(facts: Facts) -> str:
    """Return a markdown block for a bug report, free of user names and home folders."""
    text = sanitise(as_text(facts), str(Path.home()), _user())
    return f"<details><summary>fusedops report</summary>\n\n```text\n{text}\n```\n\n</details>"


def sanitise(text: str, home: str, user: str) -> str:
    """Replace home folders by `~` and the user's name in paths by `<user>`.

    Args:
        text: what is to be shown to others.
        home: the user's home folder.
        user: the user's login name, "" when unknown.
    """
    text = re.sub(rf"{re.escape(home.rstrip('/'))}(?=[/\\\s:'\"]|$)", "~", text) if len(home) > 1 else text
    text = re.sub(r"(/home/|/Users/|[A-Za-z]:\\Users\\)[^/\\\s:'\"]+", "~", text)
    return re.sub(rf"(?<=[/\\]){re.escape(user)}(?=[/\\\s:'\"]|$)", "<user>", text) if user else text


def _backend_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in BACKENDS]:
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(BACKENDS)}, got {', '.join(unknown)}")
    return names


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's numeric user has no name
        return ""


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> dict[str, str]:
    cuda, hip = torch.version.cuda, torch.version.hip
    return {
        "fusedops": fusedops.__version__,
        "torch": f"{torch.__version__}, " + (f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "no CUDA"),
        "triton": _version_of("triton"),
        "python": f"{platform.python_version()}, {platform.platform()}",
    }


def _hardware() -> dict[str, str]:
    facts = {"cpu": f"{cpu_name()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"}
    if not torch.cuda.is_available():
        return facts | {"gpu": "none that torch can use", "driver": _driver()}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        facts[f"gpu {index}"] = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
    return facts | {"driver": _driver()}


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "no NVIDIA driver found (nvidia-smi)"
    return ", ".join(sorted(set(output.split()))) or "unknown"


def _build_facts() -> dict[str, str]:
    stamp = _build.read_stamp()
    if stamp is None or stamp["why_not"]:
        return {"native": f"none: {stamp['why_not']}" if stamp else "none: never built here"}
    cuda = f"CUDA {stamp['cuda']} for {' '.join(stamp['archs'])}" if stamp["cuda"] else f"none: {stamp['why_no_cuda']}"
    return {
        "native": f"for torch {stamp['torch']}, {stamp['python']}, sources {stamp['csrc']}",
        "native CUDA": cuda,
    }


def _table_source() -> str:
    from fusedops.dispatch_table import load, tuned

    devices = [("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
    *given, shipped = dict.fromkeys(row.source for row in load(CONFIG.table))
    here = dict.fromkeys(
        row.source for device in [*devices, ("cpu", -1)] for rows in tuned(*device).values() for row in rows
    )
    return ", then ".join([*given, *here, shipped])


def _environment() -> dict[str, str]:
    return dict(CONFIG.given) | {name: value for name in VARIABLES if (value := os.environ.get(name))}


def _print_table(facts: Facts) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        print(as_text(facts))
        return
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, (section, rows) in enumerate(facts.items()):
        if number:
            table.add_row()
        table.add_row(Text(section, style="bold"))
        for key, value in rows.items():
            style = ("green" if value == "yes" else "yellow") if section == "backends" else ""
            table.add_row(Text(f"  {key}"), Text(value, style=style))
    Console().print(table)
