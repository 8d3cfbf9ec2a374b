"""Maps folders at the top of the repository into the package; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

NAMES = ("kernels_triton", "kernels_cute", "benchmarks")
FOLDERS = {f"dist_moe.{name}": name for name in NAMES}

packages = find_packages("src")
for name, folder in FOLDERS.items():
    packages += [name] + [f"{name}.{package}" for package in find_packages(folder)]

setup(packages=packages, package_dir={"": "src", **FOLDERS})
