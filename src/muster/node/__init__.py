"""The worker: agent, guard, warm parent, the round's store, torchrun's backend. Standard library and torch only."""
