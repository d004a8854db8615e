"""Classic import paths of environments based on other packages."""
