"""The command `fusedops`: one module per subcommand, imported only when that subcommand is asked for.

A module holds `add_parser(subparsers)` and `run(args) -> int`, the exit status. What it needs beyond torch comes
with `pip install 'fusedops[cli]'`; a missing part breaks its own command alone.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

import torch

import fusedops

COMMANDS = {
    "report": "what is installed here and which backends can run",
    "parity": "check every op on this machine against plain torch in float64",
    "bench": "time ops and optimizers beside torch and other packages",
    "tune": "measure the backends on this machine and use the best from now on",
    "train": "train a GPT on real text, plain PyTorch against fusedops",
}
EXTRAS = ("rich", "matplotlib", "pynvml", "safetensors", "numpy")


def parse_device(text: str) -> torch.device:
    """Parse the value of `--device`."""
    try:
        found = torch.device(text)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected a device, as cpu, cuda or cuda:1, got {text!r}") from None
    if found.type == "meta":
        raise argparse.ArgumentTypeError(f"expected a device that computes, got {text!r}")
    count = torch.cuda.device_count()
    if found.type == "cuda" and (found.index or 0) >= count:
        raise argparse.ArgumentTypeError(f"this torch sees {count} CUDA devices, got {text!r}")
    return found


def listed(*choices: str) -> Callable[[str], list[str]]:
    """Return a parser of comma-separated choices."""

    def parse(text: str) -> list[str]:
        given = [part for part in text.split(",") if part]
        if unknown := [part for part in given if part not in choices]:
            raise argparse.ArgumentTypeError(f"expected any of {', '.join(choices)}, got {', '.join(unknown)}")
        return given

    return parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: the arguments, those of the process when None.

    Returns:
        The exit status: 0, or what the subcommand says; 2 when it cannot start.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(prog="fusedops", description="Fused kernels for training transformers.")
    parser.add_argument("--version", action="version", version=f"fusedops {fusedops.__version__}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    try:
        for name, summary in COMMANDS.items():
            if argv[:1] == [name]:
                module = importlib.import_module(f"fusedops.cli.{name}")
                module.add_parser(subparsers)
                parser.set_defaults(run=module.run)
            else:
                subparsers.add_parser(name, help=summary)
        args = parser.parse_args(argv)
        status: int = args.run(args)
        return status
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRAS:
            raise
        print(f"fusedops {argv[0]} needs {error.name}: pip install 'fusedops[cli]'", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
