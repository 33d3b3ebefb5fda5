"""A sweep over preferences: which trade-offs are reachable, and by which method.

    python recipes/pareto_sweep.py                                     # the miniature world
    python recipes/pareto_sweep.py --resume runs/sweep                 # continue after a stop
    python recipes/pareto_sweep.py --preferences '[[0.2, 0.8], [0.8, 0.2]]' --seeds '[0]'
    python recipes/pareto_sweep.py --base configs/hh_tinyllama.yaml --overrides.rounds 8
    python recipes/pareto_sweep.py --plan                              # the points, and one's plan
    python recipes/pareto_sweep.py --overrides.tracking.mode offline  # a group in W&B

Every point is a run of `recipes/firm_hh.py` for one method, preference and seed, with all that
belongs to a run. The folder of the sweep holds them below `points/`, one `METHOD.front.json` per
method, `report.html`, and the figures with their data. Points are divided among processes; the same
command on another machine that shares the folder, with --resume auto, takes its share of them.
"""

from firm.cli.main import run

if __name__ == "__main__":
    run("sweep", description=__doc__ or "")
