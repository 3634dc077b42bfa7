"""The tuner: measures the backends on this machine and writes rows of the dispatch table.

``cells`` says what to measure, ``measure`` does it with the clock and the parity gate of ``fusedops bench``, ``store``
keeps what was measured, ``table`` makes rows of it, ``model`` records the calls of a model's step.
"""
