"""The roll-call service and its wire protocol. Standard library only."""
