"""The control loop: observes each training, asks `core.reconcile` what to do, and carries it out."""
