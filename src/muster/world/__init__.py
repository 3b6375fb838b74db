"""The protocol that keeps a world together, on both of its sides. Standard library only."""
