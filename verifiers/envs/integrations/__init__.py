"""Classic import paths of environments over other makers' packages."""
