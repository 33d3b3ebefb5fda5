"""FIRM end to end: one language model, several objectives, several clients, one page of results.

    python recipes/firm_hh.py                                    # the miniature world
    python recipes/firm_hh.py --config configs/hh_tinyllama.yaml # the paper's run
    python recipes/firm_hh.py --strategy.beta 0.5 --rounds 10    # any key, overridden
    python recipes/firm_hh.py --plan                             # what would run
    python recipes/firm_hh.py --resume runs/mine                 # continue after a stop
    torchrun --nproc_per_node 4 recipes/firm_hh.py               # clients on 4 GPUs

A run is a directory: configuration, metrics, checkpoints, the adapter, and `report.html`.
"""

from firm.cli.main import COMMANDS

if __name__ == "__main__":
    COMMANDS["align"].run(description=__doc__ or "")
