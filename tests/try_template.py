"""Apply CONTRIBUTING.md's template of an op to a copy of the tree; build, test and time it; show what it touched.

    python tests/try_template.py [--keep]

The copy is removed at the end. Exit status 0 if every step passed and no other file than the named ones changed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"<!-- (create|insert) (\S+?)(?: after: (.*?))? -->\n```\w+\n(.*?)```", re.DOTALL)
SKIP = shutil.ignore_patterns(
    ".git", ".venv", "build", "dist", "runs", "*.egg-info", "*.so", "__pycache__", ".*_cache", ".?*"
)


def apply(tree: Path) -> set[str]:
    """Carry out the template's steps; return the files they name."""
    steps = STEP.findall((ROOT / "CONTRIBUTING.md").read_text("utf-8"))
    if not steps:
        raise SystemExit("CONTRIBUTING.md holds no template")
    for kind, name, anchor, text in steps:
        path = tree / name
        if kind == "create":
            if path.exists():
                raise SystemExit(f"{name} exists already")
            path.write_text(text, "utf-8")
            continue
        lines = path.read_text("utf-8").splitlines(keepends=True)
        at = [number for number, line in enumerate(lines) if line.rstrip("\n") == anchor]
        if len(at) != 1:
            raise SystemExit(f"{name}: the line {anchor!r} stands there {len(at)} times, not once")
        lines.insert(at[0] + 1, text)
        path.write_text("".join(lines), "utf-8")
    return {name for _, name, _, _ in steps}


def snapshot(tree: Path) -> dict[str, bytes]:
    """Return the contents of every source file."""
    kinds = (".py", ".cpp", ".cu", ".cuh", ".h", ".toml", ".in", ".md", "")
    files = (p for p in tree.rglob("*") if p.is_file() and p.suffix in kinds and "build" not in p.parts)
    return {p.relative_to(tree).as_posix(): p.read_bytes() for p in files if p.name != "_build_info.py"}


def main() -> int:
    """Run all steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the copy and print its path")
    arguments = parser.parse_args()
    tree = Path(tempfile.mkdtemp(prefix="fusedops-template-")) / "fusedops"
    shutil.copytree(ROOT, tree, ignore=SKIP)
    before = snapshot(tree)
    named = apply(tree)
    environment = {**os.environ, "PYTHONPATH": str(tree), "FUSEDOPS_BACKEND": ""}
    run = [sys.executable, "-m"]
    commands = [
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"],
        [*run, "pytest", "-q", "-p", "no:cacheprovider", "tests/test_parity.py", "-k", "null", "--require", "native"],
        [*run, "fusedops.cli", "parity", "--op", "null"],
        [*run, "fusedops.cli", "bench", "null", "--quick", "--out", str(tree.parent / "bench")],
    ]
    try:
        for command in commands:
            print("$", " ".join(command[1:]), flush=True)
            if subprocess.run(command, cwd=tree, env=environment).returncode:
                print("failed:", " ".join(command))
                return 1
        after = snapshot(tree)
        touched = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        if touched != named:
            print("the template names", sorted(named), "but these changed:", sorted(touched))
            return 1
        print(f"template: {len(named)} files, built, tested and timed; 1 passed, 0 failed")
        return 0
    finally:
        if arguments.keep:
            print("kept in", tree)
        else:
            shutil.rmtree(tree.parent)


if __name__ == "__main__":
    sys.exit(main())
