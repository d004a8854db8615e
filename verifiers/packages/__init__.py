"""Environment packages: create, find, describe and install them, without importing them."""

from verifiers.packages.install import BundledError, Installed, InstallError, install, local_folder, uninstall
from verifiers.packages.listing import Listed, list_environments
from verifiers.packages.new import new_package
from verifiers.packages.publish import publish, read_verdict
from verifiers.packages.source import Argument, NotAnEnvironmentError, Package, read_folder, read_wheel

__all__ = [
    "Argument",
    "BundledError",
    "InstallError",
    "Installed",
    "Listed",
    "NotAnEnvironmentError",
    "Package",
    "install",
    "list_environments",
    "local_folder",
    "new_package",
    "publish",
    "read_folder",
    "read_verdict",
    "read_wheel",
    "uninstall",
]
