"""Imported last by the fork server of ranks and programs: Python searches what it has imported for garbage no more.

A search takes 0.2 s, and in a fork it copies each page that it reads. New objects are searched less often, too: by
default, a step of a small model is a search.
"""

import gc

from dtgpt.parallel.launch import code_digests

code_digests()  # each start compares them: forks need not read all sources again
THRESHOLDS = 10_000, 20, 10  # objects between two searches; 700, 10, 10 by default
gc.collect()
gc.freeze()
gc.enable()
gc.set_threshold(*THRESHOLDS)
