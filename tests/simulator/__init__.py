"""The world on virtual time: simulated workers and guards drive `core.member` and talk to the real `RunProtocol`.

Guarantees of this package: no sockets, no asyncio, no real clock, no global random state. A history is a function
of its seed, so whatever it shows can be shown again (`python -m tests.simulator SEED`).
"""
