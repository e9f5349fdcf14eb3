"""Draw the pictures of the README, which are the last figures of two examples: python tools/readme_pictures.py"""

import runpy
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
PICTURES = {"label_noise": "label_noise.png", "clean_digits": "clean_digits.png"}

for example, name in PICTURES.items():
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"))
    pyplot.gcf().savefig(ROOT / "docs" / "_static" / name, dpi=110)
    pyplot.close("all")
