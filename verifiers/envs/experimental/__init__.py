"""Classic import paths of environments that were new in 0.1.x."""
