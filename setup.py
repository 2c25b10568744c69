"""Packaging of OptiFX for TVM.

``passes/`` and ``schedules/`` lie at the top of the repository and are installed as
``optifx_tvm.passes`` and ``optifx_tvm.schedules``. The links ``optifx_tvm/passes`` and
``optifx_tvm/schedules`` give the same names in a checkout that is not installed; packages are
listed here by their real folders, because a source archive does not hold the links.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
LINKED = ("passes", "schedules")


def version() -> str:
    text = (ROOT / "optifx_tvm" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise RuntimeError('optifx_tvm/__init__.py has no line __version__ = "..."')
    return match.group(1)


def packages() -> list[str]:
    found = find_packages(
        include=["optifx_tvm", "optifx_tvm.*"],
        exclude=[f"optifx_tvm.{name}{end}" for name in LINKED for end in ("", ".*")],
    )
    for name in LINKED:
        found.append(f"optifx_tvm.{name}")
        found += [f"optifx_tvm.{name}.{sub}" for sub in find_packages(name)]
    return found


setup(
    name="optifx-tvm",
    version=version(),
    description="Aggressive fusion of region operators for CNN inference on TVM",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10,<3.14",
    packages=packages(),
    package_dir={f"optifx_tvm.{name}": name for name in LINKED},
    package_data={"optifx_tvm": ["py.typed"]},
    install_requires=[
        # 0.1.15 of the ffi package crashes when a PrimFunc is saved; TVM itself asks only >=0.1.14.
        "apache-tvm==0.27.0.post1",
        "apache-tvm-ffi==0.1.14.post1",
        "numpy",
        # The same import as "xgboost", without the 700 MB of NCCL that the latter pulls on Linux.
        "xgboost-cpu>=2.1; sys_platform != 'darwin'",
        "xgboost>=2.1; sys_platform == 'darwin'",
        "psutil",
        "cloudpickle",
        "onnx",
        "rich",
        "safetensors",
    ],
    extras_require={
        "torch": ["torch>=2.6"],
        "plot": ["matplotlib"],
        "test": [
            "onnxruntime",
            "pyright[nodejs]",
            "pytest>=8",
            "pytest-xdist",
            "ruff",
            "setuptools>=77",
        ],
    },
    entry_points={"console_scripts": ["optifx = optifx_tvm.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Software Development :: Compilers",
    ],
)
