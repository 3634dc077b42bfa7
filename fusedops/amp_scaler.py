"""The gradient scaler."""

from __future__ import annotations

import torch


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler."""
