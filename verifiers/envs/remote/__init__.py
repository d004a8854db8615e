"""Rollouts that are played and scored in other processes: what travels, who plays it there, who asks for it here."""
