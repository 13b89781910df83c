"""Layer: cli."""
