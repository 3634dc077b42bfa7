"""Speed tests behind ``fusedops bench``: parity first, then time, beside the packages that are installed.

``ops`` runs every op of a family and ``optimizers`` every optimizer, both from their records in ``fusedops.registry``;
``peers`` holds the other packages, ``timing`` the clock, ``report`` what is written and drawn.
"""
