"""The world on virtual time: simulated agents and guards that talk to the real `RunProtocol`.

Guarantees of this package: no sockets, no asyncio, no real clock, no global random state. A history is a function
of its seed, so whatever it shows can be shown again (`python -m muster.sim SEED`).
"""
