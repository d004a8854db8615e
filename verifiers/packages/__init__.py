"""Environment packages: made, found, described, installed; nothing here imports one."""

from verifiers.packages.install import BundledError, Installed, InstallError, install
from verifiers.packages.listing import Listed, list_environments
from verifiers.packages.new import new_package
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
    "new_package",
    "read_folder",
    "read_wheel",
]
