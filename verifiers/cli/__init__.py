"""The program ``vf``: each command reads its arguments into a configuration and makes one call."""
