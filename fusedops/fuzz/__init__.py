"""Fuzzing: cases drawn at random, judged as every other case is.

``draw`` and ``draw_optimizer`` make a case out of a random number generator, so that a sweep of many cases and a
shrinking search draw alike; ``sweep`` runs them cell by cell. A case is named by its cell, the sweep's seed and its
number, as ``layer_norm/native/bf16-fp32/0/17``, and ``/large`` where it is: the name alone makes it again. Nothing here
names an op.
"""
