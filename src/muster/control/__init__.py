"""The control loop: observes each training, asks `core.training.reconcile` what to do, and carries it out."""
