"""oneDNN on a CPU, through the operators that torch has for it."""
