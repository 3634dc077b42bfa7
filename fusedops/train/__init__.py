"""The main job: one GPT trained twice on real text, with plain PyTorch and with fusedops."""
