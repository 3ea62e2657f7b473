"""Processes: how ranks start, find each other, wait, fail and leave. The only door to mpi4py and cloudpickle."""

if __name__ != "dist_infer.launch":
    raise ImportError(
        f"this folder is the package dist_infer.launch, but it was imported as {__name__!r}; import dist_infer.launch, "
        "and keep the repository's root off sys.path (python -P, or PYTHONSAFEPATH=1)"
    )
