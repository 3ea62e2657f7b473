"""dist-infer: an LLM inference worker that MPI launches over many GPUs."""

__version__ = "0.1.0"
