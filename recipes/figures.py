"""Figures 1 to 6 and Table 1 of the FIRM paper, replayed from the runs of configs/figures.yaml.

    make figures  # the runs, then this:
    python recipes/figures.py --study runs/figures --out docs/figures

Reads the study's finished runs; writes each figure as PNG and SVG with its data as CSV, and a page
that puts the paper's claims beside what was measured. With fewer seeds finished than asked for, the
seeds that all settings have are used, and the page says so.
"""

from firm.cli.main import run

if __name__ == "__main__":
    run("figures", description=__doc__ or "")
