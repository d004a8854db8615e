"""Rollouts that run and are scored in other processes: serialization, the server, and the client."""
