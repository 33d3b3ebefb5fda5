"""Federated multi-objective learning on images, tables and text: any algorithms, side by side.

    python recipes/fmoo.py                                       # two-digit images, a minute
    python recipes/fmoo.py --config configs/fmoo/multi_mnist.yaml --data.path mnist.npz
    python recipes/fmoo.py --rounds 60 --seeds '[0, 1, 2]' --out runs/mine
    python recipes/fmoo.py --resume runs/mine                    # continue after a stop

A study is a directory with a run for every algorithm and seed, and `comparison.html` and
`summary.csv` over all of them. Every run has its configuration, metrics and a checkpoint, and goes
on where it was stopped.
"""

from firm.cli.main import run

if __name__ == "__main__":
    run("fmoo", description=__doc__ or "")
