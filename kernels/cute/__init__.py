"""CuTe DSL implementations; the only package that imports cutlass."""
