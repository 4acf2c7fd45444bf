"""Run a program without a screen, and take each warning for an error."""

import runpy
import sys
import warnings
from pathlib import Path

import matplotlib

program = sys.argv[1]
matplotlib.use("Agg")
warnings.simplefilter("error")
# A reader has a screen, so an example ends with plt.show(); here is none.
warnings.filterwarnings("ignore", "FigureCanvasAgg is non-interactive", UserWarning)
sys.path[0] = str(Path(program).parent)
runpy.run_path(program, run_name="__main__")
