"""Workers as Pods."""
