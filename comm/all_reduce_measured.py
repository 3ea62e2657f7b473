"""The fastest way of an all-reduce, as measured by `dist-infer tune`: data."""

from dist_infer.comm.strategy import Strategy, Table

TABLE: Table = {
    ("NVIDIA H200", 2, "none", 4096): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "none", 6144): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "none", 7168): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "none", 8192): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "norm", 4096): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "norm", 6144): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "norm", 7168): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "norm", 8192): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "quant", 4096): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "quant", 6144): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "quant", 7168): ((4096, Strategy.ONE_SHOT),),
    ("NVIDIA H200", 2, "quant", 8192): ((4096, Strategy.ONE_SHOT),),
}
