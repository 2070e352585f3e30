"""Former name of classify.py. It will be removed in the next version."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    print("scripts/predict.py is now scripts/classify.py: use the new name", file=sys.stderr)
    runpy.run_path(str(Path(__file__).with_name("classify.py")), run_name="__main__")
