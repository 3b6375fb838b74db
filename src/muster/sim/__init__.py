"""GPU sharing on virtual time: simulated pipelines that drive the real scheduler, or a baseline with its interface.

Guarantees of this package: no real clock, no global random state; a result is a function of scenario, policy and seed.
"""
