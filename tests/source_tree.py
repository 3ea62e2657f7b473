"""The source files of the project, and the import name of each."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
# Real folder -> import name. dist_infer holds links to the other three, which are not followed.
PACKAGE_DIRS = {"dist_infer": "dist_infer"} | {name: f"dist_infer.{name}" for name in ("comm", "kernels", "launch")}


def source_files() -> dict[str, Path]:
    """Import name -> file, of every module and package of the product."""
    found = {}
    for folder, package in PACKAGE_DIRS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):  # rglob does not follow links
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            found[name] = path
    return found


def is_package(path: Path) -> bool:
    """Whether the file is the __init__ of a package."""
    return path.name == "__init__.py"
