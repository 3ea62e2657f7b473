"""The command line: options in, exit code out."""
