"""A fleet that is hurt every half minute, at random and replayable, and audited in the end: `python -m tests.nights`.

`faults` lists what can be done to a run, `schedule` draws and shrinks what is done, `fleet` is the run and `injuries`
hurts it, `watch` finds the first line that names a fault, and `audit` tells which rules a run broke. `simulation` does
the same faults to the queue's decisions in simulated time.
"""
