"""Maps the kernel folders at the top of the repository into the package; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

KERNELS = {"dist_moe.kernels_triton": "kernels_triton", "dist_moe.kernels_cute": "kernels_cute"}

packages = find_packages("src")
for name, folder in KERNELS.items():
    packages += [name] + [f"{name}.{package}" for package in find_packages(folder)]

setup(packages=packages, package_dir={"": "src", **KERNELS})
