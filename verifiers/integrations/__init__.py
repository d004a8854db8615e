"""Other projects' types ↔ ours, one module for each; none of them imports another."""
