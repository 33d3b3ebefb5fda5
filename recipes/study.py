"""A study: several settings of a run, each with several seeds, side by side.

    python recipes/study.py --config configs/figures.yaml --out runs/figures --num_workers 2
    python recipes/study.py --resume runs/figures                      # continue after a stop
    python recipes/study.py --config configs/figures.yaml --plan
    python recipes/study.py --settings "{A: {}, B: {overrides: {strategy.beta: 0}}}"

Every setting and seed is a run of `recipes/firm_hh.py`, with all that belongs to a run, below
`points/` in the study's folder; the folder's `report.html` sets them side by side, and `figures/`
has that for a paper, as PNG, SVG and CSV. It may be killed and taken up again; the same command on
another machine that shares the folder, with --resume auto, takes its share of the runs.
"""

from firm.cli.main import run

if __name__ == "__main__":
    run("study", description=__doc__ or "")
