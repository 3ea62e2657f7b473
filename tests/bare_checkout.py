"""Makes dist_infer importable where it was not installed, for this process and the ones that it starts.

The repository's root must not be on the path for that: comm, kernels and launch would be found under bare names, and
transformers looks for a package called kernels.
"""

import atexit
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path


def make_importable(root: Path) -> None:
    """Take the root off the path; put a folder there that holds a link to the package, unless it is found already."""
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != root]
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    inherited = [entry for entry in inherited if entry and Path(entry).resolve() != root]
    if importlib.util.find_spec("dist_infer") is None:
        folder = tempfile.mkdtemp(prefix="dist-infer-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (Path(folder) / "dist_infer").symlink_to(root / "dist_infer", target_is_directory=True)
        sys.path.insert(0, folder)
        inherited.insert(0, folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(inherited)
