"""The two pictures of a run: its loss, and where its steps spend their time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no display is needed

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from .._files import write_figure
from .loop import PHASES, Record

LABELS = {"plain": "plain PyTorch", "fused": "fusedops"}
COLOURS = {"plain": "#5b6b7b", "fused": "#e4572e"}
PHASE_COLOURS = {"forward": "#7fb2dd", "backward": "#c3dbef", "optimizer": "#f2b661"}


def plot_loss(records: dict[str, list[Record]], results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """Training loss of each run; below, where there are two, the difference between them step by step."""
    both = len(records) == 2
    figure, axes = plt.subplots(
        2 if both else 1, 1, sharex=True, squeeze=False, figsize=(8, 6 if both else 4.5),
        height_ratios=[3, 1] if both else [1], layout="constrained",
    )  # fmt: skip
    top = axes[0, 0]
    for variant, rows in records.items():
        label = f"{LABELS[variant]} (validation {results[variant]['validation_loss']:.4f})"
        style = {"linewidth": 2.6, "alpha": 0.55} if variant == "plain" else {"linewidth": 1.0}
        top.plot([r["step"] + 1 for r in rows], _floats(rows, "loss"), color=COLOURS[variant], label=label, **style)
    top.set_ylabel("training loss (nats per byte)")
    top.set_title(title, loc="left", fontsize=11)
    top.legend(frameon=False)
    _tidy(top)
    if both:
        below = axes[1, 0]
        plain, fused = (_floats(records[variant], "loss") for variant in LABELS)
        below.axhline(0, color="#999999", linewidth=0.8)
        difference = [f - p for p, f in zip(plain, fused, strict=True)]
        below.plot([r["step"] + 1 for r in records["plain"]], difference, color=COLOURS["fused"], linewidth=0.8)
        below.set_ylabel("fusedops − plain")
        _tidy(below)
    axes[-1, 0].set_xlabel("step")
    write_figure(path, figure)
    plt.close(figure)


def plot_steps(results: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    """One bar a run: median milliseconds of a step, split in forward, backward and optimizer."""
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.7 * len(results)), layout="constrained")
    longest = max(sum(result["ms"][phase] for phase in PHASES) for result in results.values())
    for row, result in enumerate(results.values()):
        left = 0.0
        for phase in PHASES:
            width = result["ms"][phase]
            axes.barh(row, width, left=left, height=0.6, color=PHASE_COLOURS[phase], label=phase if row == 0 else None)
            if width > 0.06 * longest:
                axes.text(left + width / 2, row, f"{width:.1f}", ha="center", va="center", fontsize=9)
            left += width
        axes.text(left + 0.01 * longest, row, f"{result['ms']['step']:.1f} ms", va="center", fontweight="bold")
    axes.set_yticks(range(len(results)), [LABELS[variant] for variant in results])
    axes.invert_yaxis()
    axes.set_xlim(0, longest * 1.15)
    axes.set_xlabel("milliseconds (medians: of each part, and in bold of whole steps)")
    axes.set_title(title, loc="left", fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(PHASES), frameon=False)
    _tidy(axes)
    axes.grid(False, axis="y")
    write_figure(path, figure)
    plt.close(figure)


def _floats(rows: list[Record], key: str) -> list[float]:
    """Values of a column; what was not finite becomes a gap in the line."""
    return [float("nan") if row[key] is None else row[key] for row in rows]


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, alpha=0.25, linewidth=0.6)
