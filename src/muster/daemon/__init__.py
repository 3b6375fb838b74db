"""The control plane as a process: store, coordinator, control loop, backend and HTTP API on one event loop.

    python -m muster.daemon --home DIR

`plane` puts the parts together; `local` and `kube` are the places where it can live.
"""
