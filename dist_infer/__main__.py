"""`python -m dist_infer` is the command `dist-infer`."""

import sys

from dist_infer.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
