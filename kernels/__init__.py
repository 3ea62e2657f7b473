"""Bytes within one device: kernels, their references and the choice between them."""

if __name__ != "dist_infer.kernels":
    raise ImportError(f"{__name__!r} is the kernels folder of dist-infer: import it as 'dist_infer.kernels'")
